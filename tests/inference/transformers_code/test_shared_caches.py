"""Gemma 4 and 3n: blocks that read the K and V of others, embeddings of each block's own."""

from functools import cache

import pytest
import torch

from inference.config import EngineConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from tests.fake_quantized import fake_quantized_logits
from tests.families import check_engine, distance, transformers_logits
from tests.gemma4 import ALL, write_tiny
from tests.inference.transformers_code.test_transformers_code import ids_of
from tests.ptq.quantizing import quantize_head

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of the tiny models, each written once."""
    return cache(lambda layout: write_tiny(tmp_path_factory.mktemp(layout) / "float", layout))


@pytest.mark.parametrize("layout", ALL)
def test_logits_and_tokens_are_those_of_transformers(made, layout):
    """Whole, in chunks, token by token, in ragged batches, and found in the cache."""
    folder, ids = made(layout), ids_of(150)
    check_engine(folder, ids[:60])
    sizes = {"max_model_len": 512, "max_batched_tokens": 256, "max_batch_size": 4}
    engine = Engine.from_pretrained(folder, config=EngineConfig(**sizes))
    assert distance(engine.score(ids.tolist()), transformers_logits(folder, ids)) < 1e-4
    prompts = [ids[:n].tolist() for n in (5, 140, 33, 150)]
    together = [list(o.token_ids) for o in engine.generate(prompts, GREEDY)]
    again = [list(o.token_ids) for o in engine.generate(prompts, GREEDY)]
    assert engine.stats().hit_tokens >= 2 * 128
    assert together == again
    for prompt, tokens in zip(prompts[1:3], together[1:3], strict=True):
        whole = transformers_logits(folder, torch.tensor(prompt + tokens)).argmax(-1)
        assert whole[len(prompt) - 1 : -1].tolist() == tokens
    engine.check_integrity()


@pytest.mark.parametrize(
    ("layout", "heads"),
    [
        ("shared", [(2, 32), (2, 64)]),
        ("per_layer", [(2, 32), (2, 64)]),
        ("k_is_v", [(2, 32), (1, 64)]),
        ("gemma3n", [(2, 32), (2, 32)]),
    ],
)
def test_a_cache_is_held_for_those_layers_that_have_one(made, layout, heads):
    """Of four blocks in the first case and the last, two read the K and V of the others."""
    engine = Engine.from_pretrained(made(layout), config=EngineConfig(max_model_len=128))
    assert [(pool.k.shape[1], pool.k.shape[3]) for pool in engine.pools] == heads


def test_embeddings_stay_in_the_type_of_the_files(made):
    model = Engine.from_pretrained(made("per_layer")).model.module.model
    for own in (model.embed_tokens, model.embed_tokens_per_layer):
        assert own.table.weight.dtype == torch.bfloat16
        assert own(torch.tensor([[3, 5]])).dtype == torch.float32


def test_a_quantized_head_is_the_embedding_of_a_class_of_its_own(made, tmp_path):
    checkpoint = quantize_head(made("per_layer"), tmp_path / "out", "w8")
    assert checkpoint.shares_head
    ids = ids_of(40)
    found = Engine.from_pretrained(checkpoint.path).score(ids.tolist())
    assert distance(found, fake_quantized_logits(checkpoint, ids)) < 0.02
