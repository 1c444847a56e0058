"""What a chat's template leaves out is refused by name, and what it writes is taken."""

import pytest

from tests.inference.server.http_client import TEMPLATE, post
from tests.inference.server.tools.templates import HERMES, LLAMA3

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
HELLO = {"role": "user", "content": "hello"}
NAMED = TEMPLATE.replace("{{ m.role }}:", "{{ m.role }} {{ m.name }}:")
OF_USERS = TEMPLATE.replace("{{ m.role }}:", "{{ m.name if m.role == 'user' }}:")
FIRST = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}{% endif %}{% endfor %}"
)
THINKS = TEMPLATE + "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"


def call(name: str = "f", number: int = 1) -> dict:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": "{}"}}


def calls(*names: str) -> dict:
    made = [call(name, number) for number, name in enumerate(names)]
    return {"role": "assistant", "content": "", "tool_calls": made}


def answered(name: str | None = None, number: int = 0) -> dict:
    made = {"role": "tool", "content": "3", "tool_call_id": f"c{number}"}
    return made if name is None else made | {"name": name}


def asked(path: str, messages: list[dict], template: str, **more):
    body = {"messages": messages} | ({} if path == TOKENIZE else {"max_tokens": 1}) | more
    return post(path, body, chat_template=template)


@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
@pytest.mark.parametrize(
    ("template", "messages", "param"),
    [
        (TEMPLATE, [HELLO | {"name": "Bob"}], "messages[0].name"),
        (TEMPLATE, [HELLO, HELLO | {"name": "hello"}], "messages[1].name"),
        (OF_USERS, [HELLO | {"name": "a"}, calls() | {"name": "Bob"}], "messages[1].name"),
        (TEMPLATE, [HELLO, calls("f"), HELLO], "messages[1].tool_calls"),
        (TEMPLATE, [HELLO, calls("f"), answered()], "messages[1].tool_calls"),
        (FIRST, [HELLO, calls("f", "g"), answered()], "messages[1].tool_calls[1]"),
        (HERMES, [HELLO, calls("f"), answered("other")], "messages[2].name"),
        (FIRST, [HELLO, {"role": "system", "content": "Obey"}], "messages[1].content"),
    ],
)
def test_what_a_template_leaves_out_is_refused_by_name(path, template, messages, param):
    response = asked(path, messages, template)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert "--chat-template FILE" in error["message"]


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (NAMED, [HELLO | {"name": "Bob"}, calls() | {"name": "Bob"}]),
        (OF_USERS, [HELLO | {"name": "Bob"}]),
        (TEMPLATE, [HELLO | {"name": ""}, calls() | {"name": None}]),
        (HERMES, [HELLO, calls("f", "g"), answered("f"), answered("g", 1)]),
        (HERMES, [HELLO, calls("f"), answered()]),
        (LLAMA3, [HELLO, calls("f") | {"content": "I look."}, answered()]),
        (FIRST, [{"role": "system", "content": "Obey"}, HELLO, HELLO]),
        (TEMPLATE, [HELLO | {"content": ""}, HELLO, HELLO]),
        (TEMPLATE, [HELLO, calls() | {"reasoning_content": "Hm."}, HELLO]),
    ],
)
def test_what_a_template_writes_is_taken(template, messages):
    response = asked(TOKENIZE, messages, template)
    assert response.status_code == 200, response.text


def test_variables_that_a_template_does_not_look_up_are_refused():
    for template in (TEMPLATE, THINKS):
        for name in ("thinking", "message", "m"):
            variables = {name: True}
            response = asked(CHAT, [HELLO], template, chat_template_kwargs=variables)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "chat_template_kwargs")
            assert error["message"].startswith(f"chat_template_kwargs.{name}: ")
    assert "enable_thinking" in error["message"]
    variables = {"enable_thinking": False}
    assert asked(CHAT, [HELLO], THINKS, chat_template_kwargs=variables).status_code == 200
