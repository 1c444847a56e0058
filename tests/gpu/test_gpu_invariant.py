"""`EngineConfig(invariant=True)`: a request's bits are the same in any company and any cut."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from formats.errors import EngineError
from inference.config import EngineConfig
from inference.engine import Engine
from inference.proposers import draft_methods
from inference.requests.request import SamplingParams
from tests.gpu.test_gpu_engine import random_engine
from tests.inference.speculate.requests import all_tokens, run_all, some_requests
from tests.kernels.expert_cases import FAMILIES, make_rows, make_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny-python"
SCHEMES = ["float", "w4c8", "w8", "a8w8c8", "a8w8c8_dynamic", "a8w4c8", "fp8_c8", "fp8_block"]
SCHEMES += ["c4", "a8w4c4_two_level"]
COUNT = int(os.environ.get("PTQ_SPECULATED_REQUESTS", "60"))
COPIES = int(os.environ.get("PTQ_INVARIANT_COPIES", "120"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [(512, 1024), (6144, 4096)])
def test_a_row_of_a_linear_layer_has_its_bits_in_any_company(family, size):
    from inference.gpu.layers import GpuLinear
    from kernels.triton.linear.weight import InputFormat

    torch.manual_seed(0)
    with torch.device("cuda"):
        (weight,), _ = make_weights(family, 1, *size)
        x, scales = make_rows(family, 600, size[1])
    layer = GpuLinear(weight, InputFormat(x.dtype), invariant=True)
    alone = torch.cat(
        [layer.run(x[i : i + 1], None if scales is None else scales[i : i + 1], torch.float16)
         for i in range(0, 600, 37)]
    )  # fmt: skip
    for count in (2, 5, 16, 17, 33, 64, 65, 130, 300, 600):
        own = None if scales is None else scales[:count].contiguous()
        found = layer.run(x[:count], own, torch.float16)[::37]
        assert torch.equal(found, alone[: len(found)]), count


def outputs(engine: Engine, prompts: list, params: SamplingParams) -> list:
    found = engine.generate(prompts, params)
    engine.check_integrity()
    return [(out.token_ids, out.logprobs) for out in found]


@pytest.mark.parametrize(
    ("shape", "scheme"), [*(("small", s) for s in SCHEMES), ("odd", "float"), ("odd", "a8w8c8")]
)
def test_requests_get_alone_what_they_get_in_a_crowd(shape, scheme):
    """With graphs and without, in chunks, after hits of the prefix cache and preempted."""
    prompts = [[(7 + 3 * i * j) % 4000 for j in range(1 + (61 * i) % 300)] for i in range(12)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2)
    alone = random_engine(shape, scheme, invariant=True, max_batch_size=1)
    wanted = [outputs(alone, [prompt], params)[0] for prompt in prompts]
    del alone
    for sizes in (
        {"max_batched_tokens": 70},
        {"max_batched_tokens": 70, "max_batch_size": 1},  # chunks of which the head gets no row
        {"eager": True, "max_batch_size": 5},
        {"prefix_cache": True, "kv_blocks": 16, "max_model_len": 512},
    ):
        crowd = random_engine(shape, scheme, invariant=True, **sizes)
        for _ in range(2):
            assert outputs(crowd, prompts, params) == wanted, sizes
        if "kv_blocks" in sizes:
            assert crowd.stats().preemptions > 0
            assert crowd.stats().hit_tokens > 0
        del crowd
        torch.cuda.empty_cache()


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_change_no_bit(method):
    """Requests of every kind; PTQ_SPECULATED_REQUESTS asks for another number of them."""
    sizes = {"invariant": True, "max_model_len": 256, "kv_blocks": 64}
    engine = Engine.from_pretrained(TINY, device="cuda", config=EngineConfig(**sizes))
    requests = some_requests(COUNT, seed=2, constrained=find_spec("xgrammar") is not None)
    texts, wanted = all_tokens(engine, requests), run_all(engine, requests)
    assert len(texts) == COUNT
    engine.speculate_by(draft_methods()[method].make(None, None), 4)
    for _ in range(2):
        assert run_all(engine, requests) == wanted
    assert engine.speculation is not None
    assert engine.speculation.accepted.sum() > 0


@pytest.mark.parametrize("scheme", ["w4c8", "a8w8c8"])
def test_copies_of_a_prompt_within_a_mixed_load_give_one_answer(scheme):
    """PTQ_INVARIANT_COPIES asks for another number of them."""
    engine = random_engine("small", scheme, invariant=True, max_batch_size=64, prefix_cache=True)
    prompt, answers = [(11 * j) % 4000 for j in range(90)], set()
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0)
    names = set()
    for i in range(COPIES):
        names.add(engine.add_request(prompt, params))
        other = SamplingParams(max_tokens=1 + 7 * i % 50, ignore_eos=True, temperature=1.0, seed=i)
        engine.add_request([(i + 5 * j) % 4000 for j in range(1 + 31 * i % 200)], other)
        for output in engine.step() if i % 3 else ():
            if output.finished and output.request_id in names:
                answers.add(str((output.token_ids, output.logprobs)))
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished and output.request_id in names:
                answers.add(str((output.token_ids, output.logprobs)))
    assert len(answers) == 1


def test_what_has_no_fixed_order_of_sums_is_refused():
    with pytest.raises(EngineError, match="invariant: it is a mixture of experts"):
        random_engine("mixture", "float", invariant=True)
    config = EngineConfig(invariant=True, transformers_code=True)
    with pytest.raises(EngineError, match="invariant: the model is run by transformers' code"):
        Engine.from_pretrained(TINY, device="cuda", config=config)
