"""Load: many clients before a real server, some of which leave; the others get what is right.

    python -m tests.inference.server.load CHECKPOINT --seconds 600 --clients 200 --leaving 0.3

Each client asks one thing after the other, streamed or not, for as long as it takes. Some of them
leave: before the head of the answer, while they wait in the queue or for their prompt, or amid the
stream. What the others are answered is compared with what `Engine` gives to the same, bit for bit.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from inference.engine import Engine
from tests.inference.server.load_cases import Answer, Case, Choice, make_cases
from tests.inference.server.real_server import RealServer

SECONDS = 120  # in which each has to be answered


@dataclass
class Report:
    """What a load gave.

    Attributes:
        seconds: That it took.
        right: Answers that were right.
        wrong: What was asked and answered otherwise than offline.
        lost: How clients that stayed got no answer.
        left: Clients that left, by where their request was.
        tokens: Generated tokens of right answers.
        first_token: Seconds to the first text of streams: median, 99th of 100.
        blocks: Of the cache, at the end: total, free, used, cached.
        counts: Of preemptions, and of prompts' tokens that were looked up in the cache and found.
        megabytes: Resident memory of the HTTP and of each engine's process, a fiftieth of the
            time each.
        exit_code: Of the server.
        errors: What it wrote to standard error.
    """

    seconds: float = 0.0
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    first_token: tuple[float, float] = (0.0, 0.0)
    blocks: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    megabytes: dict[str, list[float]] = field(default_factory=dict)
    exit_code: int | None = None
    errors: str = ""

    def growth(self, process: str) -> float:
        """Megabytes that a process has gained from the second fifth of the time to the last."""
        taken = self.megabytes[process]
        fifth = len(taken) // 5
        return statistics.median(taken[-fifth:]) - statistics.median(taken[fifth : 2 * fifth])


class Load:
    """Clients of one server.

    Args:
        address: The server's.
        cases: What they ask for.
        seed: Of their choices.
        leaving: Part of the requests whose client leaves.
    """

    def __init__(self, address: str, cases: list[Case], seed: int, leaving: float) -> None:
        self._cases, self._rng, self._leaving = cases, random.Random(seed), leaving
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=address, timeout=SECONDS, limits=limits)
        self._waits: list[float] = []
        self._typical = 0.5  # seconds of an answer
        self.report = Report()

    async def run(self, clients: int, seconds: float) -> None:
        """Ask for so long."""
        start = time.monotonic()
        async with self._http:
            await asyncio.gather(*(self._ask(start + seconds) for _ in range(clients)))
            self.report.seconds = time.monotonic() - start
            self.report.blocks = await self._idle_blocks()
        if self._waits:
            part = statistics.quantiles(self._waits, n=100)
            self.report.first_token = (part[49], part[98])

    async def _ask(self, until: float) -> None:
        while time.monotonic() < until:
            case, stream = self._rng.choice(self._cases), self._rng.random() < 0.6
            stream = stream and "beam_width" not in case.body
            try:
                if self._rng.random() < self._leaving:
                    await self._leave(case, stream)
                else:
                    await self._stay(case, stream)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.report.lost[f"{type(error).__name__}: {error}"[:200]] += 1

    async def _stay(self, case: Case, stream: bool) -> None:
        begun = time.monotonic()
        answer = Answer([Choice() for _ in case.right.choices], 0, 0)
        async for part in self._parts(case, stream):
            if stream and not any(choice.text for choice in answer.choices):
                self._waits.append(time.monotonic() - begun)
            for choice in part["choices"]:
                answer.choices[choice["index"]].add(choice)
            if part.get("usage"):
                answer.prompt_tokens = part["usage"]["prompt_tokens"]
                answer.completion_tokens = part["usage"]["completion_tokens"]
        self._typical += 0.05 * (time.monotonic() - begun - self._typical)
        if answer == case.right:
            self.report.right += 1
            self.report.tokens += answer.completion_tokens
        else:
            self.report.wrong.append(f"{stream} {case.body}: {answer}, not {case.right}")

    async def _leave(self, case: Case, stream: bool) -> None:
        """Leave soon, or when an answer would usually be half done, or after some of the stream."""
        moments = [0.02 * self._rng.random(), self._typical * self._rng.random()]
        moment = self._rng.choice([*moments, None] if stream else moments)
        events = self._rng.randint(1, 12) if moment is None else 10**9
        where = "before the head"
        try:
            async with asyncio.timeout(moment):
                async for _ in self._parts(case, stream):
                    where = "amid the stream"
                    events -= 1
                    if not events:
                        raise TimeoutError
            where = "after the end"
        except TimeoutError:
            pass
        self.report.left[where] += 1

    async def _parts(self, case: Case, stream: bool) -> AsyncIterator[dict[str, Any]]:
        """The answer as it comes: events, or all of it."""
        body = case.body | {"stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"{response.status_code} {await response.aread()}")
            if not stream:
                yield json.loads(await response.aread())
                return
            ended = False
            async for line in response.aiter_lines():
                if ended := line == "data: [DONE]":
                    break
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))
            if not ended:
                raise ValueError("a stream ended without [DONE]")

    async def _idle_blocks(self) -> dict[str, int]:
        """Blocks of the cache, once nobody holds any, or after some seconds."""
        for _ in range(100):
            text = (await self._http.get("/metrics")).text
            blocks = summed(r"^ptq:kv_cache_blocks_(\w+)\{.*\} (\S+)$", text)
            wanted = r"^ptq:(num_preemptions|prefix_cache_\w+)_total\{.*\} (\S+)$"
            self.report.counts = summed(wanted, text)
            if blocks["used"] == 0:
                break
            await asyncio.sleep(0.1)
        return blocks


def summed(pattern: str, text: str) -> dict[str, int]:
    """Metrics by the name that a pattern finds beside their value, those of all engines added."""
    found: Counter[str] = Counter()
    for name, value in re.findall(pattern, text, re.M):
        found[name] += int(float(value))
    return dict(found)


async def watch(server: RealServer, report: Report, seconds: float) -> None:
    """Note the memory of all processes, fifty times in so many seconds."""
    engines = {f"engine {i}": engine for i, engine in enumerate(server.engines)}
    processes = {"http": psutil.Process(server.process.pid)} | engines
    report.megabytes = {name: [] for name in processes}
    for _ in range(50):
        await asyncio.sleep(seconds / 50)
        for name, process in processes.items():
            report.megabytes[name].append(process.memory_info().rss / 2**20)


def load(
    checkpoint: Path, *, clients: int, seconds: float, leaving: float, seed: int, options: list[str]
) -> Report:
    """Run a server under load, and stop it.

    Args:
        checkpoint: What it serves.
        clients: How many ask at the same time.
        seconds: For how long they begin new requests.
        leaving: Part of the requests whose client leaves.
        seed: Of everything random.
        options: Of `ptq serve`.
    """
    cases = make_cases(Engine.from_pretrained(checkpoint), random.Random(seed))
    with RealServer(checkpoint, *options) as server:

        async def both() -> Report:
            made = Load(server.address, cases, seed, leaving)
            watching = asyncio.create_task(watch(server, made.report, seconds))
            await made.run(clients, seconds)
            await watching
            return made.report

        report = asyncio.run(both())
        server.process.terminate()
        report.exit_code = server.end()
        report.errors = server.errors
    return report


def lines(report: Report) -> Iterator[str]:
    """What a person wants to know of a load."""
    found = vars(report) | {"wrong": len(report.wrong)}
    memory = found.pop("megabytes")
    for key, value in found.items():
        yield f"{key}: {dict(value) if isinstance(value, Counter) else value}"
    yield f"requests/s: {report.right / report.seconds:.1f}"
    yield f"tokens/s: {report.tokens / report.seconds:.0f}"
    for name, taken in memory.items():
        told = ", ".join(f"{value:.0f}" for value in taken[::5])
        yield f"{name}: {told} MB; from the second fifth to the last {report.growth(name):+.1f}"
    yield from report.wrong[:5]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--leaving", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    known, options = parser.parse_known_args()
    print("\n".join(lines(load(**vars(known), options=options))))


if __name__ == "__main__":
    main()
