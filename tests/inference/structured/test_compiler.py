"""Compiling what strangers write: bounds, crashes, what is kept, and tokenizers of every kind."""

import json
import random
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic
import pytest
from transformers import PreTrainedTokenizerFast

from formats.errors import RequestError
from formats.tokenizer import load_tokenizer
from inference.requests.constraint import Constraint
from inference.requests.json_schema import DECIDING
from inference.requests.plain_schema import BOTH, OF_ONE, OF_SEVERAL, WITH_NAMES
from inference.structured import compiler as compiling
from inference.structured.compiler import GrammarCompiler, GrammarMatcher, tokenizer_info
from inference.structured.helper import Bounds, compile_one, grammar_of
from tests.formats.test_chat_tokens import byte_fallback

xgrammar = pytest.importorskip("xgrammar")

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def compiler(tiny_llama) -> GrammarCompiler:
    """With little patience and little memory."""
    bounds = Bounds(seconds=3.0, nbytes=256 << 20, compiled=8 << 20)
    return GrammarCompiler(load_tokenizer(tiny_llama), 400, frozenset({0}), bounds)


def refusal(compiler: GrammarCompiler, constraint: Constraint) -> str:
    with pytest.raises(RequestError) as caught:
        compiler.compile(constraint).result(60)
    assert caught.value.param == "constraint"
    return str(caught.value)


def options(count: int) -> dict:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


def test_bombs_and_crashes_are_refused_and_the_next_is_compiled(compiler):
    """What takes all memory, too long or the process with it; all at once."""
    chain = "\n".join(f'r{i} ::= "x" | r{i + 1}' for i in range(3000))
    bombs = [
        Constraint.json_schema(options(500)),
        Constraint.json_schema({"enum": [f"v{i}" for i in range(15_000)]}),
        Constraint.json_schema({"type": "object", "properties": {"k" * 50_000: True}}),
        Constraint.grammar(f'root ::= r0\n{chain}\nr3000 ::= "a"'),
        Constraint.json_schema({"type": "string", "pattern": "a" * 100_000}),
        Constraint.grammar("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ]
    asked = [compiler.compile(bomb) for bomb in bombs]
    good = compiler.compile(Constraint.regex("[0-9]{3}"))
    for future in asked:
        with pytest.raises(RequestError, match="constraint: ") as caught:
            future.result(60)
        assert len(str(caught.value)) < 400
    assert good.result(60)(()).mask().any()


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint.regex("(?=a)b"), "Lookahead is not supported"),
        (Constraint.regex(r"(a)\1"), "Backreference is not support"),
        (Constraint.regex("a$b"), "leave out what would not be kept: (?!.*is ignored.*is ignored).*is ignored"),
        (Constraint.regex("[z-a]"), "Invalid character class"),
        (Constraint.regex(r"[^\s\S]"), "no text matches it"),
        (Constraint.grammar("root ::= b"), '"b" is not defined'),
        (Constraint.grammar('a ::= "b"'), "root rule"),
        (Constraint.grammar("root ::= Token(500000)"), "Check failed"),
        (Constraint.json_schema(False), "cannot accept any value"),
        (Constraint.json_schema({"type": "integer", "minimum": 5, "maximum": 2}), "minimum"),
        (Constraint.json_schema({"type": "integer", "minimum": 1e300}), "exceeds"),
        (Constraint.json_schema({"type": "integer", "multipleOf": 5, "minimum": 1}), "ignoring"),
        (Constraint.json_schema({"oneOf": [{"type": "string"}, {"maxLength": 3, "type": "string"}]}), "oneOf"),
        (Constraint.json_schema({"oneOf": [{"type": "number"}, {"type": "integer"}]}), "oneOf"),
        (Constraint.json_schema({"oneOf": [{"enum": [1, 2]}, {"const": 2}]}), "oneOf"),
        (Constraint.json_schema({"oneOf": [{"const": 1}, {"const": 1.0}]}), "oneOf"),
        (Constraint.json_schema({"oneOf": [{"const": [{"a": 1}]}, {"const": [{"a": 1e0}]}]}), "oneOf"),
        (Constraint.json_schema({"oneOf": [{"const": 1, "nullable": True}, {"const": None}]}), "oneOf"),
        (Constraint.structural_tag({}), "tructural"),
        (Constraint.structural_tag({"type": "structural_tag", "format": {"type": "zz"}}), "tructural"),
    ],
)  # fmt: skip
def test_what_is_not_kept_is_refused(compiler, constraint, message):
    """Also what xgrammar says with no more than a warning."""
    assert re.search(message, refusal(compiler, constraint))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"minLength": 3}, "not kept without a type"),
        ({"patternProperties": {"^a$": True}}, "not kept without a type"),
        ({"minItems": 3}, "not kept without a type"),
        ({"type": "strin"}, "allowed are string, integer"),
        ({"items": {"$ref": ["#"]}}, r"\$ref is a string"),
        ({"type": "string", "minLenght": 3}, "minLenght is not kept for string"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems is not kept"),
        ({"type": "string", "format": "iban"}, "format 'iban' is not kept"),
        ({"type": "string", "pattern": "^a", "maxLength": 3}, "not kept together"),
        ({"type": "string", "pattern": 'a"'}, "only as an escape"),
        ({"type": "string", "pattern": "a\\n"}, "only as an escape"),
        ({"type": "string", "pattern": "\\u{fffffffff}é\\u{22}"}, "only as an escape"),
        ({"not": {"type": "string"}}, "not is not kept; leave"),
        ({"anyOf": [{"type": "null"}], "type": "null"}, "type beside anyOf"),
        (
            {"allOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
            "write them as one",
        ),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "no value holds for all of allOf"),
        ({"allOf": [{"$ref": "http://x/y.json"}, {"type": "string"}]}, "write them as one"),
        ({"allOf": [{"$ref": "#"}, {"type": "string"}]}, "write them as one"),
        (
            {"allOf": [{"anyOf": [{"minimum": i, "type": "number"} for i in range(9)]}] * 9},
            "write them as one",
        ),
        (
            {"$ref": "#/$defs/a~1b", "$defs": {"a": {"type": "string"}}},
            "no schema of this document",
        ),
        ({"type": "string", "nullable": "yes"}, "nullable is not kept"),
        ({"enum": []}, "a list of values"),
        ({"enum": ["a", 3], "type": "string"}, "3 is not of type string"),
        ({"const": 2**64}, "more digits than are kept"),
        ({"$ref": "http://x/y.json"}, "no schema of this document"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "or itself"),
        ({"type": "object", "required": ["a"]}, "name it in properties too"),
        ({"type": "object", "minProperties": 1}, "minProperties is kept only"),
        (
            {"type": "object", "properties": {"a": True}, "patternProperties": {"^a": True}},
            "not kept together",
        ),
        ({"properties": {"a": {"items": {"type": 5}}}}, "at #/properties/a/items: type 5"),
        ({"properties": {"a": 7}}, "7 is no schema"),
        (
            {"properties": {"é": True}, "additionalProperties": True},
            "'é' is not kept beside others",
        ),
        ([], "no schema"),
    ],
)
def test_keywords_that_would_be_ignored_are_refused_before_the_engine_hears_of_them(
    schema, message
):
    with pytest.raises(RequestError, match=message) as caught:
        Constraint("json_schema", json.dumps(schema))
    assert caught.value.param == "constraint"


def test_what_usual_libraries_write_is_taken():
    class Pet(pydantic.BaseModel):
        """A pet."""

        name: str = pydantic.Field(min_length=1, max_length=20, description="What it is called")
        age: int | None = pydantic.Field(None, ge=0, lt=50)
        tags: tuple[str, ...] = ()
        sizes: dict[str, float] = pydantic.Field(default_factory=dict)
        kind: Literal["cat", "dog"] = "cat"

    class Owner(pydantic.BaseModel):
        pets: list[Pet]

    assert Constraint.json_schema(Owner.model_json_schema()).kind == "json_schema"


def test_a_helper_that_is_killed_is_started_again(compiler):
    compiler.compile(Constraint.regex("a")).result(60)
    first = compiler.link
    assert first
    first.process.kill()
    lost = compiler.compile(Constraint.regex("b{2}"))
    if lost.exception(60):  # it was asked before the end was noticed
        assert "ask again" in str(lost.exception())
    assert compiler.compile(Constraint.regex("b{3}")).result(60)
    assert compiler.link is not first


def test_compiled_grammars_are_kept_and_the_oldest_forgotten(compiler, monkeypatch):
    monkeypatch.setattr(compiling, "MOST_KEPT", 2)
    a, b, c = (Constraint.regex(letter) for letter in "xyz")
    for constraint in (a, b, a, c):
        compiler.compile(constraint).result(60)
    assert compiler.compile(a).done()
    assert compiler.compile(c).done()
    assert not compiler.compile(b).done()


def test_what_is_asked_for_twice_is_compiled_once(compiler):
    constraint = Constraint.regex("asked for twice")
    first, second = compiler.compile(constraint), compiler.compile(constraint)
    assert first is second
    assert first.result(60)(()).mask(ends=False) is not None
    assert compiler.compile(constraint) is not first  # which is kept, and known at once


def test_sentencepiece_and_byte_level_tokenizers():
    """What is drawn under a grammar decodes to what it says; padded ids never come."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "▁{", '"', "}", ":", "é", "a", "b", "▁a", ",", "ab", '{"', '":', "[", "]"]
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    llama = PreTrainedTokenizerFast(tokenizer_object=byte_fallback(pieces), **special)
    byte_level = load_tokenizer(ROOT / "recipes" / "tiny-python")
    schema = Constraint.json_schema(
        {"type": "object", "properties": {"aé": {"enum": ["b a", "é€"]}}, "required": ["aé"]}
    )
    for tokenizer, end in ((llama, 2), (byte_level, int(byte_level.eos_token_id))):
        size, ends = len(tokenizer) + 40, frozenset({end})
        info = tokenizer_info(tokenizer, size, ends)
        text = compile_one(info, Bounds(), schema.kind, schema.text)
        compiled = xgrammar.CompiledGrammar.deserialize_json(text, info)
        generator, texts = np.random.default_rng(0), set()
        for _ in range(20):
            matcher, tokens = GrammarMatcher(compiled, -(-size // 32), ends), []
            while not matcher.done:
                bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
                assert not bits[len(tokenizer) :].any()
                tokens.append(int(generator.choice(bits.nonzero()[0])))
                assert matcher.accept(tokens[-1])
            texts.add(tokenizer.decode(tokens, skip_special_tokens=True))
        found = {json.loads(text)["aé"] for text in texts}
        assert found == {"b a", "é€"}


def test_a_model_without_end_tokens_ends_where_nothing_else_may_come():
    tokenizer = load_tokenizer(ROOT / "recipes" / "tiny-python")
    info = tokenizer_info(tokenizer, 4096, frozenset())
    text = compile_one(info, Bounds(), "regex", "a")
    matcher = GrammarMatcher(
        xgrammar.CompiledGrammar.deserialize_json(text, info), 128, frozenset()
    )
    assert len(matcher.mask()) == 128
    assert matcher.accept(tokenizer("a")["input_ids"][0])
    assert matcher.done


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "string", "maxLength": 4}])
def test_characters_of_strings_are_those_of_json_in_utf_8(schema):
    characters = [bytes([i]) for i in range(256)]
    tokenizer = xgrammar.TokenizerInfo([*characters, b"</s>"], stop_token_ids=256)
    grammar = grammar_of("json_schema", json.dumps(schema))
    compiled = xgrammar.GrammarCompiler(tokenizer).compile_grammar(grammar)

    def matches(character: bytes) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return all(map(matcher.accept_token, [*b'"', *character, *b'"', 256]))

    for text in ("a", "\u00e9", "\ud7ff", "\ue000", "\U0001f600", r"\n", r"\""):
        assert matches(text.encode()), text
    for half_or_control in (b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\x01", b"\n", b"\xc3"):
        assert not matches(half_or_control), half_or_control


def test_whatever_a_schema_holds_it_is_taken_or_refused():
    rng, words = random.Random(5), sorted({*WITH_NAMES, *OF_ONE, *OF_SEVERAL, *BOTH, *DECIDING})
    words += ["type", "required", "format", "pattern", "multipleOf", "nullable"]
    plain = [
        5,
        None,
        True,
        "x",
        "#",
        "object",
        ["string", "null"],
        [],
        {},
        [[]],
        [{}],
        {"a": {"const": 1}},
    ]

    def value(depth: int) -> Any:
        drawn = rng.random()
        if depth == 0 or drawn > 0.4:
            return rng.choice(plain)
        return schema(depth - 1) if drawn < 0.25 else [value(depth - 1) for _ in range(2)]

    def schema(depth: int) -> dict[str, Any]:
        return {rng.choice(words): value(depth) for _ in range(rng.randint(0, 4))}

    refused = 0
    for _ in range(4000):
        try:
            json.loads(Constraint.json_schema(schema(3)).plain)
        except RequestError:
            refused += 1
    assert 1000 < refused < 4000


@pytest.mark.parametrize(
    ("constraint", "kept", "left"),
    [
        (Constraint.json_schema({"enum": ["größe", "ÿÿ1é\\xe9"]}), '"größe"', '"gr\u00f6\u0dfe"'),
        (
            Constraint.json_schema({"properties": {"ße": True}, "required": ["ße"]}),
            '{"ße":1}',
            "{}",
        ),
        (
            Constraint.json_schema({"type": "string", "pattern": "[^b]\\éa.🎉"}),
            '"céax🎉"',
            '""éax🎉"',
        ),
        (Constraint.json_schema({"type": "string", "pattern": "^[A-ZÀ-ÿ0-9]+$"}), '"ÉA1"', '"a"'),
        (
            Constraint.json_schema({"type": "object", "patternProperties": {"^[é1]$": True}}),
            '{"1":2}',
            '{"\u0e91":2}',
        ),
        (
            Constraint.json_schema({"properties": {"a": True}, "additionalProperties": True}),
            '{"b":1}',
            '{"\ud800":1}',
        ),
        *(
            (
                Constraint.json_schema({"type": "string", "pattern": f"^{one}$"}),
                f'"{kept}"',
                f'"{left}"',
            )
            for one in (".", "\\S", "[^b]", "[^-b]", "[\\s\\S]", "[\\W\\da]", "[!-\uffff]")
            for kept in "a5é\ue000"
            for left in ("\ud800", "\udfff")
        ),
        (Constraint.regex("[^b]."), "aé", "a\udc00"),
        (Constraint.regex("[^b]."), "é\n", "ba"),
        *(
            (Constraint.json_schema({"type": "string", "format": form}), f'"{kept}"', f'"{left}"')
            for form, kept, left in (
                ("date", "2024-02-29", "2023-02-29"),
                ("date", "2000-02-29", "1900-02-29"),
                ("date", "1999-12-31", "1999-04-31"),
                ("date-time", "2024-02-29T23:59:59.5Z", "2024-02-30T23:59:59Z"),
                ("time", "00:00:00+01:30", "24:00:00Z"),
                ("ipv4", "255.0.19.200", "255.00.19.200"),
                ("ipv4", "1.2.3.4", "1.2.3.256"),
            )
        ),
        (Constraint.regex(r"[ -ÿa-é日1]+\[é1\][^é1-]"), "日~\u007f[é1]a", "1[é1]é"),
        (Constraint.regex(r"[-\u00e9\dé-]+"), "-é1", "-d"),
        (Constraint.grammar('root ::= "ée\\"" [^é1"]'), 'ée"a', 'ée"1'),
    ],
)
def test_characters_before_hexadecimal_digits_are_those_that_are_asked_for(constraint, kept, left):
    tokens = [*(bytes([i]) for i in range(256)), b"</s>"]
    tokenizer = xgrammar.TokenizerInfo(tokens, stop_token_ids=256)
    grammar = grammar_of(constraint.kind, constraint.plain)
    compiled = xgrammar.GrammarCompiler(tokenizer).compile_grammar(grammar)
    for text, holds in ((kept, True), (left, False)):
        matcher = xgrammar.GrammarMatcher(compiled)
        assert all(map(matcher.accept_token, [*text.encode(errors="surrogatepass"), 256])) == holds


def test_masks_behind_drafts_are_those_of_text_that_has_come(compiler):
    """Whatever is drafted, the end too, the matcher is where it was."""
    make = compiler.compile(Constraint.regex("[0-9]{3}x?")).result(60)
    own, other = make(()), make(())
    drafts, masks = list[int](), [other.mask().copy()]
    while not other.done:  # the last of the tokens that may come, as long as any but an end may
        token = np.flatnonzero(np.unpackbits(masks[-1].view(np.uint8), bitorder="little"))[-1]
        assert other.accept(int(token))
        drafts.append(int(token))
        masks.append(other.mask().copy())
    assert len(drafts) > 1
    before = own.mask().copy()
    ended = [*drafts, 0]
    for tokens in ([], drafts[:1], drafts, ended, [*ended, 0, drafts[0]]):
        found = own.masks_behind(tokens, [True] * (len(tokens) + 1))
        assert len(found) == len(tokens) + 1
        for mask, wanted in zip(found, masks, strict=False):
            assert (mask == wanted).all()
        assert (own.mask() == before).all()
    unlike = next(token for token in range(1, 400) if not before[token // 32] >> token % 32 & 1)
    first, *_ = own.masks_behind([unlike, *drafts], [True] * (len(drafts) + 2))
    assert (first == before).all()
    for token in drafts:
        assert own.accept(token)
    assert own.done
