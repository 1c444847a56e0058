"""`ptq serve` on a GPU: the engine's answers, steps that are captured, kills that free memory."""

from __future__ import annotations

import os
import time

import httpx
import pytest
import torch

from inference.config import EngineConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from tests.inference.server.real_server import RealServer, gone

for part in ("fastapi", "uvicorn", "httptools"):
    pytest.importorskip(part, reason="a server needs ptq[serve]")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


ALONE = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1"  # others' memory would count, too


def complete(server: RealServer, prompt: list[int], **values) -> dict:
    body = {"prompt": prompt, "temperature": 0} | values
    answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def free() -> int:
    return torch.cuda.mem_get_info()[0]


def test_answers_are_those_of_the_engine_and_a_kill_frees_the_memory(make_model, make_quantized):
    folder = make_quantized(make_model("llama", max_position_embeddings=2048), "a8w8c8")
    sizes = EngineConfig(max_batch_size=8, max_model_len=2048, kv_blocks=256)
    own = Engine.from_pretrained(folder, config=sizes, device="cuda")
    prompts = [[40 + i, 50, *range(60, 60 + 9 * i)] for i in range(6)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    wanted = [own.generate([prompt], params)[0].text for prompt in prompts]
    del own
    torch.cuda.empty_cache()
    before = free()
    options = ("--device", "cuda", "--max-model-len", "2048", "--kv-memory", "0.2")
    with RealServer(folder, *options) as server:
        assert "on cuda:0" in server.greeting
        assert "256 requests at once" in server.greeting
        found = [complete(server, p, max_tokens=24, ignore_eos=True) for p in prompts]
        assert [answer["choices"][0]["text"] for answer in found] == wanted
        assert not ALONE or before - free() > 2**28  # the cache has its share
        engine = server.engine
        server.process.kill()
        assert gone(engine)
    until = time.monotonic() + 20
    while ALONE and free() < before - 2**28:
        assert time.monotonic() < until
        time.sleep(0.1)
