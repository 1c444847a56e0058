"""Calls between tags: Hermes 2 and 3, Qwen 2.5, Qwen 3 and many others.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from inference.server.tools.parser import ToolFormat

FORMAT = ToolFormat(
    name="hermes",
    marker="<tool_call>",
    opening="<tool_call>\n",
    arguments_key="arguments",
    closing="\n</tool_call>",
    separator="\n",
)
