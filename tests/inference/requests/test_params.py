"""What a request may ask of the choice of its tokens, and what is refused before it is queued."""

import pickle

import pytest

from formats.errors import RequestError
from inference.requests.constraint import MOST_DEPTH, Constraint
from inference.requests.request import SamplingParams


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"items": value}
    return value


def test_params_are_values():
    """Equal where they say the same, usable as keys, and the same on the other side of a pipe."""
    constraint = Constraint.json_schema({"type": "object"})
    params = SamplingParams(logit_bias={7: 1, 3: -2.5}, min_p=0.1, constraint=constraint)
    other = SamplingParams(logit_bias=((3, -2.5), (7, 1.0)), min_p=0.1, constraint=constraint)
    assert params.logit_bias == ((3, -2.5), (7, 1.0))
    assert params == other == pickle.loads(pickle.dumps(params))
    assert len({params, other, SamplingParams()}) == 2
    texts = SamplingParams(stop=["a"], stop_token_ids=[3])
    assert texts == SamplingParams(stop=("a",), stop_token_ids=(3,))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logit_bias", {5: 101}, "less than or equal to 100"),
        ("logit_bias", {5: float("nan")}, "less than or equal to 100"),
        ("logit_bias", {"5": 1}, "a valid integer"),
        ("logit_bias", {True: 1}, "a valid integer"),
        ("logit_bias", {5: True}, "a valid number"),
        ("logit_bias", dict.fromkeys(range(301), 1), r"at most 300 .*\.\.\.$"),
        ("logit_bias", ((1, 1.0), (1, 2.0)), "twice"),
        ("min_p", 1.1, "less than or equal to 1"),
        ("min_p", float("nan"), "less than or equal to 1"),
        ("constraint", "json", "Constraint; found 'json'"),
        *(("temperature", wrong, None) for wrong in (-1, float("nan"), 1e39)),
        ("temperature", 1e-40, None),  # logits over it would be infinite
        *(("top_p", wrong, None) for wrong in (0, 1.5, 1e-300)),
        *(("top_k", wrong, None) for wrong in (-1, 2**31)),
        *(("repetition_penalty", wrong, None) for wrong in (0, 1e-44, 1e300)),
        ("max_tokens", 0, None),
        ("min_tokens", 200, "found 200, but the output has at most 128 tokens"),
        ("stop", ("",), None),
        ("stop", "a", "a valid tuple; found 'a'"),
        ("seed", -3, None),
        ("max_token", 3, "unknown parameter; did you mean .max_tokens.. allowed: "),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(field, value, message):
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constraint.json_schema(nested(MOST_DEPTH)), "more than 64 deep"),
        (lambda: Constraint.json_schema("[" * 100_000), "more than 64 deep"),
        (lambda: Constraint.json_schema(nested(5000)), "as JSON"),
        (lambda: Constraint.json_schema('{"a": NaN}'), "NaN is no number"),
        (lambda: Constraint.json_schema('{"a": 1e999}'), "1e999 is no number"),
        (lambda: Constraint.json_schema({"minimum": float("inf")}), "as JSON"),
        (lambda: Constraint.json_schema("{"), "no JSON"),
        (lambda: Constraint.json_schema({"const": "x" * 300_000}), "at most 262144"),
        (lambda: Constraint.json_schema({"const": "\ud800"}), "surrogate"),
        (lambda: Constraint.regex("a" * 5000), "at most 4096"),
        (lambda: Constraint.regex("a\0b"), "NUL"),
        (lambda: Constraint.grammar(""), "empty grammar"),
        (lambda: Constraint("yaml", "a"), "allowed: json_object"),  # pyright: ignore
        (lambda: Constraint("json_object", "{}"), "at most 0"),
    ],
)
def test_constraints_that_cost_too_much_are_refused_at_once(make, message):
    with pytest.raises(RequestError, match=message) as caught:
        make()
    assert caught.value.param == "constraint"


def test_the_deepest_schema_is_taken():
    assert Constraint.json_schema(nested(MOST_DEPTH - 1)).kind == "json_schema"
