"""What the engine process does: takes messages, runs steps, and tells what each gave.

messages = all that are there; advance(); one message
"""

from __future__ import annotations

from typing import NoReturn

from formats.errors import EngineEndedError, EngineError, PTQError, RequestError
from inference.beam_search import BeamParams, BeamSearch
from inference.engine import Engine
from inference.requests.request import StepResult
from inference.scheduling.acceptance import NOT_FINITE
from inference.server import messages
from inference.speculate.counts import DraftCounts
from kernels.op_inputs import KV_BLOCK, KVPool

LOOK = 1.0  # seconds; so often an idle engine is looked at
MOST_FAILURES = 3  # steps in a row that fail before the engine is given up
DEVICE_FAULTS = ("CUDA error", "Triton Error [CUDA]")  # after which a process can use no GPU


class EngineLoop:
    """Drives an engine by messages.

    Args:
        engine: Loaded and warm.
    """

    def __init__(self, engine: Engine, channel: messages.Channel) -> None:
        self._engine, self._channel = engine, channel
        self._names: set[str] = set()  # of requests that have not ended
        self._beams: dict[str, BeamSearch] = {}
        self._failures = self._failed_steps = self._corrupted = 0
        self._last_stats = messages.EngineStats()

    def run(self) -> NoReturn:
        """Answer messages for good.

        Raises:
            HttpGone: nobody asks any more.
            EngineError: the engine is broken for good.
        """
        self._channel.send(describe(self._engine))
        while True:
            idle = not self._engine.has_unfinished
            received = self._channel.receive(wait=idle, seconds=LOOK)
            self._engine.check_alive()
            for message in received:
                self._take(message)
            if self._engine.has_unfinished:
                self._step()
            elif received:  # what was aborted gave its blocks back
                self._channel.send(messages.Step(stats=self._stats()))

    def _take(self, message: messages.ToEngine) -> None:
        if isinstance(message, messages.Abort):
            for name in message.names:
                self._abort(name)
            return
        if isinstance(message, messages.SetAdapter):
            self._set_adapter(message)
            return
        name, prompt, params = message.name, message.prompt, message.params
        try:
            if isinstance(params, BeamParams):
                self._beams[name] = BeamSearch(self._engine, prompt, params, name)
            else:
                self._engine.add_request(prompt, params, name)
                self._names.add(name)
        except RequestError as error:
            self._channel.send(messages.Refused(name, str(error), error.param))

    def _abort(self, name: str) -> None:
        if name in self._beams:
            self._beams.pop(name).abort()
        elif name in self._names:
            self._names.remove(name)
            self._engine.abort(name)

    def _set_adapter(self, message: messages.SetAdapter) -> None:
        try:
            if message.path is None:
                self._engine.unload_adapter(message.adapter)
            else:
                self._engine.load_adapter(message.adapter, message.path)
        except EngineEndedError:
            raise
        except PTQError as error:
            self._channel.send(messages.Refused(message.name, str(error)))
        else:
            self._channel.send(messages.AdapterSet(message.name, adapters_of(self._engine)))

    def _step(self) -> None:
        try:
            result = self._engine.advance()
        except EngineError as error:
            self._fail(error)
            return
        self._failures = 0
        for search in self._beams.values():
            search.take(result)
        step = self._message(result)  # now, since searches that end give blocks back
        news = step.names or step.ended or step.prompt_logprobs
        if news or step.stats != self._last_stats:
            self._channel.send(step)
        self._last_stats = step.stats
        for search in [search for search in self._beams.values() if search.done]:
            del self._beams[search.name]
            if search.error is None:
                self._channel.send(messages.BeamDone(search.name, search.hypotheses))
            else:
                self._channel.send(messages.Failed([search.name], search.error))

    def _message(self, result: StepResult) -> messages.Step:
        ended = []
        for output in result.finished:
            name, reason = output.request_id, output.finish_reason
            self._corrupted += output.error == NOT_FINITE
            if name not in self._names:  # a beam
                continue
            self._names.remove(name)
            if output.param is None:
                ended.append((name, reason, output.error))
            else:  # found out only after it was taken
                self._channel.send(messages.Refused(name, output.error or "", output.param))
        gained = result.names, result.tokens, result.logprobs, result.prompt_logprobs
        beside = {"drafts": result.drafts, "found": result.found}
        return messages.Step(*gained, **beside, ended=ended, stats=self._stats())

    def _fail(self, error: EngineError) -> None:
        """A step failed, and all requests with it; raise the error where it is the last."""
        self._failures += 1
        self._failed_steps += 1
        names = [*self._names, *self._beams]
        self._names.clear()
        self._beams.clear()  # the engine holds none of their requests any more
        self._channel.send(messages.Failed(names, str(error)))
        self._channel.send(messages.Step(stats=self._stats()))
        if isinstance(error, EngineEndedError):
            raise error
        if _of_the_device(error):
            raise EngineError(f"the device is in error and serves no process any more: {error}")
        if self._failures == MOST_FAILURES:
            raise EngineError(f"{MOST_FAILURES} steps in a row failed, the last so: {error}")
        self._engine.check_integrity()

    def _stats(self) -> messages.EngineStats:
        blocks, drafts = self._engine.stats(), DraftCounts.of(self._engine.speculation)
        counts = self._corrupted, self._failed_steps
        return messages.EngineStats(*self._engine.queues, blocks, drafts, *counts)


def _of_the_device(error: EngineError) -> bool:
    """Whether a kernel failed in such a way that the device refuses all that follows."""
    message = str(error)
    return "out of memory" not in message and any(fault in message for fault in DEVICE_FAULTS)


def adapters_of(engine: Engine) -> dict[str, str]:
    """The folders of the adapters that are loaded, by name."""
    return {name: str(path) for name, path in engine.adapters.items()}


def cache_type(pool: KVPool) -> str:
    """Type of K and V in a cache, such as `int8`; of both where they differ, as in `int8/int4`."""
    names = (str(t.dtype).removeprefix("torch.") for t in (pool.k, pool.v))
    return "/".join(dict.fromkeys("int4" if name == "uint8" else name for name in names))


def describe(engine: Engine) -> messages.EngineInfo:
    """What the HTTP process learns of an engine."""
    sizes, pool = engine.config, engine.pools[0]
    assert sizes.max_model_len is not None
    assert sizes.kv_blocks is not None
    shape = engine.model.config
    return messages.EngineInfo(
        max_model_len=sizes.max_model_len,
        max_positions=shape.max_positions,
        vocab_size=shape.vocab_size,
        max_batch_size=sizes.max_batch_size,
        kv_blocks=sizes.kv_blocks,
        block_size=KV_BLOCK,
        device=str(pool.k.device),
        quantization=engine.checkpoint.scheme.wac,
        kv_cache=cache_type(pool),
        end_tokens=engine.end_tokens,
        speculates=engine.speculation is not None,
        adapters=adapters_of(engine),
    )
