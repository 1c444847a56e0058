"""Steps of a model of random weights on a GPU, one by one; the command is `ptq bench --steps`.

For every scheme and batch: the median step with a cache that holds some tokens of each sequence,
without computing them first, so that a table takes a minute; the same step's CUDA graph alone; what
the host does in a step that is not waiting; then a prefill of 8 prompts of 1024 tokens, the first
token of one prompt of 128, and the peak of the GPU's memory beside weights and cache.

What the host does in a step of decodes is measured alone, too, without a GPU: the device gives
fixed tokens at once. All else is as it is: scheduling, the arrays of each step, taking tokens.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from inference.bench.random_model import HEAD_PRESET, RandomCheckpoint, random_engine
from inference.bench.shapes import read_shape
from inference.config import EngineConfig
from inference.engine import Engine
from inference.models.layers import MixtureOfExperts
from inference.requests.request import SamplingParams
from inference.scheduling.active import ActiveRequest, ActiveRequests
from inference.scheduling.blocks import BlockManager, blocks_for
from inference.scheduling.scheduler import Scheduler
from kernels.bench.measure import copied_bandwidth
from kernels.op_inputs import KV_BLOCK

if TYPE_CHECKING:
    from inference.gpu.loop import DeviceLoop  # needs Triton

WARM_UP, STEPS = 8, 32
HOST_STEPS = 256  # in which every sequence needs a block four times
PROMPTS, PROMPT, SHORT = 8, 1024, 128  # of a prefill, their tokens, and those of a short prompt


@dataclass(frozen=True)
class Step:
    """Milliseconds of a decode step.

    Attributes:
        whole: From one to the next.
        graph: Of its CUDA graph alone.
        host: What the host does but waiting.
        floor: What the bytes that it reads would take at the bandwidth of a large copy.
    """

    batch: int
    whole: float
    graph: float
    host: float
    floor: float

    @property
    def tokens_s(self) -> float:
        """Tokens per second of all its requests."""
        return 1e3 * self.batch / self.whole

    @property
    def beyond(self) -> float:
        """The share of a step that its graph does not take."""
        return 1 - self.graph / self.whole

    @property
    def of_copy(self) -> float:
        """The share of a copy's bandwidth that it reaches."""
        return self.floor / self.whole


@dataclass(frozen=True)
class Figures:
    """What was measured of a scheme.

    Attributes:
        prefill_ms: From the arrival of the prompts to the first token of each.
        short_ms: From the arrival of one short prompt to its first token.
        peak_bytes: Most memory of the GPU, weights and cache included.
    """

    scheme: str
    steps: list[Step]
    prefill_ms: float
    short_ms: float
    weight_bytes: int
    cache_bytes: int
    peak_bytes: int

    @property
    def prefill_tokens_s(self) -> float:
        """Tokens of the prompts per second."""
        return 1e3 * PROMPTS * PROMPT / self.prefill_ms


def describe(own: Figures) -> list[str]:
    """The lines of a scheme."""
    lines = [
        f"{own.scheme:12} batch {step.batch:3}: {step.whole:7.3f} ms a step, {step.tokens_s:6.0f} "
        f"tokens/s, {step.of_copy:.0%} of a copy's bandwidth; graph {step.graph:7.3f} ms, host "
        f"{step.host:6.3f} ms "
        f"({1e3 * step.host / step.batch:.1f} us a request), beyond the graph {step.beyond:5.1%}"
        for step in own.steps
    ]
    peak, weights, cache = (n / 1e9 for n in (own.peak_bytes, own.weight_bytes, own.cache_bytes))
    last = (
        f"{own.scheme:12} prefill {PROMPTS} x {PROMPT}: {own.prefill_ms:.1f} ms, "
        f"{own.prefill_tokens_s:.0f} tokens/s; 1 x {SHORT}: {own.short_ms:.1f} ms; peak memory "
        f"{peak:.2f} GB of {weights:.2f} weights and {cache:.2f} cache"
    )
    return [*lines, last]


def table(found: Sequence[Figures], context: int) -> str:
    """All schemes in Markdown: tokens/s of all requests, and shares of a copy's bandwidth."""
    batches = [f"batch {step.batch}" for own in found[:1] for step in own.steps]
    rest = ("beyond the graph", "peak memory / weights + cache")
    heads = [*batches, f"prefill {PROMPTS} x {PROMPT}", f"first token of {SHORT}", *rest]
    rows = [[f"context {context}, tokens/s", *heads], ["---"] * (len(heads) + 1)]
    for own in found:
        beyond = [step.beyond for step in own.steps]
        held = own.weight_bytes + own.cache_bytes
        cells = [own.scheme, *(f"{s.tokens_s:,.0f} ({s.of_copy:.0%})" for s in own.steps)]
        cells += [f"{own.prefill_tokens_s:,.0f}", f"{own.short_ms:.1f} ms"]
        cells += [f"{min(beyond):.1%} to {max(beyond):.1%}"]
        rows.append([*cells, f"{own.peak_bytes / 1e9:.1f} / {held / 1e9:.1f} GB"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def to_json(
    device: str, shape: str, context: int, found: Sequence[Figures], missing: Mapping[str, str]
) -> str:
    """All figures, and why a scheme has none."""
    data = {"device": device, "torch": version("torch"), "shape": shape, "context": context}
    speeds = ({str(step.batch): step.tokens_s for step in own.steps} for own in found)
    schemes = [asdict(own) | {"tokens_s": s} for own, s in zip(found, speeds, strict=True)]
    return json.dumps(data | {"schemes": schemes, "missing": dict(missing)}, indent=1) + "\n"


def make_engine(
    shape: str, scheme: str, batches: Sequence[int], context: int, head: str | None, ranks: int
) -> Engine:
    """An engine of random weights, the first rank's cache of random numbers; see `measure`."""
    if head is None:  # that of a tied shape is a table, too
        tied = read_shape(shape)[1].get("tie_word_embeddings", False)
        head = "float" if tied or scheme == "float" else HEAD_PRESET
    own = {} if head == "float" else {"quantize_head": True, "head": head}
    opened = partial(RandomCheckpoint, shape, scheme, "cuda", **own)
    longest = max(context + WARM_UP + STEPS + 2, PROMPT + 2)
    blocks = max(max(batches) * blocks_for(longest), PROMPTS * blocks_for(PROMPT + 2))
    config = EngineConfig(
        max_batch_size=max(*batches, PROMPTS),
        max_model_len=longest,
        kv_blocks=blocks,
        max_batched_tokens=PROMPTS * PROMPT,
        prefix_cache=False,  # equal prompts are measured again and again
        tensor_parallel=ranks,
    )
    engine = random_engine(opened, config, "cuda")
    for pool in engine.pools:
        for tensor in (pool.k, pool.v):
            if tensor.dtype == torch.int8:
                tensor.random_(-100, 100)
            else:
                tensor.copy_(torch.randn(tensor.shape, device="cuda", dtype=torch.bfloat16))
    return engine


def fill(engine: Engine, batch: int, context: int) -> None:
    """Requests whose prompts count as computed, but for their last token."""
    params = SamplingParams(max_tokens=WARM_UP + STEPS, ignore_eos=True)
    for i in range(batch):
        prompt = [(7 * i + j) % 1000 + 1 for j in range(context)]
        engine.assume_computed(engine.add_request(prompt, params))


def step_bytes(engine: Engine, batch: int, context: int) -> float:
    """Bytes of weights and cache that a decode step reads on the first GPU.

    Of a mixture these are the experts which some token goes to, where all are as likely.
    """
    model: Any = engine.model
    cached = sum(
        pool.nbytes_per_token * min(window or context, context)
        for pool, window in zip(engine.pools, model.config.windows, strict=True)
    )
    weights = sum(layer.nbytes - _idle_bytes(layer.feed_forward, batch) for layer in model.layers)
    return model.head.nbytes + weights + batch * cached


def _idle_bytes(part: Any, batch: int) -> float:
    if not isinstance(part, MixtureOfExperts):
        return 0.0
    idle = (1 - part.routing.chosen / part.routing.experts) ** batch
    return idle * (part.gate_up.nbytes + part.down.nbytes)


def measure_step(engine: Engine, batch: int, context: int, bandwidth: float) -> Step:
    """Time decode steps of a batch at a context; the bandwidth in bytes a microsecond."""
    from inference.gpu.loop import DeviceLoop  # needs Triton

    loop = engine.loop
    assert isinstance(loop, DeviceLoop)
    fill(engine, batch, context)
    for _ in range(WARM_UP):
        engine.advance()
    whole, host = [], []
    for _ in range(STEPS - 2):
        waited = loop.waited
        whole.append(_seconds(engine.advance))
        host.append(whole[-1] - (loop.waited - waited))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    loop.replay(batch, 10)
    end.record()
    end.synchronize()
    while engine.has_unfinished:
        engine.advance()
    median = statistics.median
    floor = step_bytes(engine, batch, context) / bandwidth / 1e3
    graph = start.elapsed_time(end) / 10
    return Step(batch, 1e3 * median(whole), graph, 1e3 * median(host), floor)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_prefill(engine: Engine) -> float:
    """Milliseconds from the prompts' arrival to the first token of each, the best of three."""
    prompts = [[(31 * i + j) % 1000 + 1 for j in range(PROMPT)] for i in range(PROMPTS)]
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    return 1e3 * min(_seconds(lambda: engine.generate(prompts, params)) for _ in range(3))


def measure_short(engine: Engine) -> float:
    """Milliseconds from a short prompt's arrival to its first token, the median of many."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    prompts = [[(13 * i + j) % 1000 + 1 for j in range(SHORT)] for i in range(WARM_UP + STEPS)]
    times = [_seconds(partial(engine.generate, [prompt], params)) for prompt in prompts]
    return 1e3 * statistics.median(times[WARM_UP:])


def measure(
    shape: str, scheme: str, batches: Sequence[int], context: int, head: str | None, ranks: int
) -> Figures:
    """Measure a scheme.

    Args:
        shape: As in `read_shape`.
        scheme: As in `read_scheme`, of the blocks.
        context: Tokens in the cache of each of them.
        head: The same of the head, or `float`; None for int8 with inputs per token where the
            blocks are quantized and the head is not the embedding.
        ranks: GPUs among which the model is cut; bytes are those of the first.

    Raises:
        EngineError: it does not fit on the GPU.
    """
    bandwidth = copied_bandwidth()
    gc.collect()
    torch.cuda.empty_cache()  # of the scheme before, and of the copy
    torch.cuda.reset_peak_memory_stats()
    engine = make_engine(shape, scheme, batches, context, head, ranks)
    steps = [measure_step(engine, batch, context, bandwidth) for batch in batches]
    prefill, short = measure_prefill(engine), measure_short(engine)
    cache = sum(pool.k.nbytes + pool.v.nbytes for pool in engine.pools)
    peak, weights = torch.cuda.max_memory_allocated(), engine.model.weight_bytes
    engine.close()
    name = scheme if head is None else f"{scheme}, head {head}"
    return Figures(name, steps, prefill, short, weights, cache, peak)


def make_loop(batch: int, context: int, *, staggered: bool = True) -> DeviceLoop:
    """A loop whose requests have so many tokens in the cache, and whose device gives token 1.

    Args:
        batch: Requests.
        context: Tokens of each.
        staggered: Some have up to 63 more, so that in each step one in 64 needs a block.
    """
    from inference.gpu.execute import Executed
    from inference.gpu.loop import DeviceLoop  # needs Triton
    from inference.gpu.runner import GpuRunner

    longest = context + KV_BLOCK + WARM_UP + HOST_STEPS + 2
    model: Any = SimpleNamespace(layers=[])
    width = blocks_for(longest)
    scheduler = Scheduler(BlockManager(batch * width), batch, batch)
    requests = ActiveRequests(scheduler, lambda changes: None)
    runner = GpuRunner(model, [], torch.device("cpu"), scheduler.batch, width=width)
    tokens = torch.ones(2 * batch, dtype=torch.int64)
    runner.executor.execute = lambda plan: Executed(None, tokens, None)
    params = SamplingParams(max_tokens=longest, ignore_eos=True)
    for i in range(batch):
        prompt = [5] * (context + i % KV_BLOCK * staggered)
        request = ActiveRequest(f"request-{i}", prompt, params, None, frozenset({2}), 10**6)
        requests.add(request)
        assert scheduler.assume_computed(request.sequence)
    return DeviceLoop(runner, requests)


def measure_host(batch: int, context: int) -> float:
    """Microseconds that a step of decodes takes of this thread's own time, the mean of many."""
    loop = make_loop(batch, context)
    for _ in range(WARM_UP):
        loop.step()
    start = time.thread_time()
    for _ in range(HOST_STEPS):
        assert len(loop.step().names) == batch
    return 1e6 * (time.thread_time() - start) / HOST_STEPS
