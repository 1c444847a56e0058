"""Memory that runs out in a step: later ones are smaller, and few requests or none pay for it."""

import pytest

from inference.engine import Engine
from inference.requests.request import SamplingParams
from tests.inference.engines import engine_of, finish

PROMPTS = [[40 + i, *range(60, 140 + i)] for i in range(6)]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3)
FULL = [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]


def engine(folder, most_tokens: int, most_requests: int = 99, error: Exception = FULL[0]) -> Engine:
    """One whose memory is too small for steps of more tokens or requests than that."""
    made = engine_of(folder, max_batch_size=4, max_batched_tokens=256)
    forward = made.loop.forward

    def limited(batch):
        if len(batch.ids) > most_tokens or len(batch.context_len) > most_requests:
            raise error
        return forward(batch)

    made.loop.forward = limited
    return made


@pytest.mark.parametrize("error", FULL)
def test_fewer_tokens_a_step_lose_nobody(tiny_llama, error):
    wanted = engine(tiny_llama, 256).generate(PROMPTS, PARAMS)
    small = engine(tiny_llama, 50, error=error)
    found = small.generate(PROMPTS, PARAMS)
    assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
    assert {o.finish_reason for o in found} == {"length"}
    small.check_integrity()


def test_where_single_tokens_are_too_many_the_newest_end(tiny_llama):
    wanted = engine(tiny_llama, 256).generate(PROMPTS, PARAMS)
    small = engine(tiny_llama, 256, most_requests=2)
    names = [small.add_request(prompt, PARAMS) for prompt in PROMPTS]
    ended = finish(small)
    found = [ended[name] for name in names]
    lost = [i for i, output in enumerate(found) if output.finish_reason == "error"]
    assert lost
    assert not {0, 1} & set(lost)  # the oldest went on
    for i, output in enumerate(found):
        if i in lost:
            assert "memory was too small" in (output.error or "")
        else:
            assert output.token_ids == wanted[i].token_ids


def test_what_no_step_has_memory_for_ends_alone(tiny_llama):
    small = engine(tiny_llama, 0)
    names = [small.add_request(prompt, PARAMS) for prompt in PROMPTS]
    assert finish(small).keys() == set(names)
