"""Layers for further tokens: what they draft is what transformers' block says, and nothing changes."""

import json
import shutil

import pytest
import torch

from formats.errors import CheckpointError, EngineError
from formats.families.predicting import UNDECLARED
from formats.residual_rotation import with_rotation
from inference.requests.request import SamplingParams
from tests.families import but_in_ci
from tests.inference.engines import tokens_of
from tests.inference.speculate.predicting import (
    HIDDEN,
    KINDS,
    STATEFUL,
    Reference,
    engine,
    inside,
    with_layer,
)
from tests.inference.speculate.requests import request_count, run_all, some_requests, spied
from tests.inference.transformers_code.test_states import write_small

LONG = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = [[5 + i] * 45 + [9 + 3 * i] * i for i in range(3)]
NONE = "no layer that predicts further tokens.*"


@pytest.fixture(scope="module", params=but_in_ci([*KINDS, *STATEFUL], "deepseek_v3", STATEFUL[0]))
def plain(make_model, tmp_path_factory, request):
    if request.param in KINDS:
        return make_model(request.param, **KINDS[request.param])
    return write_small(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def reference(plain) -> Reference:
    return Reference(plain)


@pytest.fixture(scope="module")
def folder(plain, reference, tmp_path_factory):
    return with_layer(plain, tmp_path_factory.mktemp("mtp") / "model", reference.tensors)


def test_drafts_are_those_of_the_layer(reference, folder):
    """After prompts in chunks, rejected drafts, and what was found in the cache."""
    runner = engine(folder, max_batched_tokens=80, max_batch_size=3)
    seen = spied(runner)
    outputs = runner.generate(PROMPTS, LONG)
    runner.generate([[*tokens_of(o), 7 + i] for i, o in enumerate(outputs)], LONG)
    for rest in (range(94, 100), (7, 8), (9,)):  # one by one: each has that block to itself
        runner.generate([[*range(30, 94), *rest]], LONG)
    assert runner.stats().hit_tokens > 0
    assert len(seen) > 40
    for text, drafts in seen[::4]:
        reference.check(text, drafts)
    runner.check_integrity()


def test_nothing_changes(plain, reference, folder):
    """Greedily and by seeds, with prompts of any kind, preemption and aborts."""
    requests = some_requests(request_count(8 if reference.names is UNDECLARED else 20), seed=3)
    config = {"max_batch_size": 3, "kv_blocks": 8, "max_batched_tokens": 70}
    wanted = run_all(engine(folder, None, **config), requests)
    assert run_all(engine(folder, **config), requests) == wanted
    beside = engine(plain, path=folder, **config)  # a checkpoint that lost the layer
    assert run_all(beside, requests) == wanted
    assert beside.speculation.proposed.sum() > 0


def test_models_without_one_are_named(plain, reference, tiny_llama):
    with pytest.raises(EngineError, match=NONE + rf"\(.*{reference.names.joined}\).*mtp=PATH"):
        engine(plain)
    with pytest.raises(EngineError, match=f"{NONE}mtp=PATH"):
        engine(tiny_llama)


def test_what_lacks_a_part_or_has_another_width_is_named(plain, reference, tmp_path):
    """What no file fills would be random, and no draft would ever come."""
    names, tensors = reference.names, reference.tensors
    joined = f"{names.layer(2)}.{names.joined}.weight"
    narrow = tensors | {joined: torch.zeros(HIDDEN, HIDDEN).bfloat16()}
    told = rf"{names.joined}.weight is \[128, 128\].*\[128, 256\]"
    with pytest.raises(CheckpointError, match=told):
        engine(with_layer(plain, tmp_path / "narrow", narrow))
    around = [f"{names.layer(2)}.{part}.weight" for part in (names.norm, names.hidden_norm)]
    expert = f"{inside(names)}mlp.experts.1.up_proj.weight"
    lacking = [*around, f"{inside(names)}self_attn.o_proj.weight", expert]
    for i, name in enumerate(name for name in lacking if name in tensors):
        some = {k: t for k, t in tensors.items() if k != name}
        with pytest.raises(CheckpointError, match=name.removesuffix(".weight")):
            engine(with_layer(plain, tmp_path / str(i), some))


@pytest.mark.parametrize("plain", but_in_ci(KINDS, "deepseek_v3"), indirect=True, scope="module")
def test_a_rotated_model_and_a_layer_that_is_not_are_named(plain, folder, tmp_path):
    """Every draft would be wrong."""
    shutil.copytree(plain, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(with_rotation(config, 0)))
    with pytest.raises(EngineError, match="is rotated, and the layer.*residual: false"):
        engine(tmp_path / "model", path=folder)


@pytest.mark.parametrize("plain", but_in_ci(STATEFUL, STATEFUL[0]), indirect=True, scope="module")
def test_the_embedding_and_the_head_are_those_of_the_model(folder):
    runner = engine(folder)
    layer = runner.speculation.proposer._head._model
    for get in ("get_input_embeddings", "get_output_embeddings"):
        assert getattr(layer, get)() is getattr(runner.model.module, get)()
