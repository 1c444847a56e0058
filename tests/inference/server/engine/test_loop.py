"""What the engine process does when steps fail; the engine is scripted, the channel is real."""

import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from formats.errors import CheckpointError, EngineEndedError, EngineError, RequestError
from inference.engine import Engine
from inference.requests.request import RequestOutput, SamplingParams, StepResult
from inference.scheduling.acceptance import NOT_FINITE
from inference.scheduling.blocks import KVStats
from inference.server import messages as wire
from inference.server.engine import loop as loops
from inference.server.engine.loop import MOST_FAILURES, EngineLoop
from inference.speculate.methods.ngram import NGramProposer

INFO = wire.EngineInfo(max_model_len=64, max_positions=64, vocab_size=99, max_batch_size=4)
Action = Callable[[list[str]], StepResult]


class ScriptedEngine:
    """Does as it is told, a step after the other; then the HTTP process is gone."""

    speculation = None

    def __init__(self, *script: Action) -> None:
        self.script, self.names, self.aborted, self.checked = list(script), [], [], 0
        self.adapters = {}

    @property
    def has_unfinished(self) -> bool:
        if not self.script:
            raise wire.HttpGone
        return True

    @property
    def queues(self) -> tuple[int, int]:
        return 0, len(self.names)

    def stats(self) -> KVStats:
        return KVStats(total=8, free=8 - len(self.names), used=len(self.names))

    def add_request(self, prompt, params, name) -> None:
        if prompt == [98]:
            raise RequestError("constraint: no such grammar", "response_format")
        self.names.append(name)

    def abort(self, name) -> None:
        self.names.remove(name)
        self.aborted.append(name)

    def load_adapter(self, name, path) -> None:
        if path == "damaged":
            raise CheckpointError("damaged: found no adapter_config.json")
        self.adapters[name] = Path(path)

    def unload_adapter(self, name) -> None:
        if name not in self.adapters:
            raise RequestError("adapter: no such", "adapter")
        del self.adapters[name]

    def check_integrity(self) -> None:
        self.checked += 1

    def check_alive(self) -> None:
        """Nothing else is needed."""

    def advance(self) -> StepResult:
        try:
            return self.script.pop(0)(self.names)
        except EngineError:
            self.names.clear()
            raise


def tokens(names: list[str]) -> StepResult:
    return StepResult(names=list(names), tokens=[7] * len(names))


def fails(text: str) -> Action:
    def act(_: list[str]) -> StepResult:
        raise EngineError(text)

    return act


def ends(name: str, error: str | None = None) -> Action:
    def act(names: list[str]) -> StepResult:
        names.remove(name)
        reason = "error" if error else "length"
        output = RequestOutput(name, [1], finish_reason=reason, error=error)
        told = [] if error else [name]
        return StepResult(names=told, tokens=[7] * len(told), finished=[output])

    return act


@pytest.fixture
def http(monkeypatch):
    """The HTTP process's end of the socket; the engine's is its `engine_end`."""
    monkeypatch.setattr(loops, "describe", lambda _: INFO)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Http(theirs, ours)


class Http:
    def __init__(self, end: socket.socket, engine_end: socket.socket) -> None:
        self._end, self._engine_end = end, engine_end

    def send(self, *messages) -> None:
        for message in messages:
            self._end.sendall(wire.frame(message))

    def drive(self, *script: Action) -> tuple[list, BaseException, ScriptedEngine]:
        """Run a loop through a script; gives what it sent, how it ended, and the engine."""
        engine, channel = ScriptedEngine(*script), wire.Channel(self._engine_end)
        try:
            EngineLoop(engine, channel).run()
        except (wire.HttpGone, EngineError) as error:
            channel.close(None, 1)
            data = b""
            while part := self._end.recv(2**16):
                data += part
            sent = list(wire.Unframer().feed(data))
            assert isinstance(sent.pop(0), wire.EngineInfo)
            return sent, error, engine


def submit(name: str, prompt: int = 1) -> wire.Submit:
    return wire.Submit(name, [prompt], SamplingParams())


def of_kind(sent: list, kind: type) -> list:
    return [message for message in sent if isinstance(message, kind)]


def test_a_step_is_one_message(http):
    http.send(submit("a"), submit("b"))
    sent, error, _ = http.drive(tokens, ends("a"), tokens)
    assert isinstance(error, wire.HttpGone)
    assert [(m.names, m.tokens) for m in sent] == [(["a", "b"], [7, 7]), (["a"], [7]), (["b"], [7])]
    assert [m.ended for m in sent] == [[], [("a", "length", None)], []]
    assert [m.stats.running for m in sent] == [2, 1, 1]
    assert [m.stats.blocks.free for m in sent] == [6, 7, 7]


def test_drafts_of_requests_are_told_with_their_tokens(http):
    def drafted(names: list[str]) -> StepResult:
        return StepResult([*names, "a"], [7, 7, 8], drafts=[("a", 4, 1)])

    http.send(submit("a"), submit("b"))
    sent, _, _ = http.drive(tokens, drafted)
    assert [m.drafts for m in sent] == [[], [("a", 4, 1)]]


def test_an_engine_says_whether_it_makes_drafts(tiny_llama):
    engine = Engine.from_pretrained(tiny_llama)
    assert not loops.describe(engine).speculates
    engine.speculate_by(NGramProposer())
    assert loops.describe(engine).speculates


def test_a_cache_is_named_by_the_types_of_k_and_v():
    k, v = torch.zeros(1, dtype=torch.int8), torch.zeros(1, dtype=torch.uint8)
    assert loops.cache_type(SimpleNamespace(k=k, v=k)) == "int8"
    assert loops.cache_type(SimpleNamespace(k=k, v=v)) == "int8/int4"


def test_a_step_that_gave_nothing_is_no_message(http):
    http.send(submit("a"))
    sent, _, _ = http.drive(tokens, lambda _: StepResult(), lambda _: StepResult(), tokens)
    assert [m.names for m in sent] == [["a"], ["a"]]


def test_an_abort_comes_before_the_next_step(http):
    def leave(names: list[str]) -> StepResult:
        http.send(wire.Abort(["a", "never heard of"]))
        return tokens(names)

    http.send(submit("a"), submit("b"))
    sent, _, engine = http.drive(leave, tokens)
    assert engine.aborted == ["a"]
    assert [m.names for m in sent] == [["a", "b"], ["b"]]
    assert [m.stats.blocks.used for m in sent] == [2, 1]


def test_what_the_engine_refuses_is_told_with_the_field(http):
    http.send(submit("a", 98), submit("b"))
    sent, _, _ = http.drive(tokens)
    assert sent[0] == wire.Refused("a", "constraint: no such grammar", "response_format")
    assert sent[1].names == ["b"]


def test_adapters_are_set_between_steps_and_what_the_engine_says_of_them_is_told(http):
    def later(names: list[str]) -> StepResult:
        http.send(wire.SetAdapter("c", "none", None), wire.SetAdapter("d", "sql", None))
        return tokens(names)

    http.send(
        submit("r"), wire.SetAdapter("a", "sql", "good"), wire.SetAdapter("b", "poet", "damaged")
    )
    sent, error, _ = http.drive(later, tokens)
    assert isinstance(error, wire.HttpGone)
    assert [message for message in sent if isinstance(message, wire.AdapterSet | wire.Refused)] == [
        wire.AdapterSet("a", {"sql": "good"}),
        wire.Refused("b", "damaged: found no adapter_config.json"),
        wire.Refused("c", "adapter: no such"),
        wire.AdapterSet("d", {}),
    ]


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(http):
    def again(names: list[str]) -> StepResult:
        http.send(submit("c"))
        return tokens(names)

    http.send(submit("a"), submit("b"))
    sent, error, engine = http.drive(fails("a step failed (KeyError)"), again, tokens)
    assert isinstance(error, wire.HttpGone)
    (failed,) = of_kind(sent, wire.Failed)
    assert sorted(failed.names) == ["a", "b"]
    assert failed.message == "a step failed (KeyError)"
    assert sent[-1].names == ["c"]
    assert sent[-1].stats.failed_steps == 1
    assert engine.checked == 1


def test_failures_in_a_row_are_the_end(http):
    http.send(submit("a"))
    sent, error, _ = http.drive(fails("one"), tokens, *[fails("on and on")] * 9)
    assert f"{MOST_FAILURES} steps in a row failed" in str(error)
    assert "on and on" in str(error)
    assert len(of_kind(sent, wire.Failed)) == 1 + MOST_FAILURES


@pytest.mark.parametrize(
    "told", ["CUDA error: device-side assert triggered", "Triton Error [CUDA]: illegal address"]
)
def test_a_device_in_error_is_the_end_at_once(http, told):
    http.send(submit("a"))
    sent, error, _ = http.drive(fails(f"a step failed (RuntimeError: {told})"), tokens)
    assert told in str(error)
    assert of_kind(sent, wire.Failed)[0].names == ["a"]


def test_memory_that_ran_out_is_not(http):
    http.send(submit("a"))
    _, error, _ = http.drive(fails("a step failed (CUDA error: out of memory)"), tokens)
    assert isinstance(error, wire.HttpGone)


def test_a_request_without_finite_logits_ends_alone_and_is_counted(http):
    http.send(submit("a"), submit("b"))
    sent, _, _ = http.drive(ends("a", NOT_FINITE), tokens)
    assert sent[0].ended == [("a", "error", NOT_FINITE)]
    assert sent[-1].names == ["b"]
    assert sent[-1].stats.corrupted == 1


def test_a_fault_of_a_parameter_that_shows_late_is_a_refusal(http):
    def refuses(names: list[str]) -> StepResult:
        names.remove("a")
        output = RequestOutput("a", [1], finish_reason="error", error="no such", param="constraint")
        return StepResult(finished=[output])

    http.send(submit("a"), submit("b"))
    sent, _, _ = http.drive(refuses, tokens)
    assert sent[0] == wire.Refused("a", "no such", "constraint")
    assert not sent[1].ended
    assert sent[-1].stats.corrupted == 0


def test_an_idle_engine_tells_that_blocks_came_back(http):
    """Nothing runs any more, and no step follows that would tell."""

    class Idle(ScriptedEngine):
        idle = 0

        @property
        def has_unfinished(self) -> bool:
            self.idle += not self.names
            if self.idle == 3:
                raise wire.HttpGone
            return bool(self.names)

        def advance(self) -> StepResult:
            http.send(wire.Abort(["a"]))
            return tokens(self.names)

    http.send(submit("a"))
    channel = wire.Channel(http._engine_end)
    with pytest.raises(wire.HttpGone):
        EngineLoop(Idle(), channel).run()
    channel.close(None, 1)
    sent = list(wire.Unframer().feed(http._end.recv(2**16)))[1:]
    assert [(m.names, m.stats.blocks.used) for m in sent] == [(["a"], 1), ([], 0)]


def test_an_idle_engine_that_has_ended_ends_the_loop(http, monkeypatch):
    """No request comes, whose step would fail."""

    class Ended(ScriptedEngine):
        has_unfinished = False

        def check_alive(self) -> None:
            raise EngineEndedError("rank 1 died")

    monkeypatch.setattr("inference.server.engine.loop.LOOK", 0.01)
    channel = wire.Channel(http._engine_end)
    with pytest.raises(EngineEndedError, match="rank 1 died"):
        EngineLoop(Ended(), channel).run()
    channel.close(None, 1)


def test_a_step_that_ends_the_engine_ends_the_loop(http):
    def ends(_: list[str]) -> StepResult:
        raise EngineEndedError("rank 1 died")

    http.send(submit("a"))
    channel = wire.Channel(http._engine_end)
    with pytest.raises(EngineEndedError, match="rank 1 died"):
        EngineLoop(ScriptedEngine(ends, tokens), channel).run()
    channel.close(None, 1)
