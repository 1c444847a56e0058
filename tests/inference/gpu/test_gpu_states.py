"""Models that keep a recurrent state on the GPU's engine without a GPU: its kernels interpreted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.beam_search import BeamParams, beam_search
from inference.config import SpeculateConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from inference.speculate.counts import DraftCounts
from tests.families import but_in_ci
from tests.inference.gpu.test_gpu import engine_of, prompt
from tests.inference.speculate.predicting import write_knowing
from tests.inference.speculate.requests import Replay
from tests.inference.transformers_code.test_kept_states import kept_in_int8, write_remembering
from tests.inference.transformers_code.test_states import write_small
from tests.kernels.triton_lab import interpreted

GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)
DRAFTS = SpeculateConfig(method="ngram", depth=3)


def check_greedy(exact: Engine, ids: list[int], tokens: Sequence[int], near: float) -> None:
    """Each token is the likeliest by the logits of another engine, or next to it.

    Args:
        exact: The other engine.
        ids: A prompt.
        tokens: What follows it.
        near: How far logits may be off, in standard deviations of a row.
    """
    logits = exact.score([*ids, *tokens])[len(ids) - 1 : -1].cpu()
    gap = logits.amax(-1) - logits.gather(1, torch.tensor([*tokens])[:, None])[:, 0]
    assert (gap <= near * logits.std(-1)).all(), gap / logits.std(-1)


def distances(engine: Engine, exact: Engine, ids: list[int]) -> torch.Tensor:
    """Relative distance of two engines' logits of each token [T]."""
    found, wanted = (one.score(ids).cpu() for one in (engine, exact))
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)


@pytest.mark.parametrize("kind", but_in_ci(["qwen3_next", "bamba"], "qwen3_next"))
def test_logits_and_tokens_are_those_of_the_cpu(tmp_path, kind):
    near_the_cpu(str(write_small(kind, tmp_path)))


@interpreted
def near_the_cpu(path: str):
    exact, engine = engine_of(path, triton=False), engine_of(path, max_batched_tokens=64)
    off = distances(engine, exact, prompt(80))
    assert off.median() < 0.005
    assert off.mean() < 0.02  # a router that hardly knows may choose another expert
    prompts = [prompt(5), prompt(70, 1), prompt(1, 2)]
    for _ in range(2):
        for ids, output in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            check_greedy(exact, ids, output.token_ids, 0.2)
        engine.check_integrity()
    assert engine.stats().hit_tokens == 64  # restored from the state that was kept there


def test_states_kept_in_int8_are_found_as_on_a_cpu(tmp_path):
    model = write_remembering("mamba2", tmp_path / "float", {})
    found_in_int8(str(kept_in_int8(model, tmp_path / "s8")))


@interpreted
def found_in_int8(path: str):
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=5)
    with layers_of_a_cpu():
        exact, engine = engine_of(path, triton=False), engine_of(path, torch.float32)
        wanted = [exact.generate([prompt(80)], params)[0] for _ in range(2)]
        found = [engine.generate([prompt(80)], params)[0] for _ in range(2)]
        assert engine.stats().hit_tokens == exact.stats().hit_tokens == 64
        assert engine.state_bytes == exact.state_bytes
        for one, other in zip(found, wanted, strict=True):
            assert one.token_ids == other.token_ids
            for mine, its in zip(one.logprobs, other.logprobs, strict=True):
                assert dict(mine) == pytest.approx(dict(its), abs=1e-4)
        off = distances(engine, exact, prompt(150))  # rounded at both borders
        assert off.max() < 1e-4
        rounds = engine.score(prompt(150)) - engine.score(prompt(150), rounded_states=False)
        assert rounds[:64].abs().max() == 0
        assert rounds[64:].abs().max() > 1e-4
        engine.check_integrity()


@pytest.mark.ci  # half a minute
def test_random_requests_are_those_of_the_cpu(tmp_path):
    random_requests(str(write_small("mamba2", tmp_path)))


@contextmanager
def layers_of_a_cpu() -> Iterator[None]:
    """Layers and norms are a CPU's for a while, which take a hundredth of the time."""
    from inference.cpu.backend import CpuBackend
    from inference.cpu.loop import CodeStep as OnCpu
    from inference.gpu.backend import TritonBackend
    from inference.gpu.code_step import CodeStep

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CodeStep, "norm", OnCpu.norm)
        patch.setattr(TritonBackend, "linear", lambda _, stored: CpuBackend().linear(stored))
        yield


@interpreted
def random_requests(path: str):
    """With chunks, hits, preemption, aborts, few snapshots, and a text scored among them."""
    sizes: dict[str, Any] = {"kv_blocks": 5, "state_snapshots": 3, "max_batched_tokens": 70}
    with layers_of_a_cpu():
        check_states(
            engine_of(path, triton=False), engine_of(path, torch.float32, **sizes), 1e-3, 16
        )


def check_states(exact: Engine, engine: Engine, near: float, count: int) -> None:
    """Requests, beams and a text that is scored, against another engine.

    Args:
        exact: The other engine, of the same model.
        engine: The engine, with few blocks.
        near: As in `check_greedy`.
        count: Of requests.
    """
    check_random_requests(exact, engine, count, near)
    beams, params = [], BeamParams(beam_width=3, max_tokens=6)
    for one in (exact, engine):
        beams.append(beam_search(one, [prompt(70)], params)[0][0])
        one.check_integrity()
    assert beams[1].cumulative_logprob == pytest.approx(beams[0].cumulative_logprob, abs=6 * near)
    check_scored_among_others(exact, engine, near / 8)


def check_random_requests(exact: Engine, engine: Engine, count: int, near: float) -> None:
    """So many requests at any times, some aborted; each is greedy by another engine's logits."""
    rng, wanted, done = random.Random(7), dict[str, list[int]](), dict[str, list[int]]()
    while count or engine.has_unfinished:
        if count and rng.random() < 0.5:
            count -= 1
            ids = prompt(rng.choice((1, 64, 110))) + prompt(rng.randrange(16), count)
            params = SamplingParams(max_tokens=rng.randrange(1, 60), ignore_eos=True)
            wanted[engine.add_request(ids, params)] = ids
        if wanted and rng.random() < 0.02:
            engine.abort(rng.choice(list(wanted)))
        for output in engine.step():
            if output.finish_reason == "length":
                done[output.request_id] = list(output.token_ids)
        engine.check_integrity()
    assert engine.stats().preemptions > 0
    assert engine.stats().hit_tokens > 0
    assert len(done) > len(wanted) / 2
    for name, tokens in done.items():
        check_greedy(exact, wanted[name], tokens, near)


def check_scored_among_others(exact: Engine, engine: Engine, near: float) -> None:
    """A text that is scored in several steps keeps its state while others, fewer than a step is
    padded to, get their next tokens."""
    names = [engine.add_request(prompt(n), GREEDY) for n in (3, 4, 5)]
    for _ in range(2):
        engine.step()
    parts = []
    for part in engine.score_parts(prompt(90)):
        parts.append(part.cpu())
        engine.step()
    for name in names:
        engine.abort(name)
    found, wanted = torch.cat(parts), exact.score(prompt(90)).cpu()
    assert len(parts) > 1
    assert (found - wanted).norm() < near * wanted.norm()


@pytest.mark.parametrize("kind", but_in_ci(["mamba2", "bamba"], "mamba2"))
def test_drafts_change_no_token(tmp_path, kind):
    drafted_requests(str(write_small(kind, tmp_path)), kind == "mamba2")


@interpreted
def drafted_requests(path: str, exact: bool):
    """Some are right and some wrong; blocks are few. No cache holds fp32."""
    sizes: dict[str, Any] = {"kv_blocks": 5, "max_batched_tokens": 70, "speculate": DRAFTS}
    with layers_of_a_cpu():
        engine = engine_of(path, torch.float32 if exact else torch.float16, **sizes)
        shapes, padded = set(), engine.loop.runner.executor._padded

        def noted(plan):
            shapes.add(plan.size.pieces)
            return padded(plan)

        engine.loop.runner.executor._padded = noted
        check_drafts(engine, engine_of(path, triton=False), 1e-3 if exact else 0.2, 14)
        assert (4, 4) in shapes  # three requests, three drafts each


def check_drafts(engine: Engine, exact: Engine, near: float, count: int) -> None:
    """What comes with drafts is greedy by another engine's logits, prompts and drafts beside.

    Args:
        engine: Made with `DRAFTS`.
        exact: The other engine, of the same model.
        near: As in `check_greedy`.
        count: Tokens of each request, one of which begins when others have drafts.
    """
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    prompts = [prompt(n, n) for n in (60, 5, 1, 90)]
    outputs = exact.generate(prompts, params)
    texts = [[*p, *o.token_ids] for p, o in zip(prompts, outputs, strict=True)]
    engine.speculate_by(Replay(texts, 0.7, 384), DRAFTS.depth)
    names = [engine.add_request(ids, params) for ids in prompts[:3]]
    done = {}
    for step in range(10_000):
        if step == 3:
            names.append(engine.add_request(prompts[3], params))
        if not engine.has_unfinished:
            break
        done |= {out.request_id: out.token_ids for out in engine.step() if out.finished}
        engine.check_integrity()
    for ids, name in zip(prompts, names, strict=True):
        assert len(done[name]) == count
        check_greedy(exact, ids, done[name], near)
    counts = DraftCounts.of(engine.speculation)
    assert 0.2 * sum(counts.proposed) < sum(counts.accepted) < sum(counts.proposed)


@pytest.mark.parametrize("method", ["mtp", "draft"])
def test_a_layer_for_further_tokens_or_the_model_itself_drafts(tmp_path, method):
    plain = write_small("qwen3_5_text", tmp_path)
    predicted(str(write_knowing(plain, tmp_path / "knowing")), method)


@interpreted
def predicted(path: str, method: str):
    """What it knows is right, on the cache and with the states that it has beside the model's."""
    own = SpeculateConfig(method=method, path=path if method == "draft" else None, depth=3)
    engine = engine_of(path, speculate=own, max_batched_tokens=64)
    check_predicted(engine, engine_of(path, triton=False), 0.2, 9)


def check_predicted(engine: Engine, exact: Engine, near: float, count: int) -> None:
    """Requests of a model whose layer for further tokens mostly knows them, by that.

    Args:
        engine: Made to speculate by it.
        exact: Another engine of the same model.
        near: As in `check_greedy`.
        count: Tokens of each request.
    """
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    prompts = [[7] * 70 + [9], [40, 5, 41], [8, 40]]  # three, in rows of drafts for four
    for ids, output in zip(prompts, engine.generate(prompts, params), strict=True):
        check_greedy(exact, ids, output.token_ids, near)
    assert DraftCounts.of(engine.speculation).tokens_per_step > 2.5  # of 4
    engine.check_integrity()


def test_quantized_layers_and_caches(tmp_path: Path):
    from tests.ptq.quantizing import make_plan, quantize_tokens, random_tokens

    plan = make_plan(write_small("lfm2", tmp_path), tmp_path / "out", "a8w8c8")
    quantized_near_the_cpu(str(quantize_tokens(plan, random_tokens(), progress=False).checkpoint))


@interpreted
def quantized_near_the_cpu(path: str):
    exact, engine = engine_of(path, triton=False), engine_of(path, max_batched_tokens=64)
    assert engine.pools[0].k.dtype == torch.int8
    assert distances(engine, exact, prompt(40)).mean() < 0.1
