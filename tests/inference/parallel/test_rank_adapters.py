"""Adapters on several ranks: each request's logits are those of one process with the same adapters."""

import pytest
import torch

from formats.errors import CheckpointError, EngineError, RequestError
from inference.parallel.adapters import CpuRankAdapters
from inference.requests.request import SamplingParams
from tests.adapters import write_adapter, write_prefix
from tests.inference.engines import engine_of, ids
from tests.inference.parallel.test_ranks import EXACT
from tests.inference.parallel.thread_ranks import engine_on
from tests.inference.test_adapters import adapters_of, merged_logits, with_adapter

GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
ROUNDED = 0.1  # what the rounding of an input changes in logits, at most
NAMES = [None, "few", "all", "inputs", "few", None]
PROMPTS = [ids(7 + 9 * (i % 4), seed=i) for i in range(len(NAMES))]


@pytest.mark.parametrize("scheme", [None, "a8w8c8", "a8w8_dynamic", "w4", "fp8_channel"])
def test_schemes(scheme, tmp_path, make_model, make_quantized):
    """Tokens are those of one process; logits, too, but for the order in which A x of o and down is
    added up, and where that changes how an input is rounded. w4's groups cross the cuts in four.
    Each rank's cache takes a prefix's K and V of its heads, which with four ranks two share."""
    base = make_model("llama", tie_word_embeddings=False)
    path, found = make_quantized(base, scheme), {}
    own = adapters_of(tmp_path, base) | {"prefix": write_prefix(tmp_path / "p", base, 70)}
    each = [with_adapter(name, GREEDY) for name in (None, *own, "few")]
    for ranks in (1, 2, 4):
        with engine_on(path, ranks, own, max_model_len=256) as engine:
            logits = [engine.score(ids(60), name) for name in (None, *own)]
            tokens = [o.token_ids for o in engine.generate(PROMPTS, each)]
            engine.check_integrity()
            found[ranks] = torch.stack(logits), tokens
    wanted, expected = found[1]
    for ranks in (2, 4):
        logits, tokens = found[ranks]
        assert tokens == expected
        assert (logits - wanted).abs().max() < (1e-4 if scheme is None else ROUNDED)
        if scheme in EXACT:  # without and with an adapter of q and v alone
            assert torch.equal(logits[:2], wanted[:2])


@pytest.mark.parametrize("ranks", [2, 4])
def test_requests_of_one_batch_do_not_touch_each_other(ranks, tmp_path, tiny_llama):
    """Bit for bit, with sums of floats over four ranks, too."""
    own, params = adapters_of(tmp_path, tiny_llama), GREEDY.model_copy(update={"logprobs": 2})
    each = [with_adapter(name, params) for name in NAMES]
    with engine_on(tiny_llama, ranks, own, max_batched_tokens=33) as engine:
        together = engine.generate(PROMPTS, each)
        alone = [engine.generate([p], q)[0] for p, q in zip(PROMPTS, each, strict=True)]
    assert [o.logprobs for o in together] == [o.logprobs for o in alone]


@pytest.fixture
def held(monkeypatch) -> dict[object, dict[int, int]]:
    """Layers that each rank's adapters have, by rank and slot."""
    found: dict[object, dict[int, int]] = {}
    put = CpuRankAdapters.put

    def noted(self, slot, parts):
        put(self, slot, parts)
        found.setdefault(self, {})[slot] = len(parts)

    monkeypatch.setattr(CpuRankAdapters, "put", noted)
    return found


def test_what_is_refused_is_left_on_no_rank(tmp_path, tiny_llama, make_model, held):
    other = write_adapter(tmp_path / "other", make_model("llama", hidden_size=64))
    own = write_adapter(tmp_path / "own", tiny_llama, scale=0.5)
    with engine_on(tiny_llama, 2, {}) as engine:
        with pytest.raises(CheckpointError, match="of another base"):
            engine.load_adapter("a", other)
        with pytest.raises(RequestError, match="allowed are letters"):
            engine.load_adapter("a b", own)
        assert not held
        assert engine.adapters == {}
        engine.load_adapter("a", own)
        assert [slots[0] > 0 for slots in held.values()] == [True, True]
        engine.unload_adapter("a")
        assert list(held.values()) == [{0: 0}, {0: 0}]


@pytest.mark.parametrize("full", [0, 1])
def test_an_adapter_that_one_rank_has_no_memory_for(full, tmp_path, tiny_llama, held, monkeypatch):
    own, tokens = write_adapter(tmp_path / "own", tiny_llama, scale=0.5), ids(20)
    put = CpuRankAdapters.put

    def limited(self, slot, parts):
        if parts and slot == 1 and self._group.rank == full:
            raise EngineError("memory is too small")
        put(self, slot, parts)

    monkeypatch.setattr(CpuRankAdapters, "put", limited)
    with engine_on(tiny_llama, 2, {"a": own}) as engine:
        wanted = engine.score(tokens, "a")
        with pytest.raises(EngineError, match="memory"):
            engine.load_adapter("b", own)
        assert list(engine.adapters) == ["a"]
        assert torch.equal(engine.score(tokens, "a"), wanted)  # which rank 1 runs when it is done
        assert [slots.get(1, 0) for slots in held.values()] == [0, 0]


def test_processes(tmp_path, tiny_llama):
    own = adapters_of(tmp_path, tiny_llama)
    engine = engine_of(tiny_llama, own, tensor_parallel=2, max_model_len=128)
    try:
        wanted = merged_logits(tiny_llama, own["all"], ids(40))
        assert (engine.score(ids(40), "all") - wanted).abs().max() < 1e-4
    finally:
        engine.close()
