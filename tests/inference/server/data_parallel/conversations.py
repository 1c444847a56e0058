"""Conversations over two engines on a CPU: what routing by their beginnings finds in the caches.

    python -m tests.inference.server.data_parallel.conversations CHECKPOINT

32 conversations of 8 turns go on side by side, 12 requests at a time. The cache of both engines
together holds all of them, that of one does not. The same is done with routing by load alone.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

from inference.config import EngineConfig
from inference.requests.request import SamplingParams
from inference.server.engine.process import EngineProcess, EngineSource, Place
from inference.server.engine_client import EngineClient
from inference.server.fleet import EngineFleet
from tests.inference.server.fake_engine import Reading

SIZES = EngineConfig(max_batch_size=16, kv_blocks=200)
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
TALKS, TURNS, AT_ONCE = 32, 8, 12


class Found(NamedTuple):
    """What a routing gave: tokens of prompts, those found in a cache, and seconds."""

    tokens: int
    hits: int
    seconds: float


async def talk(fleet: EngineFleet, seed: int, gate: asyncio.Semaphore) -> None:
    """One conversation: each prompt is the one before, its answer, and what is said next."""
    chance = random.Random(seed)
    prompt = [chance.randrange(300, 4000) for _ in range(200)]
    for _ in range(TURNS):
        async with gate:
            stream = Reading(fleet.submit(prompt, PARAMS))
            answer = [token async for delta in stream for token in delta.token_ids]
        prompt = prompt + answer + [chance.randrange(300, 4000) for _ in range(40)]
        await asyncio.sleep(chance.random() * 0.2)


async def converse(checkpoint: Path, *, by_prefix: bool) -> Found:
    """All conversations, on two engines that both have just started."""
    sources = [EngineSource(checkpoint, SIZES, Place("cpu", (core,))) for core in range(2)]
    processes = [EngineProcess(source) for source in sources]
    clients = [EngineClient(process.send) for process in processes]
    for process, client in zip(processes, clients, strict=True):
        await process.connect(client)
    fleet = EngineFleet(clients, prefix_cache=by_prefix)
    await fleet.ready()
    start, gate = time.monotonic(), asyncio.Semaphore(AT_ONCE)
    await asyncio.gather(*(talk(fleet, seed, gate) for seed in range(TALKS)))
    seconds = time.monotonic() - start
    for process in processes:
        process.disconnect()
    await asyncio.sleep(0.1)
    for process in processes:
        process.end(3)
    stats = [client.stats for client in clients]
    tokens = sum(each.blocks.queried_tokens for each in stats)
    return Found(tokens, sum(each.blocks.hit_tokens for each in stats), seconds)


def main(words: list[str]) -> None:
    """Print what each routing found."""
    for by_prefix in (True, False):
        found = asyncio.run(converse(Path(words[0]), by_prefix=by_prefix))
        share = f"{found.hits / found.tokens:.1%} of {found.tokens} tokens found"
        print(f"by {'prefix' if by_prefix else 'load'}: {share}, {found.seconds:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
