"""One timed run of an engine, and an engine in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from threading import Thread
from types import TracebackType

import torch
from pydantic import Field

from formats.checkpoint.read import Checkpoint
from formats.errors import EngineError, PTQError, RequestError
from formats.scheme import Strict
from inference.backend import choose_backend
from inference.bench.random_model import RandomCheckpoint, random_tokenizer
from inference.config import EngineConfig
from inference.engine import Engine
from inference.scheduling.blocks import blocks_for
from inference.scheduling.request import SamplingParams

SEED = 0


class Load(Strict):
    """What one run does: `batch` equal requests that arrive at once."""

    batch: int = Field(default=4, ge=1)
    prompt_tokens: int = Field(default=128, ge=1)
    new_tokens: int = Field(default=64, ge=2)


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
    """

    prefill_s: float
    decode_s: float
    decode_tokens: int
    first_token_s: list[float]
    per_token_s: list[float]
    peak_memory_bytes: int
    kv_bytes_per_token: int
    weight_bytes: int


def run_once(engine: Engine, load: Load) -> Run:
    """Run a load once and note its times.

    Raises:
        RequestError: the engine cannot hold the load's requests all at once.
        EngineError: a request did not end as it should.
    """
    _check_room(engine, load)
    shape = (load.batch, load.prompt_tokens)
    generator = torch.Generator().manual_seed(SEED)
    prompts = torch.randint(engine.model.config.vocab_size, shape, generator=generator).tolist()
    params = SamplingParams(max_tokens=load.new_tokens, ignore_eos=True)
    outputs = engine.generate(prompts, params)
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
        per_token_s=[b - a for row in times for a, b in pairwise(row)],
        peak_memory_bytes=engine.backend.peak_bytes(),
        kv_bytes_per_token=engine.kv_bytes_per_token,
        weight_bytes=engine.checkpoint.nbytes or engine.model.weight_bytes,
    )


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


@dataclass(frozen=True)
class EngineSource:
    """What engine a process runs.

    Attributes:
        path: Folder of its checkpoint, or what a random model is called.
        config: Its sizes.
        quantized_kv: Whether its cache is quantized as the checkpoint says.
        device: Where it runs.
        random: Shape, scheme and whether the head is quantized, of a model of random weights that
            is made on the device instead of read; or None.
    """

    path: str
    config: EngineConfig
    quantized_kv: bool = True
    device: str = "cpu"
    random: tuple[str, str, bool] | None = None

    def checkpoint(self) -> Checkpoint:
        """Open the checkpoint, or make the random one."""
        if self.random is None:
            return Checkpoint.open(self.path)
        shape, scheme, head = self.random
        return RandomCheckpoint(shape, scheme, self.device, quantize_head=head)

    def load(self) -> Engine:
        """Load it."""
        config, device = self.config, self.device
        if self.random is None:
            return Engine.from_pretrained(
                self.path, config=config, device=device, quantized_kv=self.quantized_kv
            )
        checkpoint = self.checkpoint()
        tokenizer = random_tokenizer(checkpoint.config["vocab_size"])
        backend = choose_backend(device, checkpoint)
        return Engine(checkpoint, tokenizer, config, backend, quantized_kv=self.quantized_kv)


class Worker:
    """An engine in a process of its own, so that memory is its own too; a context manager."""

    def __init__(self, source: EngineSource) -> None:
        """Start loading a checkpoint; the first run waits for it."""
        context = multiprocessing.get_context("spawn")  # forking a process with threads hangs
        self.path = source.path
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, source), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.join()

    def run(self, load: Load) -> Run:
        """`run_once` over there; errors as there, and of loading the checkpoint."""
        try:
            self._pipe.send(load)
            reply = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            raise EngineError(
                f"{self.path}: the process that ran it died with exit code "
                f"{self._process.exitcode}. If it was killed (-9), memory ran out: lower the batch"
            ) from error
        if isinstance(reply, PTQError):
            raise reply
        return reply


def end_with_parent() -> None:
    """End this process of `multiprocessing` when its parent ends, whatever it is at."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def _serve(pipe: Connection, source: EngineSource) -> None:
    """Answer loads until the parent ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told too, and ends us
    end_with_parent()
    try:
        engine = source.load()
        while True:
            pipe.send(run_once(engine, pipe.recv()))
    except (EOFError, BrokenPipeError):  # the parent is gone
        return
    except PTQError as error:
        pipe.send(error)
