"""Outputs under constraints: what they are, what ends them, and that nobody else notices."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from formats.errors import RequestError
from inference.engine import Engine
from inference.requests.constraint import Constraint
from inference.requests.request import SamplingParams
from tests.inference.engines import engine_of

pytest.importorskip("xgrammar")

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer", "minimum": 0, "maximum": 9},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["v", "next"],
        }
    },
    "$ref": "#/$defs/node",
}


def tree(x: Any) -> bool:
    return set(x) == {"v", "next"} and 0 <= x["v"] <= 9 and (x["next"] is None or tree(x["next"]))


def text_of(least: int, most: int) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, str) and least <= len(x) <= most


def number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def closed(required: bool = True, **properties: Any) -> dict:
    own = {"type": "object", "properties": properties, "additionalProperties": False}
    return own | ({"required": list(properties)} if required else {})


SCHEMAS: list[tuple[Any, Callable[[Any], bool]]] = [
    ({"type": "boolean"}, lambda x: isinstance(x, bool)),
    ({"type": "null"}, lambda x: x is None),
    ({"type": "integer", "minimum": -5, "maximum": 120}, lambda x: -5 <= x <= 120),
    ({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99}, lambda x: x % 7 == 0),
    ({"type": "number", "minimum": 1, "exclusiveMaximum": 4}, lambda x: 1 <= x < 4),
    ({"type": "string", "maxLength": 6}, text_of(0, 6)),
    ({"type": "string", "minLength": 3, "maxLength": 5}, text_of(3, 5)),
    ({"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"}, lambda x: re.fullmatch("[A-Z]{2}-[0-9]{3}", x)),
    ({"type": "string", "format": "date"}, lambda x: re.fullmatch(r"\d{4}-\d\d-\d\d", x)),
    ({"enum": ["red", 'a "b"\n', 3, None, [1, {"é": 2}]]}, lambda x: x != "blue"),
    ({"const": {"a": [1.5, "\\"]}}, lambda x: x == {"a": [1.5, "\\"]}),
    (
        {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3},
        lambda x: 2 <= len(x) <= 3 and set(x) <= {1, 2},
    ),
    (
        {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False},
        lambda x: len(x) <= 2 and (len(x) < 1 or x[0] is None),
    ),
    (closed(a={"type": "boolean"}, b={"type": "null"}), lambda x: list(x) == ["a", "b"]),
    (closed(False, a={"type": "boolean"}, b={"type": "null"}), lambda x: set(x) <= {"a", "b"}),
    (
        closed(name={"type": "string", "maxLength": 8}, age={"type": "integer", "maximum": 9, "minimum": 0}),
        lambda x: len(x["name"]) <= 8 and 0 <= x["age"] <= 9,
    ),
    (closed(inner=closed(deep=closed(x={"type": "null"}))), lambda x: x == {"inner": {"deep": {"x": None}}}),
    ({"anyOf": [{"type": "boolean"}, closed(k={"const": 1})]}, lambda x: isinstance(x, bool) or x == {"k": 1}),
    ({"type": ["null", "integer"], "minimum": 10, "maximum": 12}, lambda x: x in (None, 10, 11, 12)),
    (
        closed(a={"anyOf": [{"const": 1}, {"type": "null"}]}, b={"$ref": "#/properties/a/anyOf/0"}),
        lambda x: x["a"] in (None, 1) and x["b"] == 1,
    ),
    (closed(a={"$ref": "#/$defs/x~1y%20z"}) | {"$defs": {"x/y z": {"const": "é"}}}, lambda x: x == {"a": "é"}),
    (
        {"type": "array", "minItems": 6, "maxItems": 6, "items": {"const": 3, "nullable": True}},
        lambda x: len(x) == 6 and {*x} <= {3, None},
    ),
    (
        {"allOf": [closed(False, a={"type": "null"}), {"type": "object", "required": ["a"]}]},
        lambda x: x == {"a": None},
    ),
    (
        {
            "$defs": {"base": {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}}},
            "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"a": {"enum": [3, 4]}}}],
            "properties": {"b": {"type": "boolean"}},
            "required": ["b", "a"],
            "unevaluatedProperties": False,
        },
        lambda x: x in ({"b": True, "a": 3}, {"b": False, "a": 3}),
    ),
    (
        {"allOf": [{"type": ["integer", "null"], "minimum": 7}, {"type": "number", "maximum": 8}]},
        lambda x: x in (7, 8),
    ),
    (
        {
            "$defs": {  # as pydantic writes a union with a discriminator
                "Cat": closed(kind={"const": "cat", "type": "string"}, lives={"const": 9}),
                "Dog": closed(False, kind={"const": "dog", "default": "dog"}, old={"const": None}),
            },
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "discriminator": {"propertyName": "kind"},
        },
        lambda x: x in ({"kind": "cat", "lives": 9}, {"kind": "dog"}, {"kind": "dog", "old": None}),
    ),
    ({"oneOf": [{"type": "null"}, closed(a={"const": 1})]}, lambda x: x in (None, {"a": 1})),
    ({"oneOf": [{"const": "a"}, {"enum": ["b", 2]}]}, lambda x: x in ("a", "b", 2)),
    (TREE, tree),
]  # fmt: skip


@pytest.fixture(scope="module")
def runner(tiny_llama) -> Engine:
    return engine_of(tiny_llama, max_batch_size=24, kv_blocks=256)


@pytest.fixture(scope="module")
def blanks(runner) -> dict[int, float]:
    """A bias against blanks, of which a model of random weights would write many."""
    vocabulary = runner.tokenizer.get_vocab()
    return {token: -100.0 for text, token in vocabulary.items() if set(text) <= set("ĠĊĉč")}


def params(constraint: Constraint | None, bias: Any = (), **values: Any) -> SamplingParams:
    return SamplingParams(
        **({"max_tokens": 150, "logit_bias": bias, "constraint": constraint} | values)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_every_output_is_what_its_schema_says(runner, blanks, temperature):
    """All in one batch, beside a request without a constraint, which gets its own tokens."""
    free = SamplingParams(max_tokens=30, ignore_eos=True, temperature=temperature, seed=3)
    alone = runner.generate(["def f"], free)[0].token_ids
    each = [
        params(Constraint.json_schema(schema), blanks, temperature=temperature, seed=i)
        for i, (schema, _) in enumerate(SCHEMAS)
    ]
    *outputs, other = runner.generate(["def f"] * (len(each) + 1), [*each, free])
    assert other.token_ids == alone
    ended = 0
    for (schema, holds), output in zip(SCHEMAS, outputs, strict=True):
        if output.finish_reason == "stop":  # a tree may go on for ever
            assert holds(json.loads(output.text)), (schema, output.text)
            ended += 1
    assert ended >= len(SCHEMAS) - 1
    runner.check_integrity()


def test_any_object_a_pattern_and_a_grammar(runner, blanks):
    list_of = 'root ::= "[" item ("," item)* "]"\nitem ::= "a" | "b"'
    each = [
        params(Constraint.json_object(), blanks, max_tokens=60),
        params(Constraint.regex(r"(ab|c){2,3}-[0-9]{2}")),
        params(Constraint.grammar(list_of), max_tokens=30),
    ]
    objects, pattern, grammar = (output.text for output in runner.generate(["x"] * 3, each))
    assert objects.startswith("{")
    assert re.fullmatch(r"(ab|c){2,3}-[0-9]{2}", pattern)
    assert re.match(r"\[[ab](,[ab])*\]?", grammar)


def test_a_structural_tag(runner, blanks):
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<call>",
            "content": {"type": "json_schema", "json_schema": closed(x={"type": "string", "maxLength": 2})},
            "end": "</call>",
        },
    }  # fmt: skip
    output = runner.generate(["x"], params(Constraint.structural_tag(tag), blanks))[0]
    body = re.fullmatch(r"<call>(.*)</call>", output.text, re.DOTALL)
    assert body
    assert len(json.loads(body[1])["x"]) <= 2


def test_ends_come_where_the_text_is_complete(runner):
    """Also where more is asked for: what is complete cannot go on."""
    (end,) = runner._ends
    word = Constraint.regex("(abc|de)f?")
    for values in ({}, {"ignore_eos": True}, {"min_tokens": 20}, {"temperature": 1.0, "seed": 0}):
        output = runner.generate(["x"], params(word, **values))[0]
        assert re.fullmatch("(abc|de)f?", output.text), values
        assert output.finish_reason == "stop"
        if values.keys() & {"ignore_eos", "min_tokens"}:
            assert output.text.endswith("f")
            assert end not in output.token_ids
    digits = Constraint.regex("[0-9]+")
    longer = runner.generate(["x"], params(digits, min_tokens=9, max_tokens=12))[0]
    assert len(longer.token_ids) >= 9
    assert longer.text.isdigit()
    none = runner.generate(["x"], params(Constraint.regex("()"), max_tokens=5))[0]
    assert (none.text, none.finish_reason) == ("", "stop")


def test_stops_of_a_request_end_it_sooner(runner):
    (seven,) = runner.tokenizer("7")["input_ids"]
    only = Constraint.regex("7{30}")
    by_token = runner.generate(["x"], params(only, stop_token_ids=(seven,)))[0]
    assert (list(by_token.token_ids), by_token.finish_reason) == ([seven], "stop")
    by_text = runner.generate(["x"], params(only, stop=("777",)))[0]
    assert (by_text.text, by_text.finish_reason) == ("", "stop")


def test_log_probabilities_are_the_models_and_finite(runner):
    output = runner.generate(["x"], params(Constraint.regex("[ab]{4}"), logprobs=5))[0]
    assert output.logprobs is not None
    for row, token in zip(output.logprobs, output.token_ids, strict=True):
        assert token in row
        assert json.loads(json.dumps(list(row.values()), allow_nan=False))


def test_preemption_changes_nothing(runner, blanks, tiny_llama):
    """A request that gives its blocks up keeps its place in its grammar."""
    bounded = {"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 30, "maxItems": 30}
    asked = params(Constraint.json_schema(bounded), blanks, temperature=1.0, seed=1)
    prompts = ["def f(x): return x\n" * 2] * 3
    few = engine_of(tiny_llama, max_model_len=256, kv_blocks=5, max_batch_size=3)
    outputs = few.generate(prompts, asked)
    assert few.stats().preemptions > 0
    wanted = runner.generate(prompts, asked)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]


def test_what_cannot_be_compiled_is_refused_and_others_go_on(runner):
    runner.generate(["x"], params(Constraint.regex("a")))  # what compiles has started
    name = runner.add_request("x", SamplingParams(max_tokens=400, ignore_eos=True))
    with pytest.raises(RequestError, match="parenthesis is not closed") as caught:
        runner.generate(["x"], params(Constraint.regex("((a")))
    assert caught.value.param == "constraint"
    aborted = runner.abort(name)
    bad = runner.add_request("x", params(Constraint.regex("(?<=a)b")))
    assert runner.has_unfinished
    told = [o for _ in iter(lambda: runner.has_unfinished, False) for o in runner.step()]
    last, ended = told[-1], [o for o in told if o.request_id == name]
    (other,) = [aborted] if aborted else ended  # which ends before if compiling takes long
    assert other.token_ids
    assert (last.request_id, last.finish_reason, last.param) == (bad, "error", "constraint")
    assert "not supported" in str(last.error)
    runner.check_integrity()


def test_a_request_that_leaves_while_its_constraint_is_compiled(runner):
    name = runner.add_request("x", params(Constraint.regex("[p-z]{7}")))
    assert runner.abort(name).finish_reason == "abort"
    assert not runner.has_unfinished
    runner.check_integrity()


def test_a_missing_package_is_named(runner, monkeypatch):
    monkeypatch.setattr("inference.structured.compiler.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'ptq\[structured\]'") as caught:
        runner.add_request("x", params(Constraint.json_object()))
    assert caught.value.param == "constraint"
    assert not runner.has_unfinished
