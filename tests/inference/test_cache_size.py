"""How large the cache is where a share of the memory is asked for."""

import resource
from pathlib import Path

import pytest

from formats import memory
from inference.config import EngineConfig
from inference.requests.request import SamplingParams
from tests.inference.engines import engine_of

GB = 10**9


def test_a_share_is_bounded_by_what_can_be_of_use():
    sizes = EngineConfig(max_batch_size=8, kv_memory=0.5)
    assert sizes.blocks_within(640, free=10 * GB, each=10**8) == 50
    assert sizes.blocks_within(640, free=1000 * GB, each=10**8) == 4 * 8 * 10
    assert sizes.blocks_within(640, free=0, each=10**8) == 10  # one request, or no engine at all


def test_the_engine_takes_its_share(tiny_llama, monkeypatch):
    monkeypatch.setattr("inference.cpu.backend.available_bytes", lambda: 10 * 2**20)
    shared = engine_of(tiny_llama, kv_memory=0.5)
    each = 64 * shared.kv_bytes_per_token
    assert shared.config.kv_blocks == shared.stats().total == 5 * 2**20 // each
    assert len(shared.pools[0].k) == shared.config.kv_blocks
    said = engine_of(tiny_llama, kv_memory=0.5, kv_blocks=9)
    assert said.stats().total == 9
    params = SamplingParams(max_tokens=4)
    assert shared.generate(["x"], params)[0].token_ids == said.generate(["x"], params)[0].token_ids


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_what_is_not_used_of_the_cache_takes_no_memory(tiny_llama):
    """A prompt of a model whose cache may be larger than the machine's memory."""

    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    small = engine_of(tiny_llama, kv_blocks=10)
    blocks, before = 2**28 // (64 * small.kv_bytes_per_token), held()
    large, params = engine_of(tiny_llama, kv_blocks=blocks), SamplingParams(max_tokens=4)
    found = large.generate(["x"], params)[0].token_ids
    assert held() - before < 2**26
    assert found == small.generate(["x"], params)[0].token_ids
    assert not any(pool.k[1:].any() for pool in large.pools)


@pytest.fixture
def system(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "GROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 16000 kB\nMemAvailable:   8000 kB\n")
    return tmp_path


def test_a_container_may_allow_less_than_the_machine_has(system):
    assert memory.available_bytes() == 8000 * 1024
    (system / "memory.current").write_text("3000000\n")
    (system / "memory.stat").write_text("anon 5\ninactive_file 500000\nactive_file 7\n")
    (system / "memory.max").write_text("max\n")
    assert memory.available_bytes() == 8000 * 1024
    (system / "memory.max").write_text("4000000\n")
    assert memory.available_bytes() == 1500000


def test_where_the_system_does_not_tell_it_is_half(system, monkeypatch):
    (system / "meminfo").unlink()
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.get)
    assert memory.available_bytes() == 2048000
