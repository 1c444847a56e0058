"""`python -m inference.gpu.bench`: steps of a model of random weights on a GPU, one by one.

    python -m inference.gpu.bench --schemes a8w8c8 fp8_c8 w4c8 float --batch 1 16 64

For every scheme and batch: the median step with a cache that holds `--context` tokens of each
sequence, without computing them first, so that a table takes a minute; the same step's CUDA graph
alone; what the host does in a step that is not waiting; then a prefill of 8 prompts of 1024 tokens,
and the peak of the GPU's memory beside weights and cache. `ptq bench --device cuda` measures whole
requests.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from formats.command import run_command
from inference.config import EngineConfig
from inference.engine import Engine
from inference.kv_cache import blocks_for
from inference.load import load_model, require_device
from inference.random_checkpoint import SHAPES
from inference.random_model import RandomCheckpoint, random_tokenizer
from inference.request import SamplingParams

WARM_UP, STEPS, PROMPTS, PROMPT = 8, 32, 8, 1024


@dataclass(frozen=True)
class Step:
    """Milliseconds of a decode step.

    Attributes:
        whole: From one to the next.
        graph: Of its CUDA graph alone.
        host: What the host does but waiting.
    """

    whole: float
    graph: float
    host: float


def make_engine(shape: str, scheme: str, batches: Sequence[int], context: int) -> Engine:
    """An engine of random weights, its cache filled with random numbers."""
    checkpoint = RandomCheckpoint(shape, scheme, "cuda", quantize_head=scheme != "float")
    model = load_model(checkpoint, device="cuda")
    longest = max(context + WARM_UP + STEPS + 2, PROMPT + 2)
    blocks = max(max(batches) * blocks_for(longest), PROMPTS * blocks_for(PROMPT + 2))
    config = EngineConfig(
        max_batch_size=max(*batches, PROMPTS),
        max_model_len=longest,
        kv_blocks=blocks,
        max_batched_tokens=PROMPTS * PROMPT,
    )
    tokenizer = random_tokenizer(model.config.vocab_size)
    engine = Engine(checkpoint, model, tokenizer, config)
    for pool in engine._pools:
        for tensor in (pool.k, pool.v):
            if tensor.dtype == torch.int8:
                tensor.random_(-100, 100)
            else:
                tensor.copy_(torch.randn(tensor.shape, device="cuda", dtype=torch.bfloat16))
    return engine


def fill(engine: Engine, batch: int, context: int) -> None:
    """Requests whose prompts count as computed, but for their last token."""
    params = SamplingParams(max_tokens=WARM_UP + STEPS, ignore_eos=True)
    scheduler = engine._scheduler
    for i in range(batch):
        engine.add_request([(7 * i + j) % 1000 + 1 for j in range(context)], params)
        sequence = scheduler.waiting.popleft()
        assert engine._blocks.grow(sequence.name, context)
        sequence.computed = context - 1
        scheduler.running.append(sequence)


def measure_step(engine: Engine, batch: int, context: int) -> Step:
    """Time decode steps of a batch at a context."""
    loop = engine._device_loop
    assert loop is not None
    fill(engine, batch, context)
    for _ in range(WARM_UP):
        engine.step()
    whole, host = [], []
    for _ in range(STEPS - 2):
        waited = loop.waited
        _timed(engine.step, whole)
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
    return Step(1e3 * median(whole), start.elapsed_time(end) / 10, 1e3 * median(host))


def _timed(call: Callable, seconds: list[float]):
    start = time.perf_counter()
    result = call()
    seconds.append(time.perf_counter() - start)
    return result


def measure_prefill(engine: Engine) -> float:
    """Seconds from the arrival of the prompts to the first token of each, the best of three."""
    prompts = [[(31 * i + j) % 1000 + 1 for j in range(PROMPT)] for i in range(PROMPTS)]
    params, seconds = SamplingParams(max_tokens=1, ignore_eos=True), []
    for _ in range(3):
        _timed(lambda: engine.generate(prompts, params), seconds)
    return min(seconds)


def report(shape: str, scheme: str, batches: Sequence[int], context: int) -> None:
    """Measure a scheme and print its lines."""
    torch.cuda.reset_peak_memory_stats()
    engine = make_engine(shape, scheme, batches, context)
    weights = engine.model.weight_bytes
    cache = sum(pool.k.nbytes + pool.v.nbytes for pool in engine._pools)
    for batch in batches:
        step = measure_step(engine, batch, context)
        print(
            f"{scheme:10} batch {batch:3} context {context}: {step.whole:7.3f} ms a step, "
            f"{1e3 * batch / step.whole:6.0f} tokens/s; graph {step.graph:7.3f} ms, host "
            f"{step.host:6.3f} ms, beyond the graph {1 - step.graph / step.whole:5.1%}"
        )
    seconds, peak = measure_prefill(engine), torch.cuda.max_memory_allocated()
    print(
        f"{scheme:10} prefill {PROMPTS} x {PROMPT}: {1e3 * seconds:.1f} ms, "
        f"{PROMPTS * PROMPT / seconds:.0f} tokens/s; peak memory {peak / 1e9:.2f} GB of "
        f"{weights / 1e9:.2f} weights and {cache / 1e9:.2f} cache"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3-8b")
    parser.add_argument("--schemes", nargs="+", default=["a8w8c8", "fp8_c8", "w4c8", "float"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=4048)
    arguments = parser.parse_args(argv)
    require_device("cuda")
    print(torch.cuda.get_device_name())
    for scheme in arguments.schemes:
        report(arguments.shape, scheme, arguments.batch, arguments.context)
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
