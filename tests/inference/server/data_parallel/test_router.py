"""Which engine takes a request: by what it has served before, and by what it has to do."""

from collections import Counter

import pytest

from formats.errors import RequestError
from inference.server.engine.process import Place, places
from inference.server.fleet import KnownPrefixes, Load, Router, block_hashes

BLOCK = 4
IDLE = Load(queued=0, in_flight=0, places=8)
CHAT, OTHER = list(range(100, 120)), list(range(200, 220))


def test_a_prompt_goes_where_its_beginning_is_known():
    router = Router([64, 64, 64], BLOCK)
    first = router.choose(CHAT, [IDLE] * 3)[0]
    second = router.choose(OTHER, [IDLE] * 3)[0]
    assert second != first
    for prompt, home in ((CHAT, first), (OTHER, second)):
        for turn in range(1, 4):
            engine, new_tokens = router.choose([*prompt, *range(turn * 8)], [IDLE] * 3)
            known = 20 if turn > 1 else 16  # the last token of a prompt is never known
            assert engine == home
            assert new_tokens <= 20 + turn * 8 - known
    assert router.routed[first] == Counter(prefix=3, load=1)
    assert router.routed[3 - first - second] == Counter()


def test_prompts_that_begin_otherwise_are_spread():
    router = Router([64] * 4, BLOCK)
    chosen = [router.choose([i] * 10, [IDLE] * 4)[0] for i in range(40)]
    assert Counter(chosen) == dict.fromkeys(range(4), 10)


def test_a_busy_engine_loses_a_prompt_that_is_cheaper_to_compute_again():
    """20 tokens of which 16 are known: worth four requests of a block, not five."""
    for in_flight, expected in ((3, 0), (5, 1)):
        router = Router([64, 64], BLOCK)
        assert router.choose(CHAT, [IDLE, IDLE])[0] == 0
        assert router.choose(CHAT, [Load(0, in_flight, 8), IDLE])[0] == expected
    for queued, expected in ((15, 0), (17, 1)):
        router = Router([64, 64], BLOCK)
        router.choose(CHAT, [IDLE, IDLE])
        assert router.choose(CHAT, [Load(queued, 0, 8), IDLE])[0] == expected


def test_a_common_beginning_does_not_gather_all_requests_at_one_engine():
    """60 requests that stay: the load is even, though all begin alike."""
    router, in_flight = Router([64, 64, 64], BLOCK), [0, 0, 0]
    for i in range(60):
        loads = [Load(0, n, 100) for n in in_flight]
        in_flight[router.choose([*CHAT, i, i, i], loads)[0]] += 1
    assert max(in_flight) - min(in_flight) <= 5
    assert all(routed["prefix"] >= 10 for routed in router.routed)


def test_a_free_place_comes_before_the_prefix_and_room_in_the_queue_before_both():
    router = Router([64, 64], BLOCK)
    long = list(range(50))
    router.choose(long, [IDLE, IDLE])
    assert router.choose(long, [Load(0, 8, 8), Load(30, 7, 8)])[0] == 1
    router = Router([64, 64], BLOCK)
    router.choose(long, [IDLE, IDLE])
    assert router.choose(long, [Load(0, 9, 8, full=True), Load(900, 90, 8)])[0] == 1


def test_dead_engines_and_requests_that_take_no_hits():
    router = Router([64, 64], BLOCK)
    assert router.choose(CHAT, [None, IDLE])[0] == 1
    assert router.choose(CHAT, [IDLE, None])[0] == 0
    assert router.choose(CHAT, [IDLE, IDLE], reuse=False)[1] == len(CHAT)
    assert [routed["prefix"] for routed in router.routed] == [0, 0]


def test_what_was_used_least_lately_is_forgotten_from_its_end():
    known = KnownPrefixes(6)
    a, b = block_hashes(range(17), BLOCK), block_hashes(range(50, 67), BLOCK)
    known.add(a)
    known.add(b)
    assert [known.match(a), known.match(b)] == [2, 4]
    known.add(a[:2])
    known.add(block_hashes(range(80, 89), BLOCK))
    assert [known.match(a), known.match(b), len(known)] == [2, 2, 6]
    nothing = KnownPrefixes(0)
    nothing.add(a)
    assert nothing.match(a) == 0


def test_a_block_stands_for_all_before_it():
    hashes = block_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], BLOCK)
    assert len(hashes) == 2
    assert len(block_hashes([1, 2, 3, 4], BLOCK)) == 0  # its last token is computed anyway
    assert {*block_hashes(range(9), BLOCK, "sql")}.isdisjoint(block_hashes(range(9), BLOCK))
    assert block_hashes([0, 2, 3, 4, 5, 6, 7, 8, 9], BLOCK)[1] != hashes[1]


def test_places_of_engines():
    assert places("cuda:1", 1, range(8)) == [Place("cuda:1")]
    assert [place.device for place in places("cuda", 3, range(2))] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [place.device for place in places("cuda:2", 2, range(2))] == ["cuda:2", "cuda:3"]
    assert places("cuda:1", 2, range(2), ranks=2) == [
        Place("cuda", gpus=("1", "2")),
        Place("cuda", gpus=("3", "4")),
    ]
    assert places("cuda", 2, range(2), 2, "7,5,3,1")[1] == Place("cuda", gpus=("3", "1"))
    with pytest.raises(RequestError, match="takes 4 GPUs from number 1 on, and .* names 4"):
        places("cuda:1", 2, range(2), 2, "7,5,3,1")
    cores = [0, 1, 4, 5, 6, 7, 8]
    assert [place.cores for place in places("cpu", 3, cores)] == [(0, 1), (4, 5), (6, 7, 8)]
    with pytest.raises(RequestError, match="may use 2; lower it"):
        places("cpu", 3, range(2))
