"""Calls as bare JSON, perhaps after a special token: Llama 3.1, 3.2 and 3.3.

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}

The special token is not part of the decoded text where the tokenizer calls it special: what is left
is the bare form, and an answer that begins with anything else is text.
"""

from inference.server.tools.parser import ToolFormat

FORMAT = ToolFormat(
    name="llama3",
    marker="<|python_tag|>",
    bare=True,
    opening="",
    arguments_key="parameters",
    closing="",
    separator="; ",
)
