"""One timed run: `batch` equal requests that arrive at once, at fixed lengths.

Prompts are drawn at random with one seed, and end tokens are ignored, so that every run of a load
does the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import torch
from pydantic import Field

from formats.errors import EngineError, RequestError
from formats.scheme import Strict
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
    """

    batch: int = Field(default=4, ge=1)
    prompt_tokens: int = Field(default=128, ge=1)
    new_tokens: int = Field(default=64, ge=2)
    token: int | None = None


@dataclass(frozen=True)
class Run:
    """Times of one run, in seconds.

    Attributes:
        prefill_s: From the first request's arrival until every request has its first token.
        decode_s: From then until the end.
        decode_tokens: Tokens that came in `decode_s`.
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
    outputs = ask(engine, load)
    for output in outputs:
        if output.finish_reason != "length" or len(output.token_ids) != load.new_tokens:
            raise EngineError(
                f"a request of {load.new_tokens} new tokens ended with {len(output.token_ids)} "
                f"({output.error or output.finish_reason}); speed cannot be told from it"
            )
    start = min(output.arrival for output in outputs)
    full = max(output.token_times[0] for output in outputs)
    end = max(output.token_times[-1] for output in outputs)
    times = [output.token_times for output in outputs]
    return Run(
        prefill_s=full - start,
        decode_s=end - full,
        decode_tokens=sum(t > full for row in times for t in row),
        first_token_s=[output.token_times[0] - output.arrival for output in outputs],
        per_token_s=[seconds for row in times for seconds in between_tokens(row)],
        peak_memory_bytes=engine.backend.peak_bytes(),
        kv_bytes_per_token=engine.kv_bytes_per_token,
        weight_bytes=engine.checkpoint.nbytes or engine.model.weight_bytes,
        drafts=DraftCounts.of(engine.speculation).since(before),
    )


def ask(engine: Engine, load: Load) -> list[RequestOutput]:
    """The answers to a load's requests.

    Raises:
        RequestError: the engine cannot hold them all at once.
    """
    _check_room(engine, load)
    shape = (load.batch, load.prompt_tokens)
    generator = torch.Generator().manual_seed(SEED)
    prompts = torch.randint(engine.model.config.vocab_size, shape, generator=generator).tolist()
    bias = () if load.token is None else ((load.token, STRONG),)
    params = SamplingParams(max_tokens=load.new_tokens, ignore_eos=True, logit_bias=bias)
    return engine.generate(prompts, params)


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
