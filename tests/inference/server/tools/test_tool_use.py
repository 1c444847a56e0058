"""The tools of a request: what is refused, and what the model is held to."""

import json

import pytest
import xgrammar
from pydantic import ValidationError

from formats.errors import RequestError
from inference.server.schema.chat import MOST_TOOLS, ToolFields
from inference.server.tools.parser import FORMATS
from inference.server.tools.use import ToolSupport, ToolUse

ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
ADD["parameters"] |= {"required": ["a"], "additionalProperties": False}
FIND = {"name": "find"}


def fields(*functions, **other):
    tools = [{"type": "function", "function": function} for function in functions]
    return ToolFields.model_validate({"tools": tools, **other})


def support(name):
    return ToolSupport(True, FORMATS[name])


@pytest.fixture(scope="module")
def accepts():
    """Whether a constraint takes a text as a whole."""
    info = xgrammar.TokenizerInfo([bytes([i]).decode("latin-1") for i in range(128)])
    compiler = xgrammar.GrammarCompiler(info)

    def takes(constraint, text):
        compiled = compiler.compile_structural_tag(constraint.text)
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        return matcher.accept_string(text) and matcher.is_completed()

    return takes


def hermes(*calls):
    text = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    return "\n".join(text.format(*call) for call in calls)


def llama3(*calls):
    return "; ".join('{{"name": "{}", "parameters": {}}}'.format(*call) for call in calls)


GOOD, BAD, OTHER = ("add", '{"a": 1}'), ("add", '{"b": 1}'), ("find", '{"x": []}')
NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("write", [hermes, llama3])
@pytest.mark.parametrize(
    ("choice", "parallel", "strict", "taken", "refused"),
    [
        ("required", True, None, [[GOOD], [OTHER, GOOD, GOOD]], [[BAD], [GOOD, BAD]]),
        ("required", False, None, [[GOOD], [OTHER]], [[GOOD, OTHER], [BAD]]),
        (NAMED, True, None, [[GOOD]], [[OTHER], [GOOD, GOOD], [GOOD, OTHER], [BAD]]),
        (NAMED, False, None, [[GOOD]], [[GOOD, GOOD]]),
        ("auto", True, True, [[GOOD], [GOOD, OTHER]], [[BAD], [GOOD, BAD]]),
    ],
)
def test_calls_are_held_to_the_choice(accepts, write, choice, parallel, strict, taken, refused):
    body = fields({**ADD, "strict": strict}, FIND, tool_choice=choice, parallel_tool_calls=parallel)
    use = ToolUse.of(body, support(write.__name__))
    for calls in taken:
        text = write(*calls)
        assert accepts(use.constraint, text)
        parser = use.parser()
        assert len([delta for delta in parser.feed(text) if getattr(delta, "id", None)]) == len(
            calls
        )
        assert parser.called
    assert not any(accepts(use.constraint, write(*calls)) for calls in refused)
    free = ["", "Hello", "Hello {}"] + ['say "<tool"'] * (write is hermes)
    assert [accepts(use.constraint, text) for text in free] == [choice == "auto"] * len(free)


def test_a_free_choice_is_not_held_to_anything():
    assert ToolUse.of(fields(ADD, FIND), support("hermes")).constraint is None
    assert ToolUse.of(fields(ADD, tool_choice="none"), support("hermes")) is None
    assert ToolUse.of(ToolFields(), ToolSupport(False, None)) is None
    assert ToolUse.of(fields(ADD, tool_choice="none"), ToolSupport(False, None)) is None


def test_the_template_is_given_what_it_needs():
    use = ToolUse.of(fields({**ADD, "strict": True}, FIND), support("llama3"))
    assert use.tools == [
        {"type": "function", "function": ADD},
        {"type": "function", "function": {"name": "find"}},
    ]


def test_a_model_that_knows_no_tools_says_so():
    with pytest.raises(RequestError, match="chat template knows none") as error:
        ToolUse.of(fields(ADD), ToolSupport(False, None))
    assert error.value.param == "tools"
    with pytest.raises(RequestError, match="--tool-format.*hermes, llama3"):
        ToolUse.of(fields(ADD), ToolSupport(True, None))


NO = {"type": "function", "function": {"name": "no"}}


@pytest.mark.parametrize(
    ("functions", "choice", "param", "message"),
    [
        ([ADD, ADD], "auto", "tools", "two named 'add'"),
        ([ADD, FIND], NO, "tool_choice", "'no' is none of the tools; there are add, find"),
        ([], "required", "tool_choice", "there are no tools"),
    ],
)
def test_a_choice_needs_its_tools(functions, choice, param, message):
    with pytest.raises(RequestError, match=message) as error:
        ToolUse.of(fields(*functions, tool_choice=choice), support("hermes"))
    assert error.value.param == param


def nested(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


@pytest.mark.parametrize(
    ("functions", "other", "message"),
    [
        ([ADD] * (MOST_TOOLS + 1), {}, "at most"),
        ([{"name": "a b"}], {}, "pattern"),
        ([{"name": "a\n"}], {}, "pattern"),
        ([{"name": "a" * 65}], {}, "at most 64"),
        ([{"name": "a", "parameters": {"type": "array"}}], {}, "object"),
        ([{"name": "a", "parameters": nested(40)}], {}, "levels"),
        ([{"name": "a", "parameters": {"enum": ["x" * 70_000]}}], {}, "characters"),
        ([{"name": "a", "body": 1}], {}, "Extra"),
        ([ADD], {"tool_choice": "always"}, "tool_choice"),
        ([ADD], {"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_tools_that_are_wrong_or_too_much_are_refused(functions, other, message):
    with pytest.raises(ValidationError, match=message):
        fields(*functions, **other)


def test_what_a_constraint_says_is_json_with_the_schema():
    use = ToolUse.of(fields(ADD, FIND, tool_choice="required"), support("hermes"))
    tags = json.loads(use.constraint.text)["format"]["tags"]
    assert [tag["content"]["json_schema"] for tag in tags] == [
        ADD["parameters"],
        {"type": "object"},
    ]


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_schema_that_is_not_kept_is_refused_only_where_it_was_promised(choice):
    odd = {"name": "odd", "parameters": {"type": "object", "no such keyword": 1}}
    use = ToolUse.of(fields(odd, tool_choice="required"), support("hermes"))
    [tag] = json.loads(use.constraint.text)["format"]["tags"]
    assert tag["content"]["json_schema"] == {"type": "object"}
    with pytest.raises(RequestError, match="no such keyword") as error:
        ToolUse.of(fields({**odd, "strict": True}, tool_choice=choice), support("hermes"))
    assert error.value.param == "tools"
