"""The socket between the two processes, from the engine's end."""

import pickle
import socket
import threading
import time

import pytest

from inference.server import messages as wire


@pytest.fixture
def ends():
    engine, http = socket.socketpair()
    with engine, http:
        yield wire.Channel(engine), http


def step(number: int, size: int = 200) -> wire.Step:
    names = [f"r{i}" for i in range(size)]
    stats, drafts = wire.EngineStats(running=number), [("r7", number, 1)]
    return wire.Step(names, [number] * size, drafts=drafts, stats=stats)


def test_messages_come_whole_from_any_parts(ends):
    channel, http = ends
    messages = [wire.Abort([f"r{i}" * 50]) for i in range(20)]
    data = b"".join(map(wire.frame, messages))

    def trickle() -> None:
        for i in range(0, len(data), 37):
            http.sendall(data[i : i + 37])

    threading.Thread(target=trickle).start()
    found = []
    while len(found) < len(messages):
        found += channel.receive(wait=True)
    assert found == messages
    assert channel.receive(wait=False) == []


def test_sending_never_waits_and_nothing_is_lost_or_out_of_order(ends):
    """Nobody reads for 3,000 steps: they come as few messages, in order, with the last's stats."""
    channel, http = ends
    start = time.perf_counter()
    for number in range(3000):
        channel.send(step(number))
    assert time.perf_counter() - start < 3
    channel.send(wire.Failed(["r0"], "then this"))
    channel.send(step(3000))

    unframer, found = wire.Unframer(), []
    http.setblocking(False)
    while not found or found[-1].tokens[-1] != 3000:
        while True:
            try:
                data = http.recv(2**20)
            except BlockingIOError:
                break
            found += unframer.feed(data)
        channel.receive(wait=False)  # as between two steps
    kinds = [type(message).__name__ for message in found]
    assert kinds.count("Failed") == 1
    assert kinds[-2:] == ["Failed", "Step"]
    assert len(kinds) < 300
    steps = [message for message in found if isinstance(message, wire.Step)]
    tokens = [t for one in steps for n, t in zip(one.names, one.tokens, strict=True) if n == "r7"]
    assert tokens == list(range(3001))
    assert [own for one in steps for own in one.drafts] == [("r7", n, 1) for n in range(3001)]
    assert steps[-1].stats.running == 3000
    assert steps[-2].stats.running == 2999


def test_waiting_for_messages_sends_what_waits(ends):
    channel, http = ends
    for number in range(2000):
        channel.send(step(number))
    waiting = threading.Thread(target=lambda: channel.receive(wait=True))
    waiting.start()
    unframer, found = wire.Unframer(), []
    while not found or found[-1].tokens[-1] != 1999:
        found += unframer.feed(http.recv(2**20))
    http.sendall(wire.frame(wire.Abort([])))
    waiting.join(5)
    assert not waiting.is_alive()


def test_the_last_message_is_sent_before_the_end(ends):
    channel, http = ends
    channel.send(step(1))
    channel.close(wire.Failed(["r1"], "the end"), seconds=1)
    data = b""
    while part := http.recv(2**16):
        data += part
    assert [type(m).__name__ for m in wire.Unframer().feed(data)] == ["Step", "Failed"]


def test_closing_waits_for_no_reader(ends):
    channel, _ = ends
    for number in range(3000):
        channel.send(step(number))
    start = time.perf_counter()
    channel.close(None, seconds=0.05)
    assert time.perf_counter() - start < 1


def test_the_end_of_the_other_side_is_noticed(ends):
    channel, http = ends
    http.close()
    with pytest.raises(wire.HttpGone):
        channel.receive(wait=False)
    with pytest.raises(wire.HttpGone):
        channel.send(step(1))


def test_a_step_is_a_small_message():
    """Names and numbers, no object a token: 256 requests take 4 kB."""
    one = step(40000, size=256)
    assert len(pickle.dumps(one)) < 4096
