"""What other systems got wrong with drafts: each trap, with drafts that lead into it."""

import math
from collections.abc import Mapping, Sequence

import pytest

from inference.config import SpeculateConfig
from inference.engine import Engine
from inference.proposers import draft_methods
from inference.requests.constraint import Constraint
from inference.requests.request import RequestOutput, SamplingParams
from tests.inference.engines import engine_of, tokens_of
from tests.inference.speculate.requests import Replay

PROMPT = [*range(20, 40)]
DEPTH = 8
OF_TOKENS = [name for name, own in draft_methods().items() if not own.network]
END = 0  # of the tiny models
KINDS: dict[str, dict] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 5},
    "told": {"logprobs": 2},
    "drawn and told": {"temperature": 0.8, "seed": 6, "logprobs": 0},
    "penalized": {"repetition_penalty": 1.5, "frequency_penalty": 2.0, "logprobs": 1},
}
WORDS = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "value"]}, "big": {"type": "boolean"}},
    "required": ["name", "big"],
}


def told(output: RequestOutput) -> tuple:
    logprobs = None if output.logprobs is None else list(output.logprobs)
    return list(output.token_ids), output.text, output.finish_reason, logprobs


def answer(runner: Engine, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> tuple:
    (output,) = runner.generate([list(prompt)], params)
    runner.check_integrity()
    return told(output)


def drafted(
    runner: Engine, texts: Sequence[Sequence[int]], chance: float = 1.0, depth: int = DEPTH
) -> Replay:
    """Have drafts of known texts, prompts included, from now on."""
    replay = Replay(texts, chance, runner.model.config.vocab_size)
    runner.speculate_by(replay, depth)
    return replay


def ended_at(tokens: Sequence[int], least: int = 6) -> int:
    """The first place from some on whose token has not come before."""
    return next(i for i in range(least, len(tokens)) if tokens[i] not in tokens[:i])


def check_ended(runner: Engine, params: SamplingParams, wanted: tuple, text, prompt=PROMPT) -> None:
    """Drafts of a text that goes on after an answer's end change nothing, though they reach it."""
    replay = drafted(runner, [[*prompt, *text]])
    assert answer(runner, params, prompt) == wanted
    assert replay.reached_behind(len(prompt) + len(wanted[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_behind_an_end_token_are_not_taken(tiny_llama, kind):
    """The drafts go on as the text would without its end."""
    runner, values = engine_of(tiny_llama), KINDS[kind] | {"max_tokens": 40, "ignore_eos": True}
    whole, *_ = answer(runner, SamplingParams(**values))
    at = ended_at(whole)
    params = SamplingParams(**values, stop_token_ids=(whole[at],))
    wanted = answer(runner, params)
    assert wanted[0] == whole[: at + 1]
    assert wanted[2] == "stop"
    check_ended(runner, params, wanted, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_behind_a_stop_text_are_not_taken(tiny_llama, kind):
    """The text stands in the middle of drafts; it begins in one token and ends in another."""
    runner = engine_of(tiny_llama)
    decode = runner.tokenizer.decode
    letters = {token: 50 for token in range(384) if decode([token]).isalpha()}
    values = KINDS[kind] | {"max_tokens": 40, "ignore_eos": True, "frequency_penalty": 2.0}
    values["logit_bias"] = letters
    whole, text, *_ = answer(runner, SamplingParams(**values))
    at = ended_at(whole)
    stop = decode(whole[at - 1 : at + 1])[-2:]
    params = SamplingParams(**values, stop=(stop,))
    wanted = answer(runner, params)
    assert wanted[1] == text[: text.index(stop)]
    assert 1 < len(wanted[0]) < 40
    assert wanted[2] == "stop"
    check_ended(runner, params, wanted, whole)


def test_drafts_behind_a_stop_text_of_a_plain_greedy_request_are_not_taken(tiny_llama):
    """Of such requests all tokens of a step are looked at together, where no text stops them."""
    runner, found = engine_of(tiny_llama), 0
    values: dict = {"max_tokens": 40, "ignore_eos": True}
    for prompt in ([*range(start, start + 20)] for start in range(20, 120, 11)):
        whole, text, *_ = answer(runner, SamplingParams(**values), prompt)
        stop = runner.tokenizer.decode(whole[2:6])
        if not (stop and stop.isascii()):
            continue
        params, found = SamplingParams(**values, stop=(stop,)), found + 1
        wanted = answer(runner, params, prompt)
        count = len(wanted[0])
        assert wanted[:3] == (whole[:count], text[: text.index(stop)], "stop")
        assert 1 < count <= 6
        check_ended(runner, params, wanted, whole, prompt)
        later = SamplingParams(**values, stop=(stop,), min_tokens=12)  # though the text is there
        several = answer(runner, later, prompt)
        runner.speculate_by(None)
        assert several == answer(runner, later, prompt)
        assert len(several[0]) >= 12
    assert found > 2


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_that_may_not_come_yet_is_not_taken(tiny_llama, kind):
    """Drafts are end tokens, which the model wants all the time, and `min_tokens` forbids."""
    runner = engine_of(tiny_llama)
    params = SamplingParams(**KINDS[kind], max_tokens=30, min_tokens=12, logit_bias={END: 100})
    wanted = answer(runner, params)
    assert len(wanted[0]) == 13
    assert wanted[0][-1] == END
    assert END not in wanted[0][:-1]
    texts = [[*PROMPT, *wanted[0][:i], *[END] * 20] for i in range(1, 13)]
    replay = drafted(runner, texts)
    assert answer(runner, params) == wanted
    assert all(set(drafts) == {END} for _, drafts in replay.drafts)
    assert len(replay.drafts) == 12  # no step brought two tokens


@pytest.mark.parametrize("length", [64, 70, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_no_draft_stands_behind_the_last_position(tiny_llama, kind, length):
    """The model has no more positions, and the cache no more blocks."""
    config = {"max_model_len": length, "kv_blocks": math.ceil(length / 64), "max_batch_size": 1}
    runner, params = engine_of(tiny_llama, **config), SamplingParams(**KINDS[kind], max_tokens=500)
    wanted = answer(runner, params)
    assert len(wanted[0]) == length - len(PROMPT)
    assert wanted[2] == "length"
    replay = drafted(runner, [[*PROMPT, *wanted[0], *[7] * 20]], depth=16)
    assert answer(runner, params) == wanted
    assert max(len(text) + len(drafts) for text, drafts in replay.drafts) == length - 1


@pytest.mark.parametrize(
    "values",
    [{}, {"temperature": 1.0, "seed": 3, "logprobs": 1}, {"ignore_eos": True, "min_tokens": 60}],
)
def test_drafts_behind_a_complete_json_are_not_taken(tiny_llama, values):
    runner = engine_of(tiny_llama)
    blank = {t: -100 for t in range(1, 384) if runner.tokenizer.decode([t]).isspace()}
    constraint = Constraint.json_schema(WORDS)
    params = SamplingParams(**values, max_tokens=60, constraint=constraint, logit_bias=blank)
    wanted = answer(runner, params)
    assert wanted[2] == "stop"
    (bracket,) = runner.tokenizer("}", add_special_tokens=False)["input_ids"]
    ended = wanted[0][:-1] if wanted[0][-1] == END else wanted[0]
    for rest in ([END], [bracket], [7, END, bracket]):
        texts = [[*PROMPT, *ended, *rest * 12]]
        replay = drafted(runner, texts)
        for _ in range(2):  # a matcher that went too far would be found so
            assert answer(runner, params) == wanted
        assert replay.reached_behind(len(PROMPT) + len(wanted[0]))
        drafted(runner, texts, 0.6)
        assert answer(runner, params) == wanted
        assert 0 < runner.speculation.accepted.sum() < runner.speculation.proposed.sum()


@pytest.mark.parametrize("method", [*OF_TOKENS, "known"])
def test_the_prefix_cache_finds_as_much_with_drafts(tiny_llama, method):
    """Shared beginnings, the same again, and the next turns of chats, whose beginnings have tokens
    that were drafts."""
    shared = [5, 6, 7, 8] * 25
    prompts = [[*shared, 30 + i, *[9, 10 + i] * 20] for i in range(4)]
    params = SamplingParams(max_tokens=75, ignore_eos=True)
    found, answers = [], []
    for speculates in (False, True):
        runner = engine_of(tiny_llama, max_batch_size=8)
        if speculates and method == "known":
            drafted(runner, answers[0], 0.7)
        elif speculates:
            config = SpeculateConfig(method=method, depth=DEPTH)
            runner = engine_of(tiny_llama, max_batch_size=8, speculate=config)
        texts, counts = [], []
        for _ in range(2):
            outputs = runner.generate(prompts, params)
            turns = [[*tokens_of(o), 50 + i] for i, o in enumerate(outputs)]
            outputs += runner.generate(turns, params)
            texts += [tokens_of(o) for o in outputs]
            stats = runner.stats()
            counts.append((stats.queried_tokens, stats.hit_tokens, stats.cached))
        runner.check_integrity()
        found.append(counts)
        answers.append(texts)
    assert runner.speculation.accepted.sum() > 20
    assert answers[1] == answers[0]
    assert found[1] == found[0]
    assert found[0][1][1] - found[0][0][1] == 4 * 128 + 4 * 192  # of the second round


@pytest.mark.parametrize("method", [*OF_TOKENS, "known"])
@pytest.mark.parametrize("scheme", ["float", "a8w8c8"])
def test_who_gives_way_says_the_same_with_drafts(tiny_llama, make_quantized, scheme, method):
    folder = make_quantized(tiny_llama, scheme)
    prompts = [[5, 6 + i, 7] * 18 for i in range(5)]
    params = [SamplingParams(**KINDS[kind], max_tokens=80, ignore_eos=True) for kind in KINDS]
    large = engine_of(folder, kv_blocks=64)
    wanted = [told(output) for output in large.generate(prompts, params)]
    assert large.stats().preemptions == 0
    own = None if method == "known" else SpeculateConfig(method=method, depth=DEPTH)
    small = engine_of(folder, kv_blocks=6, max_model_len=192, speculate=own)
    if own is None:
        drafted(small, [[*p, *w[0]] for p, w in zip(prompts, wanted, strict=True)], 0.8)
    for _ in range(2):
        before = small.stats().preemptions
        assert [told(output) for output in small.generate(prompts, params)] == wanted
        assert small.stats().preemptions > before
    small.check_integrity()
    assert small.speculation.accepted.sum() > 0


def test_log_probabilities_of_tokens_that_were_drafts_are_those_of_the_model(tiny_llama):
    """Not zero, as in other systems, nor those of another position: bit for bit the same."""
    prompts = [[5 + i, 9, 30 - i] for i in range(len(KINDS))]
    params = [
        SamplingParams(**(KINDS[kind] | {"logprobs": i}), max_tokens=41, ignore_eos=True)
        for i, kind in enumerate(KINDS)
    ]
    runner = engine_of(tiny_llama)
    wanted = [told(output) for output in runner.generate(prompts, params)]
    drafted(runner, [[*p, *w[0]] for p, w in zip(prompts, wanted, strict=True)], depth=3)
    outputs = runner.generate(prompts, params)
    assert [told(output) for output in outputs] == wanted
    own = runner.speculation
    assert own.accepted.tolist() == [10 * len(prompts)] * 3  # three of four tokens were drafts
    for output, values in zip(outputs, params, strict=True):
        assert len(output.logprobs or ()) == 41
        for token, found in zip(output.token_ids, output.logprobs or (), strict=True):
            assert all(math.isfinite(value) and value < 0 for value in found.values())
            assert token in found
            assert len(found) - (values.logprobs or 0) in (0, 1)
            assert sum(map(math.exp, found.values())) < 1


def test_a_step_tells_a_log_probability_with_each_of_its_tokens(tiny_llama):
    """As a server streams it: by names, tokens and log probabilities of steps."""
    runner, params = (
        engine_of(tiny_llama),
        SamplingParams(max_tokens=26, ignore_eos=True, logprobs=2),
    )
    prompts = {"a": PROMPT, "b": PROMPT[::-1]}
    wanted = dict(zip(prompts, runner.generate(list(prompts.values()), params), strict=True))
    drafted(runner, [tokens_of(o) for o in wanted.values()], depth=4)
    for name, prompt in prompts.items():
        runner.add_request(prompt, params, name)
    together, found = [], {name: list[tuple[int, Mapping[int, float]]]() for name in prompts}
    while runner.has_unfinished:
        result = runner.advance()
        assert [name for name, _ in result.logprobs] == result.names
        together += [result.names.count(name) for name in prompts if name in result.names]
        for name, token, (_, own) in zip(result.names, result.tokens, result.logprobs, strict=True):
            found[name].append((token, own))
    assert sorted(set(together)) == [1, 5]
    for name, output in wanted.items():
        assert found[name] == list(zip(output.token_ids, output.logprobs or (), strict=True))


@pytest.mark.parametrize(
    ("stop", "temperature"), [((), 0.9), (("never to be found",), 0.9), ((), 0.0)]
)
def test_several_tokens_of_a_step_are_one_delta_with_all_log_probabilities(
    tiny_llama, stop, temperature
):
    runner = engine_of(tiny_llama)
    values = {"max_tokens": 26, "ignore_eos": True, "logprobs": 3, "stop": stop}
    values |= {"temperature": temperature, "seed": 1}
    wanted = told(runner.generate([PROMPT], SamplingParams(**values))[0])
    drafted(runner, [[*PROMPT, *wanted[0]]], depth=4)
    counts, text = [], ""
    for output in runner.stream(PROMPT, SamplingParams(**values)):
        counts.append(len(output.token_ids))
        text += output.delta
        assert text == output.text
        assert list(output.token_ids) == wanted[0][: counts[-1]]
        assert list(output.logprobs or ()) == wanted[3][: counts[-1]]
    assert counts == [1, 6, 11, 16, 21, 26]
    assert text == wanted[1]
