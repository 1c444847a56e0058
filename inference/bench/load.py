"""One timed run: `batch` equal requests that arrive at once, at fixed lengths; and drafts for it.

Prompts are drawn at random with one seed, and end tokens are ignored, so that every run of a load
does the same work. The requests of a task (`inference.bench.tasks`) have texts and lengths of their
own; so many at once arrive when those before them have ended.

An `Oracle` makes drafts of which as many are accepted as is asked for, for models whose weights are
random. Requests of a load with a token are biased so strongly that it alone is chosen. Each draft
is that token with the chance p, and another one else: d drafts then give a sequence

    1 + p + p^2 + ... + p^d

tokens a step on average. The engine proposes and verifies them as any others, and the tokens stay
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import cycle, groupby, pairwise
from typing import Any

import numpy as np
import torch
from pydantic import Field

from formats.documents import Strict
from formats.errors import EngineError, RequestError
from inference.bench.tasks import Task, forced
from inference.engine import Engine
from inference.proposers import Proposer
from inference.requests.request import RequestOutput, SamplingParams
from inference.scheduling.batch import Ints, RunningBatch
from inference.scheduling.blocks import blocks_for
from inference.speculate.counts import DraftCounts

SEED = 0
TOKEN = 1  # that is chosen where drafts are faked; any would do
USUAL = 4  # drafts
STRONG = 100.0  # a bias that no logit of random weights comes near


class Load(Strict):
    """What one run does: `batch` equal requests that arrive at once.

    Attributes:
        batch: Requests.
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

    @property
    def decode_tokens_s(self) -> float:
        """Tokens per second from the moment when every request has its first."""
        return self.decode_tokens / self.decode_s


def run_once(engine: Engine, load: Load) -> Run:
    """Run a load once and note its times.

    Raises:
        RequestError: the engine cannot hold the load's requests all at once.
        EngineError: a request did not end as it should.
    """
    before = DraftCounts.of(engine.speculation)
    waves = ask(engine, load)
    outputs = [output for wave in waves for output in wave]
    prefill, decode, tokens = map(sum, zip(*map(_times, waves), strict=True))
    return Run(
        *(prefill, decode, tokens),
        first_token_s=[output.token_times[0] - output.arrival for output in outputs],
        per_token_s=[s for output in outputs for s in between_tokens(output.token_times)],
        peak_memory_bytes=engine.backend.peak_bytes(),
        kv_bytes_per_token=engine.kv_bytes_per_token,
        weight_bytes=engine.checkpoint.nbytes or engine.model.weight_bytes,
        drafts=DraftCounts.of(engine.speculation).since(before),
    )


def ask(engine: Engine, load: Load) -> list[list[RequestOutput]]:
    """The answers to a load's requests, by those that ran at once.

    Requests take turns with the engine's adapters, if any.

    Raises:
        RequestError: the engine cannot hold so many at once, or outputs are to be forced where
            they cannot be.
        EngineError: one did not end as it should.
    """
    _check_room(engine, load)
    if load.task is None:
        shape, draw = (load.batch, load.prompt_tokens), torch.Generator().manual_seed(SEED)
        prompts = torch.randint(engine.model.config.vocab_size, shape, generator=draw).tolist()
        lengths, wanted = (load.new_tokens,) * load.batch, None
    else:
        prompts, lengths, wanted = load.task.prompts, load.task.lengths, load.task.outputs
    same: dict[str, Any] = {"ignore_eos": True}
    same |= {} if load.token is None else {"logit_bias": {load.token: STRONG}}
    adapters = cycle(list(engine.adapters) or [None])
    params = [SamplingParams(max_tokens=n, adapter=next(adapters), **same) for n in lengths]
    texts = [(*prompt, *out) for prompt, out in zip(prompts, wanted or (), strict=False)]
    waves = list[list[RequestOutput]]()
    with forced(engine, texts) if texts else nullcontext():
        for i in range(0, len(prompts), load.batch):
            own = slice(i, i + load.batch)
            outputs = engine.generate(prompts[own], params[own])
            _check_ends(outputs, lengths[own])
            if wanted and tuple(tuple(output.token_ids) for output in outputs) != wanted[own]:
                raise EngineError("a request went on otherwise than as it was forced to")
            waves.append(outputs)
    return waves


def _check_ends(outputs: list[RequestOutput], lengths: Sequence[int]) -> None:
    """Raise EngineError unless outputs are as long as was asked."""
    for output, length in zip(outputs, lengths, strict=True):
        if output.finish_reason != "length" or len(output.token_ids) != length:
            raise EngineError(
                f"a request of {length} new tokens ended with {len(output.token_ids)} "
                f"({output.error or output.finish_reason}); speed cannot be told from it"
            )


def _times(outputs: Sequence[RequestOutput]) -> tuple[float, float, int]:
    """`prefill_s`, `decode_s` and `decode_tokens` of requests that ran at once; see `Run`."""
    start = min(output.arrival for output in outputs)
    full = max(output.token_times[0] for output in outputs)
    end = max(output.token_times[-1] for output in outputs)
    tokens = sum(t > full for output in outputs for t in output.token_times)
    return full - start, end - full, tokens


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


def chance_of(acceptance: float, depth: int | None) -> float:
    """The chance p with which drafts are to be right.

    Args:
        acceptance: Tokens of a sequence in a step, on average.
        depth: Drafts of it in each step; where they are as many as pay (None), `USUAL` would give
            so many tokens.

    Raises:
        RequestError: so many drafts cannot give so many tokens.
    """
    depth = USUAL if depth is None else depth
    if not 1 <= acceptance <= depth + 1:
        raise RequestError(
            f"--acceptance: found {acceptance:g} tokens a step; {depth} drafts give from 1 to "
            f"{depth + 1}",
            "acceptance",
        )
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**i for i in range(depth + 1)) < acceptance else (low, p)
    return high


class Oracle(Proposer):
    """Drafts of outputs of one token.

    Args:
        chance: With which a draft is right.
    """

    def __init__(self, token: int, chance: float) -> None:
        self._token, self._chance = token, chance
        self._random = np.random.default_rng(SEED)

    def propose(self, batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        """See `Proposer.propose`."""
        position = np.arange(int(most.max()))
        right = self._random.random((len(places), len(position))) < self._chance
        draft = np.where(right, self._token, self._token - 1)
        rows, within = np.nonzero(position < most[:, None])
        batch.ids[places[rows], batch.known[places[rows]] + within] = draft[rows, within]
        return most
