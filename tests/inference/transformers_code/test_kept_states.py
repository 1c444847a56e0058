"""Recurrent states that are kept in int8 for prompts that begin alike, against transformers."""

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from formats.cache_scheme import StateSpec
from formats.checkpoint.read import Checkpoint
from formats.errors import EngineError
from inference.accuracy import compare_logits
from inference.config import SpeculateConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from inference.scheduling.states import StateRows
from inference.transformers_code.state_rows import StatePool, StateShape
from tests.conftest import write_tokenizer
from tests.inference.speculate.requests import Replay
from tests.inference.transformers_code import test_states
from tests.inference.transformers_code.test_states import ids_of
from tests.tiny_models import tiny_config

SMALL = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
LARGE = SMALL | {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "hidden_size": 256,
    "max_position_embeddings": 8192,
}
MAMBA = {"hidden_size": 256, "num_heads": 8, "head_dim": 64, "n_groups": 1, "state_size": 128}
WHOLE, PROMPT = 128, 150  # of a prompt's tokens so many are found
ONE = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=20)


def write_remembering(kind: str, folder: Path, sizes: dict[str, Any]) -> Path:
    """A random model whose states last: steps of 0.001 to 0.1, as such models are initialized."""
    config = tiny_config(kind)
    for name, value in sizes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(1, 16).log())
            elif name.endswith("dt_bias"):
                step = torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(0.1)).exp()
                parameter.copy_(step + torch.log(-torch.expm1(-step)))
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(2.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def kept_in_int8(folder: Path, out: Path) -> Path:
    """The same model, whose checkpoint says so."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    config["ptq"] = {"kv_cache": None, "states": {"dtype": "int8"}}
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_remembering("qwen3_next", tmp_path_factory.mktemp("float"), SMALL)


@pytest.fixture(scope="module")
def rounded(folder, tmp_path_factory) -> Path:
    return kept_in_int8(folder, tmp_path_factory.mktemp("s8") / "checkpoint")


engine_of = partial(test_states.engine_of, max_batched_tokens=512)


def rounded_once(x: np.ndarray) -> np.ndarray:
    """int8 of matrices [..., R, C] and back: a scale for each row, then one for each column."""
    rows = np.sqrt(np.abs(x).max(-1, keepdims=True))
    columns = np.abs(x / rows).max(-2, keepdims=True) / 127
    return np.clip(np.rint(x / (rows * columns)), -127, 127) * rows * columns


@torch.no_grad()
def transformers_logprobs(folder: Path, ids: list[int], *, rounds: bool) -> torch.Tensor:
    """Of the token after a prompt whose beginning is computed first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([ids])
    cache = model(tokens[:, :WHOLE], use_cache=True).past_key_values
    for layer in cache.layers:
        states = getattr(layer, "recurrent_states", {})
        for index, state in states.items() if rounds else ():
            states[index] = torch.from_numpy(rounded_once(state.numpy()).astype(np.float32))
    out = model(tokens[:, WHOLE:], past_key_values=cache, use_cache=True)
    return out.logits[0, -1].log_softmax(-1)


def logprobs_of(output) -> dict[int, float]:
    [known] = output.logprobs
    return dict(known)


def distance(found: dict[int, float], wanted: torch.Tensor) -> float:
    return max(abs(value - wanted[token].item()) for token, value in found.items())


def test_what_is_found_is_the_state_of_a_prompt_rounded_once(folder, rounded):
    engine, ids = engine_of(rounded), ids_of(PROMPT)
    assert engine.checkpoint.scheme.wac == "s8"
    missed, found = (logprobs_of(engine.generate([ids], ONE)[0]) for _ in range(2))
    assert engine.stats().hit_tokens == WHOLE
    exact, lossy = (transformers_logprobs(folder, ids, rounds=own) for own in (False, True))
    assert distance(missed, exact) < 1e-4
    assert distance(found, lossy) < 1e-4
    assert distance(found, exact) > 2e-4  # so that the two can be told apart
    engine.check_integrity()


def test_without_it_what_is_found_has_the_bits_of_what_is_computed(folder, rounded):
    plain, ids = engine_of(folder), ids_of(PROMPT)
    missed, found = (plain.generate([ids], ONE)[0].logprobs for _ in range(2))
    assert plain.stats().hit_tokens == WHOLE
    assert missed == found
    assert engine_of(rounded).generate([ids], ONE)[0].logprobs == missed  # a miss rounds nothing
    floats = Engine.from_pretrained(rounded, quantized_kv=False, config=plain.config)
    assert [floats.generate([ids], ONE)[0].logprobs for _ in range(2)] == [missed, missed]


def rows_of(engine: Engine) -> StateRows:
    assert engine._blocks.states is not None
    return engine._blocks.states


def test_more_states_are_kept_in_the_same_memory(folder, rounded):
    many, few = engine_of(rounded), engine_of(folder)
    assert many.state_bytes <= few.state_bytes
    assert many.state_bytes > 0.9 * few.state_bytes
    numbers = [rows_of(engine).rows - rows_of(engine).kept for engine in (many, few)]
    heads, conv = 4 * 32 * 16, (2 * 2 * 32 + 4 * 16) * 4  # elements: 4 heads, 2 of keys; 4 tokens
    full, kept = 4 * heads + 4 * conv, heads + 4 * 4 * (32 + 16) + 4 * conv
    assert numbers == [32 * full // kept, 32]
    assert rows_of(engine_of(rounded, state_snapshots=3)).rows == 5 + 3


def test_drafts_change_no_token_and_their_states_are_not_rounded(rounded):
    """The first of two drafts is right: each step goes back to the state after it."""
    prompt, params = ids_of(70), SamplingParams(max_tokens=24, ignore_eos=True)
    wanted = engine_of(rounded).generate([prompt], params)[0]
    assert len(set(wanted.token_ids)) > 4
    engine = engine_of(rounded, speculate=SpeculateConfig(method="ngram"))
    engine.speculate_by(Replay([[*prompt, *wanted.token_ids]], 2, 384))
    assert engine.generate([prompt], params)[0].token_ids == wanted.token_ids
    with pytest.raises(EngineError, match=r"no rows for recurrent states.*speculate=\.\.\."):
        engine_of(rounded).speculate_by(Replay([], 1, 384))


def test_rows_of_rounded_states_are_for_nothing_else():
    states = StateRows(places=3, snapshots=4, piece=64, drafts=2, int8=True)
    assert (states.kept, states.rows) == (5, 9)
    states.reserve(4)
    assert states.drafts == 2
    states.want(0, [64])
    [(_, row)] = states.taken(0, 64)
    assert row >= states.kept
    assert states.adds_up() is False  # the row is on its way
    states.note(None, row)
    assert states.adds_up()


def test_a_pool_rounds_matrices_of_kept_rows_alone():
    x = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(1))
    pool = StatePool(StateShape("recurrent", 0, (3, 5, 7), torch.float32), 4, x.device, int8=2)
    assert pool.nbytes == 3 * 4 * 105 + 2 * (105 + 4 * 3 * (5 + 7))
    ours, kept = torch.tensor([0, 1]), torch.tensor([3, 2])
    pool.write(ours, x)
    assert torch.equal(pool.read(ours), x)
    pool.keep(kept, x)
    pool.copy(kept, ours, kept=True)
    wanted = torch.from_numpy(rounded_once(x.numpy()))
    assert torch.allclose(pool.read(ours), wanted, atol=1e-6)
    pool.write(ours, x)
    pool.round(1)
    assert torch.equal(pool.read(ours)[0], x[0])
    assert torch.allclose(pool.read(ours)[1], wanted[1], atol=1e-6)
    conv = StatePool(StateShape("conv", 0, (6, 4), torch.float32), 4, x.device, int8=2)
    conv.keep(kept, x[:, 0, :4, :6].mT)
    assert torch.equal(conv.read(kept), x[:, 0, :4, :6].mT)


@pytest.mark.parametrize(("kind", "sizes"), [("qwen3_next", LARGE), ("mamba2", MAMBA)])
def test_a_state_found_at_every_block_of_4096_tokens_loses_little(kind, sizes, tmp_path):
    made = kept_in_int8(write_remembering(kind, tmp_path / "float", sizes), tmp_path / "s8")
    engine = engine_of(made, max_model_len=4096, max_batch_size=1, prefix_cache=False)
    ids = torch.tensor(ids_of(4096))
    exact, lossy = (engine.score(ids, rounded_states=own) for own in (False, True))
    kl = compare_logits(exact, lossy, ids).kl.mean().item()
    assert 1e-7 < kl < 0.002
    sizes = [len(part) for part in engine.score_parts(ids[:1100])]
    assert sizes == [512, 512, 76]  # as of an engine that rounds nothing


def test_a_checkpoint_says_that_it_keeps_them_so(folder, rounded):
    assert Checkpoint.open(rounded).scheme.states == StateSpec()
    assert Checkpoint.open(folder).scheme.states is None
