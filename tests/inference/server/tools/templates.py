"""Chat templates for tests, as models of two kinds have them."""

HERMES = """\
{%- if tools %}<|im_start|>system
{%- if messages[0].role == "system" %}
{{ messages[0].content }}
{%- endif %}
Functions:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Call one by <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% elif messages[0].role == "system" %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set chat = messages[1:] if messages[0].role == "system" else messages %}
{%- for message in chat %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{%- if "tool_calls" in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- "<|start|>assistant<|end|>\\n\\n" -}}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot|>
{%- elif message.role == "tool" %}
{{- "<|start|>ipython<|end|>\\n\\n" + message.content | tojson + "<|eot|>" }}
{%- else %}
{{- "<|start|>" + message.role + "<|end|>\\n\\n" }}
{%- if loop.first and tools %}Functions:
{%- for tool in tools %} {{ tool | tojson }}{% endfor %}
{% endif %}
{{- message.content + "<|eot|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant<|end|>\\n\\n" }}{% endif %}"""

CODER = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>{{ call.function.arguments }}</function>
</tool_call>
{%- endfor %}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
