"""Memory that runs out is told with what is needed, what is there and what to change."""

from __future__ import annotations

import pytest
import torch

from formats.errors import EngineError
from inference.config import EngineConfig
from inference.engine import Engine
from inference.models.memory import memory_for
from inference.scheduling.request import SamplingParams

CPU = torch.device("cpu")


def run_out(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_what_is_needed_and_free_is_told(monkeypatch):
    monkeypatch.setattr("inference.models.memory.free_bytes", lambda device: 3 * 10**9)
    with (
        pytest.raises(EngineError) as caught,
        memory_for("a cache", torch.device("cuda", 1), 5 * 10**9, "lower it"),
    ):
        run_out()
    assert str(caught.value) == (
        "cuda:1: memory is too small: a cache needs 5.00 GB, 3.00 GB are free; lower it"
    )


def test_other_errors_pass():
    with pytest.raises(ZeroDivisionError), memory_for("x", CPU, 1, ""):
        raise ZeroDivisionError


def test_weights_that_do_not_fit(tiny_llama, monkeypatch):
    monkeypatch.setattr("inference.models.load.LlamaModel", run_out)
    with pytest.raises(EngineError, match="loading the weights needs .* quantize the model"):
        Engine.from_pretrained(tiny_llama)


def test_a_cache_that_does_not_fit(tiny_llama, make_quantized, monkeypatch):
    quantized = make_quantized(tiny_llama)
    engine = Engine.from_pretrained(quantized, config=EngineConfig(kv_blocks=100))
    held = sum(pool.k.nbytes + pool.v.nbytes for pool in engine.pools)
    monkeypatch.setattr("inference.models.load.make_pool", run_out)
    needed: list[int] = []
    monkeypatch.setattr(
        "inference.models.memory.too_small",
        lambda what, device, free, nbytes, remedy: (
            needed.append(nbytes) or EngineError(f"{what}: {remedy}")
        ),
    )
    with pytest.raises(EngineError, match="a cache of 100 blocks of 64 tokens: .*max_batch_size"):
        Engine.from_pretrained(quantized, config=EngineConfig(kv_blocks=100))
    assert needed == [held]


def test_a_step_that_does_not_fit_loses_its_requests_and_not_the_engine(tiny_llama, monkeypatch):
    engine = Engine.from_pretrained(tiny_llama)
    wanted = engine.generate(["x"], SamplingParams(max_tokens=3))[0].token_ids
    monkeypatch.setattr("inference.engine.free_bytes", lambda device: 10**9)
    engine.add_request("x")
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", run_out)
        with pytest.raises(EngineError) as caught:
            engine.step()
    assert "a step found no more, 1.00 GB are free; lower max_batched_tokens" in str(caught.value)
    engine.check_integrity()
    assert not engine.has_unfinished
    assert engine.generate(["x"], SamplingParams(max_tokens=3))[0].token_ids == wanted
