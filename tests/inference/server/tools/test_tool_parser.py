"""Calls are read out of a text, whatever pieces it comes in."""

import json
import random
from itertools import pairwise

import pytest

from inference.server.tools.parser import FORMATS, CallDelta, ToolParser, join_deltas

DEEP = '{"a": ' * 200
CASES = {
    "hermes": [
        ("Hello <b>there</b>, x < y\n", "Hello <b>there</b>, x < y\n", []),
        ("", "", []),
        (
            '<tool_call>\n{"name": "add", "arguments": {"a": [1, -2.5e3], "b": "\\"}"}}\n</tool_call>',
            None,
            [("add", '{"a": [1, -2.5e3], "b": "\\"}"}')],
        ),
        (
            'I call.\n\n<tool_call>{"name":"add","arguments":{}}</tool_call>\n'
            '<tool_call>\n{"arguments": {"q": null}, "name": "find"}\n</tool_call>\n',
            "I call.",
            [("add", "{}"), ("find", '{"q": null}')],
        ),
        # the model ends before its tag does, or forgets it
        ('<tool_call>{"name": "add", "arguments": {}', None, [("add", "{}")]),
        ('<tool_call>{"name": "add", "arguments": {}, "id', None, [("add", "{}")]),
        # one brace too few or too many before the tag
        ('<tool_call>{"name": "add", "arguments": {}\n</tool_call>', None, [("add", "{}")]),
        ('<tool_call>{"name": "add", "arguments": {}\n</tool', None, [("add", "{}")]),
        ('<tool_call>{"name": "add", "arguments": {}}}</tool_call>', "}", [("add", "{}")]),
        ('<tool_call>{"name": "add", "arguments": {}}}\n</tool', "}", [("add", "{}")]),
        (
            '<tool_call>{"name": "add", "parameters": {}}<tool_call>{"id": 3, "type": "function", '
            '"name": "find", "arguments": {}}',
            None,
            [("add", "{}"), ("find", "{}")],
        ),
        # a line break inside of a text becomes what JSON allows
        (
            '<tool_call>{"name": "add", "arguments": {"a": "x\n\ty"}}</tool_call>',
            None,
            [("add", r'{"a": "x\n\ty"}')],
        ),
        ('a<tool_call>{"name": "add", "arguments": {}}</tool_call> b', "a b", [("add", "{}")]),
    ],
    "llama3": [
        ('{"name": "add", "parameters": {"a": 1}}', None, [("add", '{"a": 1}')]),
        (
            '\n<|python_tag|>{"name": "add", "parameters": {}}; {"name": "find", "parameters": {}}',
            None,
            [("add", "{}"), ("find", "{}")],
        ),
        (
            '{"type": "function", "name": "add", "parameters": {}};{"name": "find", "parameters": {}}\n',
            None,
            [("add", "{}"), ("find", "{}")],
        ),
        ('{"name": "add", "parameters": {}}; or not', "; or not", [("add", "{}")]),
        ('{"name": "add", "parameters": {}}; {"name": "fi', None, [("add", "{}")]),
        ('So: <|python_tag|>{"name": "add", "parameters": {}}', "So:", [("add", "{}")]),
    ],
}
TEXTS = {  # what only looks like a call, all of which is text
    "hermes": [
        "Write <tool_call> to call.",
        "<tool_call>\n\n",
        "<tool_call>add(1)</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "name": "add", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "comment": 1, "arguments": {}}</tool_call>',
        "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>",
        '<tool_call>{"name" "add", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add\\x", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"a": 01}{"a": nul}',
        '<tool_call>{"na',
        "<tool_c",
        "<<tool_call>",
        '{"name": "add", "arguments": {}}',
        "<tool_call>" + DEEP,
    ],
    "llama3": [
        '{"a": 1}',
        '{"name": "unknown", "parameters": {}}',
        'Like so: {"name": "add", "parameters": {}}',
        "<|python_tag|>print(3)",
        "{",
        " \n",
        '[{"name": "add", "parameters": {}}]',
    ],
}
FOUND = [(name, *case) for name, cases in CASES.items() for case in cases]
FOUND += [(name, text, text, []) for name, texts in TEXTS.items() for text in texts]


def read(name, pieces, **options):
    """An answer read in pieces: its text, calls, whether any is whole, and the deltas."""
    parser = ToolParser(FORMATS[name], ["add", "find"], **options)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    text, calls = join_deltas(deltas)
    return text, [(call.name, call.arguments) for call in calls], parser.called, deltas


@pytest.mark.parametrize(("name", "answer", "text", "calls"), FOUND)
def test_an_answer_is_text_and_calls_however_it_is_cut(name, answer, text, calls):
    whole = read(name, [answer])[:3]
    assert whole == (text, calls, bool(calls))
    for cut in range(len(answer)):
        assert read(name, [answer[:cut], answer[cut:]])[:3] == whole
    chance = random.Random(len(answer))
    for _ in range(20):
        cuts = sorted(chance.choices(range(len(answer) + 1), k=chance.randint(1, 9)))
        pieces = [answer[a:b] for a, b in pairwise([0, *cuts, len(answer)])]
        assert read(name, pieces)[:3] == whole
    assert read(name, answer)[:3] == whole  # one character at a time
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("broken", "rest"),
    [
        ('{"a": ]}}</tool_call>', "]}}"),
        ('{"a": 1', ""),
        ('{"a": 01}', "}"),
        ('{"a" 1}', "1}"),
        ('{"a": tru}', "}"),
        ('{"a": "\\u12g4"}', 'g4"}'),
    ],
)
def test_arguments_that_break_off_stay_and_what_follows_is_text(broken, rest):
    answer = '<tool_call>{"name": "add", "arguments": ' + broken
    text, calls, called, _ = read("hermes", answer)
    assert ((text or ""), called) == (rest, False)
    assert [name for name, _ in calls] == ["add"]
    assert calls[0][1] + rest == broken.removesuffix("</tool_call>")
    assert read("hermes", [answer])[:3] == (text, calls, called)


def test_a_call_that_is_whole_is_all_of_an_answer_wherever_its_end_is_cut():
    """As a limit of tokens cuts it: no character of a tag or of a second call is its content."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}'
    rest = "}\n</tool_call>\n<tool_call>\n" + '{"name": "find", '
    for end in range(len(rest) + 1):
        for pieces in ([call + rest[:end]], call + rest[:end], [call, rest[:end]]):
            assert read("hermes", pieces)[:3] == (None, [("add", '{"a": 1}')], True)


def test_random_texts_of_markers_and_json_lose_nothing_but_white_space():
    parts = ["<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "add", ', '"arguments": {}']
    parts += ["{", "}", "}}", '"', ";", "\n", " ", "x", "\\", '"parameters": {"a": [1, "}"]}', ","]
    chance = random.Random(0)
    for _ in range(3000):
        answer = "".join(chance.choices(parts, k=chance.randint(1, 14)))
        for name in FORMATS:
            text, calls, called, _ = read(name, [answer])
            assert (text, calls, called) == read(name, answer)[:3]
            if not calls:
                assert text == answer
            assert all(arguments in answer for _, arguments in calls)


def test_a_streamed_call_has_its_index_and_its_id_and_name_once():
    answer = "Yes. " + '<tool_call>{"name": "add", "arguments": {"a": "long text"}}</tool_call>' * 2
    deltas = read("hermes", answer)[3]
    texts = [delta for delta in deltas if isinstance(delta, str)]
    assert "".join(texts) == "Yes."
    calls = [delta for delta in deltas if isinstance(delta, CallDelta)]
    assert [(delta.index, delta.name) for delta in calls if delta.id] == [(0, "add"), (1, "add")]
    assert len({delta.id for delta in calls if delta.id}) == 2
    assert all(delta.name is None for delta in calls if not delta.id)
    assert len([delta for delta in calls if delta.index == 0]) > 10  # piece by piece
    assert [delta.index for delta in calls] == sorted(delta.index for delta in calls)


def test_one_call_is_enough_where_several_are_not_wanted():
    answer = '{"name": "add", "parameters": {}}; {"name": "find", "parameters": {}} and'
    for pieces in ([answer], answer):
        assert read("llama3", pieces, parallel=False)[:3] == (None, [("add", "{}")], True)
    parser = ToolParser(FORMATS["llama3"], ["add"], parallel=False)
    parser.feed('{"name": "add", "parameters": {')
    assert not parser.done
    parser.feed("}")
    assert parser.done


def test_a_long_answer_is_read_in_linear_time():
    answer = '<tool_call>{"name": "add", "arguments": {"a": "' + "<tool_call>{" * 20_000
    assert read("hermes", [answer])[1][0][1].count("<tool_call>") == 20_000
