"""One timed run: `batch` equal requests that arrive at once, at fixed lengths.

Prompts are drawn at random with one seed, and end tokens are ignored, so that every run of a load
does the same work. The requests of a task (`inference.bench.tasks`) have texts and lengths of their
own; so many at once arrive when those before them have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from pydantic import Field

from formats.errors import EngineError, RequestError
from formats.scheme import Strict
from inference.bench.tasks import Task, forced
from inference.engine import Engine
from inference.requests.request import RequestOutput, SamplingParams
from inference.scheduling.blocks import blocks_for
from inference.speculate.counts import DraftCounts

SEED = 0
STRONG = 100.0  # a bias that no logit of random weights comes near


class Load(Strict):
    """What one run does: `batch` equal requests that arrive at once.

    Attributes:
        batch: Requests.
        prompt_tokens: Tokens of each prompt.
        new_tokens: Tokens that each generates.
        token: The one token that comes, by a bias of its logit; None: whatever comes.
        task: The requests, where they are a task's; the lengths are then those of the longest.
    """

    batch: int = Field(default=4, ge=1)
    prompt_tokens: int = Field(default=128, ge=1)
    new_tokens: int = Field(default=64, ge=2)
    token: int | None = None
    task: Task | None = None

    @property
    def all_prompt_tokens(self) -> int:
        """Prompt tokens of all requests of a run."""
        if self.task is None:
            return self.batch * self.prompt_tokens
        return sum(map(len, self.task.prompts))


@dataclass(frozen=True)
class Run:
    """Times of one run, in seconds.

    Attributes:
        prefill_s: From the first request's arrival until every request has its first token; of
            the requests of a task the sum over those that ran at once, as of `decode_s`.
        decode_s: From then until the end.
        decode_tokens: Tokens generated in `decode_s`.
        first_token_s: From arrival to first token, of each request.
        per_token_s: Between two tokens of a request, of all requests.
        peak_memory_bytes: Most memory so far, loading included: resident of the process, or
            allocated on the GPU.
        kv_bytes_per_token: Bytes of K and V of one token in all layers, as the engine holds them.
        weight_bytes: Bytes of the checkpoint's weight files, or in memory if it has none.
        drafts: What became of drafts in this run.
    """

    prefill_s: float
    decode_s: float
    decode_tokens: int
    first_token_s: list[float]
    per_token_s: list[float]
    peak_memory_bytes: int
    kv_bytes_per_token: int
    weight_bytes: int
    drafts: DraftCounts = field(default_factory=DraftCounts)


def run_once(engine: Engine, load: Load) -> Run:
    """Run a load once and note its times.

    Raises:
        RequestError: the engine cannot hold the load's requests all at once.
        EngineError: a request did not end as it should.
    """
    before = DraftCounts.of(engine.speculation)
    waves = [ask(engine, load)] if load.task is None else ask_task(engine, load, load.task)
    outputs, times = [output for wave in waves for output in wave], [_times(w) for w in waves]
    return Run(
        prefill_s=sum(wave.prefill_s for wave in times),
        decode_s=sum(wave.decode_s for wave in times),
        decode_tokens=sum(wave.decode_tokens for wave in times),
        first_token_s=[output.token_times[0] - output.arrival for output in outputs],
        per_token_s=[s for output in outputs for s in between_tokens(output.token_times)],
        peak_memory_bytes=engine.backend.peak_bytes(),
        kv_bytes_per_token=engine.kv_bytes_per_token,
        weight_bytes=engine.checkpoint.nbytes or engine.model.weight_bytes,
        drafts=DraftCounts.of(engine.speculation).since(before),
    )


def ask(engine: Engine, load: Load) -> list[RequestOutput]:
    """The answers to a load's requests, which take turns with the engine's adapters, if any.

    Raises:
        RequestError: the engine cannot hold them all at once.
        EngineError: one did not end as it should.
    """
    _check_room(engine, load)
    shape = (load.batch, load.prompt_tokens)
    generator = torch.Generator().manual_seed(SEED)
    prompts = torch.randint(engine.model.config.vocab_size, shape, generator=generator).tolist()
    bias = () if load.token is None else ((load.token, STRONG),)
    params = SamplingParams(max_tokens=load.new_tokens, ignore_eos=True, logit_bias=bias)
    names = list(engine.adapters) or [None]
    each = [params.model_copy(update={"adapter": names[i % len(names)]}) for i in range(load.batch)]
    return _complete(engine.generate(prompts, each), [load.new_tokens] * load.batch)


def ask_task(engine: Engine, load: Load, task: Task) -> list[list[RequestOutput]]:
    """The answers to a task's requests, by those that ran at once.

    Raises:
        RequestError: the engine cannot hold so many at once, or outputs are to be forced where
            they cannot be.
    """
    _check_room(engine, load)
    waves, prompts = list[list[RequestOutput]](), task.prompts
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in task.lengths]
    pairs = zip(prompts, task.outputs or (), strict=False)
    texts = [(*prompt, *output) for prompt, output in pairs]
    with forced(engine, texts) if texts else nullcontext():
        for i in range(0, len(prompts), load.batch):
            own = slice(i, i + load.batch)
            outputs = _complete(engine.generate(prompts[own], params[own]), task.lengths[own])
            if task.outputs and [tuple(o.token_ids) for o in outputs] != [*task.outputs[own]]:
                raise EngineError("a request went on otherwise than as it was forced to")
            waves.append(outputs)
    return waves


def _complete(outputs: list[RequestOutput], lengths: Sequence[int]) -> list[RequestOutput]:
    """Outputs that are as long as was asked.

    Raises:
        EngineError: one is not.
    """
    for output, length in zip(outputs, lengths, strict=True):
        if output.finish_reason != "length" or len(output.token_ids) != length:
            raise EngineError(
                f"a request of {length} new tokens ended with {len(output.token_ids)} "
                f"({output.error or output.finish_reason}); speed cannot be told from it"
            )
    return outputs


class _Times(NamedTuple):
    """Of requests that ran at once: see `Run`."""

    prefill_s: float
    decode_s: float
    decode_tokens: int


def _times(outputs: Sequence[RequestOutput]) -> _Times:
    start = min(output.arrival for output in outputs)
    full = max(output.token_times[0] for output in outputs)
    end = max(output.token_times[-1] for output in outputs)
    tokens = sum(t > full for output in outputs for t in output.token_times)
    return _Times(full - start, end - full, tokens)


def between_tokens(times: Sequence[float]) -> list[float]:
    """Seconds of each token but the first since the one before; of one step they share its time."""
    each = [(moment, len(list(same))) for moment, same in groupby(times)]
    rest = [(b - a) / count for (a, _), (b, count) in pairwise(each) for _ in range(count)]
    return [0.0] * (each[0][1] - 1) + rest


def _check_room(engine: Engine, load: Load) -> None:
    places = engine.config.max_batch_size
    needed = load.batch * blocks_for(load.prompt_tokens + load.new_tokens)
    if load.batch > places or needed > engine.stats().total:
        raise RequestError(
            f"batch: {load.batch} requests of {load.prompt_tokens} + {load.new_tokens} tokens need "
            f"{load.batch} places and {needed} blocks; the engine has {places} and "
            f"{engine.stats().total}. Raise max_batch_size and kv_blocks, or lower the batch",
            "batch",
        )
