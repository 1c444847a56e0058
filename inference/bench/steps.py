"""`ptq gpu`: steps of a model of random weights on a GPU, one by one.

    ptq gpu --schemes a8w8c8 w4c8 float --batch 1 16 64 --json gpu.json

For every scheme and batch: the median step with a cache that holds `--context` tokens of each
sequence, without computing them first, so that a table takes a minute; the same step's CUDA graph
alone; what the host does in a step that is not waiting; then a prefill of 8 prompts of 1024 tokens,
the first token of one prompt of 128, and the peak of the GPU's memory beside weights and cache. A
scheme that does not fit is told, and the others are measured. `ptq bench --device cuda` measures
whole requests.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from formats.command import run_command
from formats.errors import EngineError
from formats.files import replace_file
from inference.backend import choose_backend, require_device
from inference.bench.random_checkpoint import SHAPES, read_scheme, read_shape
from inference.bench.random_model import RandomCheckpoint, random_tokenizer
from inference.config import EngineConfig
from inference.engine import Engine
from inference.scheduling.blocks import blocks_for
from inference.scheduling.request import SamplingParams

SCHEMES = ("a8w8c8", "fp8_c8", "w4c8", "a8w4c8_two_level", "float")
WARM_UP, STEPS, PROMPTS, PROMPT, SHORT = 8, 32, 8, 1024, 128


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


def make_engine(shape: str, scheme: str, batches: Sequence[int], context: int) -> Engine:
    """An engine of random weights, its cache filled with random numbers."""
    checkpoint = RandomCheckpoint(shape, scheme, "cuda", quantize_head=scheme != "float")
    longest = max(context + WARM_UP + STEPS + 2, PROMPT + 2)
    blocks = max(max(batches) * blocks_for(longest), PROMPTS * blocks_for(PROMPT + 2))
    config = EngineConfig(
        max_batch_size=max(*batches, PROMPTS),
        max_model_len=longest,
        kv_blocks=blocks,
        max_batched_tokens=PROMPTS * PROMPT,
    )
    tokenizer = random_tokenizer(int(checkpoint.config["vocab_size"]))
    engine = Engine(checkpoint, tokenizer, config, choose_backend("cuda", checkpoint))
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
        engine.step()
    whole, host = [], []
    for _ in range(STEPS - 2):
        waited = loop.waited
        whole.append(_seconds(engine.step))
        host.append(whole[-1] - (loop.waited - waited))
    graph = loop.runner.graph_of(batch)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        graph.replay()
    end.record()
    end.synchronize()
    while engine.has_unfinished:
        engine.step()
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


def measure(shape: str, scheme: str, batches: Sequence[int], context: int) -> Figures:
    """Measure a scheme.

    Raises:
        EngineError: it does not fit on the GPU.
    """
    gc.collect()
    torch.cuda.empty_cache()  # of the scheme before
    torch.cuda.reset_peak_memory_stats()
    engine = make_engine(shape, scheme, batches, context)
    steps = [measure_step(engine, batch, context) for batch in batches]
    prefill, short = measure_prefill(engine), measure_short(engine)
    cache = sum(pool.k.nbytes + pool.v.nbytes for pool in engine.pools)
    peak = torch.cuda.max_memory_allocated()
    return Figures(scheme, steps, prefill, short, engine.model.weight_bytes, cache, peak)


def describe(own: Figures) -> list[str]:
    """The lines of a scheme."""
    lines = [
        f"{own.scheme:12} batch {step.batch:3}: {step.whole:7.3f} ms a step, {step.tokens_s:6.0f} "
        f"tokens/s; graph {step.graph:7.3f} ms, host {step.host:6.3f} ms, beyond the graph "
        f"{1 - step.graph / step.whole:5.1%}"
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
    data = {"device": device, "torch": torch.__version__, "shape": shape, "context": context}
    schemes = [
        asdict(own) | {"tokens_s": {str(step.batch): step.tokens_s for step in own.steps}}
        for own in found
    ]
    return json.dumps(data | {"schemes": schemes, "missing": dict(missing)}, indent=1) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where a scheme did not fit."""
    arguments = _parse(argv)
    read_shape(arguments.shape)
    for scheme in arguments.schemes:
        read_scheme(scheme)
    require_device("cuda")
    device = torch.cuda.get_device_name()
    print(device, flush=True)
    found: list[Figures] = []
    missing: dict[str, str] = {}
    for scheme in dict.fromkeys(arguments.schemes):
        try:
            found.append(measure(arguments.shape, scheme, arguments.batch, arguments.context))
        except EngineError as error:
            missing[scheme] = str(error)
            print(f"{scheme}: {error}", flush=True)
        else:
            print("\n".join(describe(found[-1])), flush=True)
    print(f"\n{table(found, arguments.context)}")
    if arguments.json is not None:
        text = to_json(device, arguments.shape, arguments.context, found, missing)
        replace_file(arguments.json, text.encode())
    return 1 if missing else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ptq gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shape", default="llama-3-8b", help=f"{', '.join(SHAPES)}, or the path of a config.json"
    )
    parser.add_argument(
        "--schemes", nargs="+", default=SCHEMES, help="presets of recipes, or float for bf16"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64], metavar="N")
    parser.add_argument("--context", type=int, default=4048, metavar="TOKENS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args(argv)
    if min(*arguments.batch, arguments.context) < 1:
        parser.error("--batch and --context are whole numbers from 1 on")
    return arguments


if __name__ == "__main__":
    raise SystemExit(run_command(main))
