"""Steps of a model of random weights on a GPU, one by one; the command is `ptq bench --steps`.

For every scheme and batch: the median step with a cache that holds some tokens of each sequence,
without computing them first, so that a table takes a minute; the same step's CUDA graph alone; what
the host does in a step that is not waiting; then a prefill of 8 prompts of 1024 tokens, the first
token of one prompt of 128, and the peak of the GPU's memory beside weights and cache.

What `ptq bench --steps` measures of a scheme, as lines, as a table and as JSON.

`ptq bench --steps`: a GPU's table of tokens/s, scheme by scheme, all in one process.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path

import torch

from formats.command import CommandParser, count
from formats.errors import EngineError
from formats.files import replace_file
from inference.backend import choose_backend
from inference.bench.random_model import RandomCheckpoint, random_tokenizer
from inference.bench.random_weights import HEAD_PRESET
from inference.bench.shapes import SHAPES, read_scheme, read_shape
from inference.config import EngineConfig
from inference.engine import Engine
from inference.parallel.backend import choose_ranks
from inference.requests.request import SamplingParams
from inference.scheduling.blocks import blocks_for

WARM_UP, STEPS = 8, 32


def make_engine(
    shape: str,
    scheme: str,
    batches: Sequence[int],
    context: int,
    head: str | None = None,
    ranks: int = 1,
) -> Engine:
    """An engine of random weights, the first rank's cache filled with random numbers; arguments as
    of `measure`."""
    if head is None:  # that of a tied shape is a table, too
        tied = read_shape(shape)[1].get("tie_word_embeddings", False)
        head = "float" if tied or scheme == "float" else HEAD_PRESET
    quantized = head != "float"
    own = {"quantize_head": True, "head": head} if quantized else {}
    opened = partial(RandomCheckpoint, shape, scheme, "cuda", **own)
    checkpoint = opened()
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
    tokenizer = random_tokenizer(int(checkpoint.config["vocab_size"]))
    backend = choose_ranks(choose_backend("cuda", checkpoint), opened, config)
    engine = Engine(checkpoint, tokenizer, config, backend)
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


def measure_step(engine: Engine, batch: int, context: int) -> Step:
    """Time decode steps of a batch at a context."""
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
    return Step(batch, 1e3 * median(whole), start.elapsed_time(end) / 10, 1e3 * median(host))


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
    times = [
        _seconds(lambda prompt=prompt: engine.generate([prompt], params)) for prompt in prompts
    ]
    return 1e3 * statistics.median(times[WARM_UP:])


def measure(
    shape: str,
    scheme: str,
    batches: Sequence[int],
    context: int,
    head: str | None = None,
    ranks: int = 1,
) -> Figures:
    """Measure a scheme.

    Args:
        shape: As in `read_shape`.
        scheme: As in `read_scheme`, of the blocks.
        batches: Requests of each step.
        context: Tokens in the cache of each of them.
        head: The same of the head, or `float`; by default int8 with inputs per token where the
            blocks are quantized and the head is not the embedding.
        ranks: GPUs among which the model is cut; bytes are those of the first.

    Raises:
        EngineError: it does not fit on the GPU.
    """
    gc.collect()
    torch.cuda.empty_cache()  # of the scheme before
    torch.cuda.reset_peak_memory_stats()
    engine = make_engine(shape, scheme, batches, context, head, ranks)
    steps = [measure_step(engine, batch, context) for batch in batches]
    prefill, short = measure_prefill(engine), measure_short(engine)
    cache = sum(pool.k.nbytes + pool.v.nbytes for pool in engine.pools)
    peak = torch.cuda.max_memory_allocated()
    weights = engine.model.weight_bytes
    engine.close()
    name = scheme if head is None else f"{scheme}, head {head}"
    return Figures(name, steps, prefill, short, weights, cache, peak)


PROMPTS, PROMPT, SHORT = 8, 1024, 128  # of a prefill, their tokens, and those of a short prompt


@dataclass(frozen=True)
class Step:
    """Milliseconds of a decode step.

    Attributes:
        batch: Its requests.
        whole: From one to the next.
        graph: Of its CUDA graph alone.
        host: What the host does but waiting.
    """

    batch: int
    whole: float
    graph: float
    host: float

    @property
    def host_us(self) -> float:
        """Microseconds of the host a request."""
        return 1e3 * self.host / self.batch

    @property
    def tokens_s(self) -> float:
        """Tokens per second of all its requests."""
        return 1e3 * self.batch / self.whole


@dataclass(frozen=True)
class Figures:
    """What was measured of a scheme.

    Attributes:
        steps: Of each batch.
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
        f"tokens/s; graph {step.graph:7.3f} ms, host {step.host:6.3f} ms ({step.host_us:.1f} us a "
        f"request), beyond the graph {1 - step.graph / step.whole:5.1%}"
        for step in own.steps
    ]
    return [
        *lines,
        f"{own.scheme:12} prefill {PROMPTS} x {PROMPT}: {own.prefill_ms:.1f} ms, "
        f"{own.prefill_tokens_s:.0f} tokens/s; 1 x {SHORT}: {own.short_ms:.1f} ms; "
        f"peak memory {own.peak_bytes / 1e9:.2f} GB of "
        f"{own.weight_bytes / 1e9:.2f} weights and {own.cache_bytes / 1e9:.2f} cache",
    ]


def table(found: Sequence[Figures], context: int) -> str:
    """All schemes in Markdown: tokens per second of all requests."""
    batches = [step.batch for step in found[0].steps] if found else []
    heads = [f"batch {batch}" for batch in batches]
    heads += [
        f"prefill {PROMPTS} x {PROMPT}",
        f"first token of {SHORT}",
        "beyond the graph",
        "peak memory / weights + cache",
    ]
    rows = [[f"context {context}, tokens/s", *heads], ["---"] * (len(heads) + 1)]
    for own in found:
        beyond = [1 - step.graph / step.whole for step in own.steps]
        held = own.weight_bytes + own.cache_bytes
        cells = [f"{step.tokens_s:,.0f}" for step in own.steps] + [f"{own.prefill_tokens_s:,.0f}"]
        cells += [f"{own.short_ms:.1f} ms"]
        cells += [f"{min(beyond):.1%} to {max(beyond):.1%}"]
        rows.append([own.scheme, *cells, f"{own.peak_bytes / 1e9:.1f} / {held / 1e9:.1f} GB"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def to_json(
    device: str, shape: str, context: int, found: Sequence[Figures], missing: Mapping[str, str]
) -> str:
    """All figures, and why a scheme has none."""
    data = {"device": device, "torch": version("torch"), "shape": shape, "context": context}
    schemes = [
        asdict(own) | {"tokens_s": {str(step.batch): step.tokens_s for step in own.steps}}
        for own in found
    ]
    return json.dumps(data | {"schemes": schemes, "missing": dict(missing)}, indent=1) + "\n"


SCHEMES = ("a8w8c8", "fp8_c8", "w4c8", "a8w4c8_two_level", "float")
HELP = """\
Steps of a model of random weights on a GPU, one by one.

    ptq bench --steps --schemes a8w8c8 w4c8 float --batch 1 16 64 --json steps.json

For every scheme and batch: the median step with a cache that holds --context tokens of each
sequence; the same step's CUDA graph alone; what the host does in a step that is not waiting; then a
prefill of 8 prompts of 1024 tokens, the first token of one prompt of 128, and the peak of the GPU's
memory. A scheme that does not fit is told, and the others are measured. Whole requests are measured
by `ptq bench --shape llama-3-8b --scheme a8w8c8 --device cuda`. With --host only what the host does
is measured, with a device that gives fixed tokens at once: without a GPU, of no shape or scheme.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where a scheme did not fit."""
    arguments = parser().parse_args(argv)
    if arguments.host:
        return _host(arguments.batch, arguments.context)
    read_shape(arguments.shape)
    for scheme in (*arguments.schemes, *arguments.heads):
        read_scheme(scheme)
    import torch

    from inference.backend import require_device
    from inference.bench.steps import measure

    require_device("cuda")
    device = torch.cuda.get_device_name()
    print(device, flush=True)
    found: list[Figures] = []
    missing: dict[str, str] = {}
    sizes = arguments.batch, arguments.context
    heads: list[str | None] = list(arguments.heads) or [None]
    schemes: list[str] = list(dict.fromkeys(arguments.schemes))
    for scheme, head in product(schemes, heads):
        try:
            found.append(measure(arguments.shape, scheme, *sizes, head, arguments.tensor_parallel))
        except EngineError as error:
            name = scheme if head is None else f"{scheme}, head {head}"
            missing[name] = str(error)
            print(f"{name}: {error}", flush=True)
        else:
            print("\n".join(describe(found[-1])), flush=True)
    print(f"\n{table(found, arguments.context)}")
    if arguments.json is not None:
        text = to_json(device, arguments.shape, arguments.context, found, missing)
        replace_file(arguments.json, text.encode())
    return 1 if missing else 0


def _host(batches: Sequence[int], context: int) -> int:
    """Print what the host takes for a step of each batch."""
    from inference.bench.host import measure_host

    for batch in batches:
        found = measure_host(batch, context)
        print(
            f"host alone, batch {batch:3}: {found.us:6.0f} us a step, "
            f"{found.us_per_sequence:.2f} us a sequence",
            flush=True,
        )
    return 0


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq bench --steps`."""
    made = CommandParser(
        prog="ptq bench --steps",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--shape", default="llama-3-8b", help=f"{', '.join(SHAPES)}, or the path of a config.json"
    )
    made.add_argument(
        "--schemes", nargs="+", default=SCHEMES, help="presets of recipes, or float for bf16"
    )
    made.add_argument(
        "--heads",
        nargs="+",
        default=[],
        metavar="SCHEME",
        help="measure each scheme with each of these for lm_head, such as float w8",
    )
    made.add_argument("--batch", type=count, nargs="+", default=[1, 16, 64], metavar="N")
    made.add_argument("--context", type=count, default=4048, metavar="TOKENS")
    made.add_argument(
        "--tensor-parallel",
        type=count,
        default=1,
        metavar="N",
        help="cut the model among N GPUs, whose first one is told of",
    )
    made.add_argument("--host", action="store_true", help="the host alone, without a GPU")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return made
