"""What a chat template does with tools is found by rendering."""

import pytest

from formats.chat_template import render_chat
from formats.tokenizer import load_tokenizer
from inference.server.tools.use import tool_support
from tests.inference.server.tools import templates


@pytest.fixture(scope="module")
def tokenizer(make_model):
    """A tokenizer of the module's own, whose template tests set."""
    return load_tokenizer(make_model())


@pytest.mark.parametrize(
    ("template", "told", "name"),
    [
        (templates.HERMES, True, "hermes"),
        (templates.LLAMA3, True, "llama3"),
        (templates.CODER, True, None),
        (templates.PLAIN, False, None),
        ("{{ raise_exception('no') }}", False, None),
        ("{{ tools.nothing.at.all }}", False, None),
        (None, False, None),
    ],
)
def test_the_template_tells_the_format(tokenizer, template, told, name):
    tokenizer.chat_template = template
    support = tool_support(tokenizer)
    assert (support.declared, support.tool_format and support.tool_format.name) == (told, name)


def test_settings_may_name_the_format(tokenizer):
    tokenizer.chat_template = templates.CODER
    assert tool_support(tokenizer, "hermes").tool_format.name == "hermes"


def test_tools_stand_in_the_rendered_chat(tokenizer):
    tokenizer.chat_template = templates.HERMES
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    assert '"name": "add"' in render_chat(
        tokenizer, [{"role": "user", "content": "?"}], tools=[tool]
    )
