"""Beams in the GPU's loop, with kernels that only check what they are given."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference.beam_search import BeamParams, BeamSearch
from inference.config import EngineConfig
from inference.gpu.backend import TritonBackend
from inference.requests.request import SamplingParams
from inference.scheduling.active import ActiveRequest, ActiveRequests
from inference.scheduling.blocks import BlockManager
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import Held
from tests.inference.gpu.test_gpu_loop import Letters, V, fakes, logits_after  # noqa: F401
from tests.inference.logits_engine import LogitsEngine

LIMIT = 300
WIDTHS = [1, 2, 3, 4]


class FakeGpuEngine:
    """What a beam search asks of an engine, on the GPU's loop; plain requests run beside."""

    end_tokens = frozenset({0})

    def __init__(self, config: EngineConfig) -> None:
        assert config.kv_blocks is not None
        self.cache: dict[int, int] = {}
        self.blocks = BlockManager(config.kv_blocks, prefix_cache=True)
        scheduler = Scheduler(self.blocks, config.max_batch_size, config.max_batched_tokens)
        self.requests = ActiveRequests(scheduler, self._change_blocks)
        model: Any = SimpleNamespace(layers=[])
        pools: Any = self.cache
        backend = TritonBackend(torch.device("cpu"), torch.float16)
        self._loop = backend.loop(model, pools, config, self.requests)

    def _change_blocks(self, changes) -> None:
        held = dict(self.cache)
        for source, target in changes.copies:
            for offset in range(64):
                if source * 64 + offset in held:
                    self.cache[target * 64 + offset] = held[source * 64 + offset]

    def request(self, name, prompt, params, candidates=None) -> ActiveRequest:
        ends = frozenset() if candidates else self.end_tokens
        return ActiveRequest(name, prompt, params, Letters(), ends, LIMIT, candidates=candidates)

    def hold(self, prompt, *, top, beams, max_tokens, stop_token_ids, request_id, adapter):
        request = self.request(request_id, prompt, SamplingParams(max_tokens=max_tokens), top)
        request.sequence.places = beams
        self.requests.add(request)
        return Held(request_id, max_tokens)

    def extend(self, name, token):
        self.requests[name].sequence.append(token)

    def fork(self, name, new_name, token):
        self.requests.fork(self.requests[name], new_name, token)

    def abort(self, name):
        self.requests.finish(self.requests[name], "abort")

    def advance(self):
        result = self._loop.step()
        result.candidates = self.requests.take_candidates()
        self.blocks.check()
        return result


def search(engine: Any, prompt: list[int], params: BeamParams, name: str) -> BeamSearch:
    return BeamSearch(engine, prompt, params, name)


@pytest.mark.parametrize("seed", range(6))
def test_beams_find_in_any_company_what_they_find_alone(seed):
    rng = random.Random(seed)
    sizes = EngineConfig(
        max_model_len=LIMIT,
        max_batch_size=rng.choice([4, 5, 9, 16]),
        max_batched_tokens=rng.choice([3, 16, 64, 512]),
        kv_blocks=rng.choice([12, 14, 40]),
    )
    engine, searches, done = FakeGpuEngine(sizes), [], {}
    plain = {str(i): [rng.randrange(1, V) for _ in range(rng.randint(1, 70))] for i in range(8)}
    for i, prompt in enumerate(plain.values()):
        width = rng.choice(WIDTHS)
        params = BeamParams(beam_width=width, n=width, max_tokens=rng.randint(1, 70))
        searches.append((prompt, search(engine, prompt, params, f"beams-{i}")))
        engine.requests.add(engine.request(str(i), prompt, SamplingParams(max_tokens=20)))
    for _ in range(4000):
        result = engine.advance()
        done |= {output.request_id: list(output.token_ids) for output in result.finished}
        for _, one in searches:
            one.take(result)
        if not engine.requests:
            break
    stats = engine.blocks.stats()
    assert stats.free + stats.cached == stats.total
    for prompt, one in searches:
        alone: Any = LogitsEngine(lambda t: torch.log_softmax(logits_after(t), dim=-1), {0})
        reference = search(alone, prompt, one.params, one.name)
        while not reference.done:
            reference.take(alone.advance())
        assert one.hypotheses == reference.hypotheses
    for name, prompt in plain.items():
        tokens = [*prompt]
        while len(tokens) < len(prompt) + 20 and (tokens == prompt or tokens[-1] != 0):
            tokens.append(int(logits_after(tokens).argmax()))
        assert done[name] == tokens[len(prompt) :]
