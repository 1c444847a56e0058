"""Sink tokens through the whole path: a model whose first token explodes, as real ones' do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from calibrate.data import TokenSet
from calibrate.spec import SINK_INPUT
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.stored.folder import SINK_SCALES
from inference.config import EngineConfig
from inference.cpu.backend import CpuBackend
from inference.engine import Engine
from inference.requests.request import SamplingParams
from ptq.methods.gptq import GPTQSpec
from ptq.methods.rtn import RTNSpec
from ptq.pipeline.artifact import Artifact
from ptq.pipeline.driver import quantize_tokens, solve
from ptq.plan.plan import build_plan
from ptq.recipe.schema import SinksSpec
from ptq.result import QuantizationResult
from tests.calibrate.test_sinks import silence
from tests.ptq.quantizing import divergence, edit_model, make_plan

FIRST = 7  # the token that stands first in every sequence
DOWN = "model.layers.1.mlp.down_proj"
RTN = (RTNSpec(),)


def explode(tensors: dict[str, Tensor]) -> None:
    """Let the first token, and no other, meet one channel of a down_proj with some thousands."""
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = 0
    embedding[FIRST] = 0
    embedding[FIRST, 0] = 4 * embedding.float().abs().max().to(embedding.dtype)
    for name in ("gate_proj", "up_proj"):
        weight = tensors[f"model.layers.1.mlp.{name}.weight"]
        weight[5] = 0
        weight[5, 0] = 8.0
    tensors[f"{DOWN}.weight"][:, 5] *= 0.25
    for layer in (0, 1):  # nothing else writes to the channel that tells the first token
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"][0] = 0


@pytest.fixture(scope="module")
def sink_model(tiny_llama, tmp_path_factory) -> Path:
    return edit_model(tiny_llama, tmp_path_factory.mktemp("sinks") / "model", explode)


def tokens(sequences: int = 8, length: int = 64, seed: int = 1) -> TokenSet:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, 384, (sequences, length), generator=generator)
    ids[:, 0] = FIRST
    return TokenSet(ids, torch.ones_like(ids, dtype=torch.bool), "random", "calibration")


def quantized(
    model: Path, output: Path, keep: object, scheme: str = "a8w8c8", **options
) -> QuantizationResult:
    plan = make_plan(model, output, scheme, **options)
    recipe = plan.recipe.model_copy(update={"sinks": SinksSpec.model_validate({"keep": keep})})
    plan = build_plan(recipe, Checkpoint.open(model), force=True)
    return quantize_tokens(plan, tokens(), progress=False)


@pytest.fixture(scope="module")
def both(sink_model, tmp_path_factory) -> dict[object, QuantizationResult]:
    """Checkpoints in which sink tokens are kept apart, and are not."""
    folder = tmp_path_factory.mktemp("both")
    return {keep: quantized(sink_model, folder / str(keep), keep) for keep in ("auto", "none")}


def engine_of(folder: Path, *, fused: bool = True, **config) -> Engine:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    backend = CpuBackend(fused=fused)
    return Engine(Checkpoint.open(folder), tokenizer, EngineConfig(**config), backend)


def loss(model: Path, checkpoint: Path) -> float:
    """Mean KL divergence to the original on other sequences, first tokens left out."""
    float_engine, engine, found = engine_of(model), engine_of(checkpoint), []
    for ids in tokens(4, seed=2).sequences():
        both = (x.score(ids).double().log_softmax(-1)[1:] for x in (float_engine, engine))
        found.append(divergence(*both))
    return sum(found) / len(found)


def test_one_token_is_found_and_left_out_of_what_all_others_show(both):
    assert both["auto"].sink_tokens == 1
    assert both["none"].sink_tokens == 0
    statistics = Artifact.load(both["auto"].checkpoint.parent).statistics
    others, sinks = statistics[DOWN, "input"], statistics[DOWN, SINK_INPUT]
    assert others.token_median is not None
    assert sinks.absmax > 64 * others.token_median
    assert sinks.peak_position == 0
    assert others.peak_position >= 1
    assert others.tokens == 8 * 63
    seen = Artifact.load(both["none"].checkpoint.parent).statistics[DOWN, "input"]
    assert seen.absmax == sinks.absmax
    assert seen.peak_position == 0


def test_ranges_of_the_cache_hold_their_keys_and_values(both):
    """A GPU reads them in the cache's format."""
    kept, shared = (Artifact.load(both[k].checkpoint.parent).statistics for k in ("auto", "none"))
    for role in ("k_cache", "v_cache"):
        own, theirs = (found["model.layers.1.self_attn", role] for found in (kept, shared))
        assert own.tokens == 8 * 64
        assert torch.equal(own.channel_absmax, theirs.channel_absmax)


def test_static_int8_holds_where_it_did_not(sink_model, tmp_path):
    """Without smoothing, which takes the one channel of this model as it takes no real one's."""
    kept, shared = (
        loss(sink_model, quantized(sink_model, tmp_path / keep, keep, methods=RTN).checkpoint)
        for keep in ("auto", "none")
    )
    assert kept < shared / 5


def test_the_checkpoint_names_them(both):
    checkpoint = Checkpoint.open(both["auto"].checkpoint, verify=True)
    assert checkpoint.sinks.tokens == 1
    assert DOWN in checkpoint.sinks.scales
    rows = [r for r in both["auto"].scale_table.entries if r.role == SINK_INPUT]
    assert {row.module for row in rows} == set(checkpoint.sinks.scales)
    assert checkpoint.sinks.scales[DOWN] > checkpoint.scale(f"{DOWN}.input_scale")
    assert set(checkpoint.sinks.scales) == {
        name for name in checkpoint.quantized_modules if f"{name}.input_scale" in checkpoint
    }
    assert Checkpoint.open(both["none"].checkpoint).sinks.tokens == 0


@pytest.mark.parametrize("fused", [True, False])
def test_chunks_steps_and_shared_beginnings_have_the_bits_of_one_prompt(both, fused):
    folder, ids = both["auto"].checkpoint, tokens(1, 150, seed=3).sequences()[0]
    whole = engine_of(folder).score(ids)
    assert torch.equal(engine_of(folder, fused=fused).score(ids), whole)
    assert torch.equal(engine_of(folder, fused=fused, max_batched_tokens=1).score(ids), whole)
    assert torch.equal(engine_of(folder, fused=fused, max_batched_tokens=40).score(ids), whole)
    engine, greedy = engine_of(folder, fused=fused), SamplingParams(max_tokens=8)
    prompts = [ids.tolist(), ids[:100].tolist(), ids[:1].tolist()]
    alone = [engine_of(folder).generate([prompt], greedy)[0].token_ids for prompt in prompts]
    for _ in range(2):  # the second time beginnings are found in the cache
        assert [done.token_ids for done in engine.generate(prompts, greedy)] == alone


def test_transformers_code_has_the_same_rows(both):
    folder, ids = both["auto"].checkpoint, tokens(1, 40, seed=4).sequences()[0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = EngineConfig(transformers_code=True)
    own = Engine(Checkpoint.open(folder), tokenizer, config, CpuBackend()).score(ids)
    torch.testing.assert_close(own, engine_of(folder).score(ids), rtol=1e-3, atol=1e-3)


def test_solved_again_it_has_the_same_bytes(both, sink_model, tmp_path):
    folder = both["auto"].checkpoint
    plan = make_plan(sink_model, tmp_path / "again")
    solve(plan, Artifact.load(folder.parent), progress=False)
    for path in sorted(p for p in folder.rglob("*") if p.suffix == ".safetensors"):
        twin = tmp_path / "again" / "checkpoint" / path.relative_to(folder)
        assert twin.read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("scheme", ["c8", "k8v4", "c4"])
def test_caches_keep_them_in_float(sink_model, tmp_path, scheme):
    kept = quantized(sink_model, tmp_path / "kept", 2, scheme, methods=())
    engine = engine_of(kept.checkpoint)
    assert all(pool.sink_tokens == 2 for pool in engine.pools)
    shared = quantized(sink_model, tmp_path / "shared", "none", scheme, methods=())
    assert all(pool.sink_tokens == 0 for pool in engine_of(shared.checkpoint).pools)
    assert loss(sink_model, kept.checkpoint) < loss(sink_model, shared.checkpoint)


def test_weights_alone_are_solved_for_what_all_tokens_read(tiny_llama, tmp_path):
    """Values tell the token, whose inputs are like others'; the checkpoint knows of none."""
    folder = edit_model(tiny_llama, tmp_path / "model", silence)
    kept, shared = (
        quantized(folder, tmp_path / keep, keep, "w4", methods=(GPTQSpec(),))
        for keep in ("auto", "none")
    )
    assert (kept.sink_tokens, shared.sink_tokens) == (1, 0)
    assert "sink_tokens" not in (kept.checkpoint / "config.json").read_text()
    assert not (kept.checkpoint / SINK_SCALES).exists()
    static = quantized(folder, tmp_path / "static", "auto", "a8w8", methods=(GPTQSpec(),))
    assert (
        static.sink_tokens == 0
    )  # its inputs are like others', too, and need no scale of their own
    ids = tokens(1).sequences()[0][:1]
    exact, *found = (engine_of(f).score(ids) for f in (folder, kept.checkpoint, shared.checkpoint))
    ours, theirs = ((logits - exact).square().sum() for logits in found)
    assert ours < theirs / 2


def test_a_later_token_is_an_event_where_a_static_scale_meets_it(sink_model, tmp_path):
    data = tokens()
    data.ids[:, 5] = FIRST
    found = dict[str, set[str]]()
    for scheme in ("a8w8c8", "a8w8_dynamic", "w4"):
        plan = make_plan(sink_model, tmp_path / scheme, scheme, methods=(GPTQSpec(),))
        events = quantize_tokens(plan, data, progress=False).events
        found[scheme] = {e.module for e in events if e.kind == "outlier_token"}
    assert found == {"a8w8c8": {DOWN}, "a8w8_dynamic": set(), "w4": set()}


def test_damaged_checkpoints_are_refused(both, tmp_path):
    folder = both["auto"].checkpoint
    for change, message in (
        ("gone", "sink_scales.safetensors is missing"),
        ("more", "sink tokens"),
    ):
        copy = shutil.copytree(folder, tmp_path / change)
        (copy / "quant" / "manifest.json").unlink()
        if change == "gone":
            (copy / "quant" / "sink_scales.safetensors").unlink()
        else:
            config = json.loads((copy / "config.json").read_text())
            del config["ptq"]["sink_tokens"]
            (copy / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(copy)
