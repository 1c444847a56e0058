"""Steps of a model of random weights on a GPU, one by one; the command is `ptq bench --steps`.

For every scheme and batch: the median step with a cache that holds some tokens of each sequence,
without computing them first, so that a table takes a minute; the same step's CUDA graph alone; what
the host does in a step that is not waiting; then a prefill of 8 prompts of 1024 tokens, the first
token of one prompt of 128, and the peak of the GPU's memory beside weights and cache.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from inference.backend import choose_backend
from inference.bench.random_model import HEAD_PRESET, RandomCheckpoint, random_tokenizer
from inference.bench.shapes import read_shape
from inference.bench.steps_table import PROMPT, PROMPTS, SHORT, Figures, Step
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
