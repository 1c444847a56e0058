"""A quantized head: solved after the blocks, stored once where it is the embedding, too, and run."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, RecipeError
from inference.cpu.backend import CpuBackend
from inference.engine import Engine
from inference.models.decoder import Decoder
from ptq.convert.convert import convert
from ptq.methods.gptq import GPTQSpec
from ptq.methods.hqq import HQQSpec
from ptq.methods.rotation import RotationSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.two_sided import TwoSidedSpec
from ptq.methods.untie import UntieSpec
from ptq.pipeline import driver, resume
from ptq.pipeline.artifact import Artifact
from ptq.pipeline.driver import solve
from ptq.plan import modules
from tests.fake_quantized import dequantized, fake_quantized_logits
from tests.families import distance, transformers_logits
from tests.ptq.quantizing import SMOOTH, executed, make_plan, quantize_head, weight_bytes

RTN = (RTNSpec(),)
IDS = torch.arange(3, 40)


def decoder(engine: Engine) -> Decoder:
    assert isinstance(engine.model, Decoder)
    return engine.model


@pytest.mark.parametrize("of_head", ["w8", "w4", "a8w8_dynamic", "a8w8", "fp8_channel"])
def test_a_tied_head_is_stored_once_and_run_as_head_and_embedding(tiny_llama, tmp_path, of_head):
    checkpoint = quantize_head(tiny_llama, tmp_path / "out", of_head=of_head)
    assert checkpoint.shares_head
    assert "model.embed_tokens.weight" not in checkpoint
    engine = Engine.from_pretrained(checkpoint.path)
    logits = engine.score(IDS)
    by_ops = Engine(checkpoint, engine.tokenizer, engine.config, CpuBackend(fused=False))
    assert torch.equal(logits, by_ops.score(IDS))
    assert torch.equal(decoder(engine).embed(IDS), dequantized(checkpoint, "lm_head")[IDS])
    wanted = fake_quantized_logits(checkpoint, IDS)
    assert distance(logits, wanted) < 0.02


def test_the_embedding_is_not_held_beside_the_head(tiny_llama, tmp_path):
    tied = Engine.from_pretrained(quantize_head(tiny_llama, tmp_path / "a").path)
    kept = Engine.from_pretrained(
        quantize_head(tiny_llama, tmp_path / "b", ignore=("lm_head",), layers={}).path
    )
    own = decoder(tied).head.nbytes
    assert decoder(tied).embedding is None
    assert kept.model.weight_bytes - tied.model.weight_bytes > own  # float once, and bf16 beside it


def test_an_untied_head_is_one_that_transformers_reads(tiny_llama, tmp_path):
    pytest.importorskip("compressed_tensors")
    untied = quantize_head(tiny_llama, tmp_path / "out", methods=(UntieSpec(), *RTN))
    assert not untied.shares_head
    assert untied.config["tie_word_embeddings"] is False
    ours = Engine.from_pretrained(untied.path).score(IDS)
    theirs = transformers_logits(untied.path, IDS)
    assert distance(ours, theirs) < 1e-3
    tied = quantize_head(tiny_llama, tmp_path / "tied")
    assert torch.equal(tied.weight("lm_head").q, untied.weight("lm_head").q)
    with pytest.raises(ValueError, match="tied_channel"):
        AutoModelForCausalLM.from_pretrained(tied.path, dtype=torch.float32)


@pytest.mark.parametrize("method", [GPTQSpec(), HQQSpec(), RTNSpec(scale="mse")])
def test_pieces_of_rows_are_solved_as_the_whole(tiny_llama, tmp_path, monkeypatch, method):
    whole = quantize_head(tiny_llama, tmp_path / "whole", of_head="w4", methods=(method,))
    monkeypatch.setattr(modules, "PIECE", 256 * 128)
    cut = quantize_head(tiny_llama, tmp_path / "cut", of_head="w4", methods=(method,))
    for name in ("lm_head.weight_packed", "lm_head.weight_scale"):
        assert torch.equal(whole.tensor(name), cut.tensor(name))
    tables = [c.scale_table and c.scale_table.get("lm_head", "weight") for c in (whole, cut)]
    assert tables[0] is not None
    assert tables[1] is not None
    assert tables[0].shape == tables[1].shape == (384, 1)
    assert tables[1].clip_fraction == pytest.approx(tables[0].clip_fraction)
    assert tables[1].sqnr_db == pytest.approx(tables[0].sqnr_db, rel=1e-4)


def test_gptq_of_the_head_loses_less_than_rounding(tiny_llama, tmp_path):
    plan = make_plan(
        tiny_llama, tmp_path / "o", "w4", methods=(GPTQSpec(),), ignore=(), layers={"lm_head": "w4"}
    )
    result = executed(plan)
    row = next(row for row in result.modules if row.module == "lm_head")
    assert row.output_sqnr_db is not None
    assert row.baseline_output_sqnr_db is not None
    assert row.output_sqnr_db > row.baseline_output_sqnr_db + 0.5
    assert [block.block for block in result.blocks][-1] == "lm_head"


def test_a_head_is_solved_again_from_what_a_run_kept(tiny_llama, tmp_path):
    first = quantize_head(tiny_llama, tmp_path / "run", of_head="w4", methods=(GPTQSpec(),))
    artifact = Artifact.load(tmp_path / "run")
    options = {"methods": (GPTQSpec(),), "ignore": (), "layers": {"lm_head": "w4"}}
    again = solve(make_plan(tiny_llama, tmp_path / "again", "w4", **options), artifact)
    found = Checkpoint.open(again.checkpoint)
    for name in first.names():
        assert torch.equal(found.tensor(name), first.tensor(name)), name


def test_a_head_is_what_a_recipe_leaves_alone_unless_it_says_otherwise(tiny_llama, tmp_path):
    plan = make_plan(tiny_llama, tmp_path / "out", "w4", methods=RTN)
    assert plan.head is None
    plan = make_plan(tiny_llama, tmp_path / "out", "w4", methods=RTN, ignore=())
    assert (plan.head, plan.shared) == ("lm_head", "model.embed_tokens.weight")
    assert plan.schemes["lm_head"] == plan.recipe.scheme.of_layers
    with pytest.raises(RecipeError, match="per_tensor does not fit lm_head"):
        make_plan(tiny_llama, tmp_path / "out", "fp8_tensor", methods=RTN, ignore=())


def test_the_prediction_is_what_is_written(tiny_llama, tmp_path):
    for name, methods in (("tied", RTN), ("untied", (UntieSpec(), *RTN))):
        options = {"methods": methods, "ignore": (), "layers": {"lm_head": "w8"}}
        plan = make_plan(tiny_llama, tmp_path / name, "w4", **options)
        executed(plan)
        assert plan.prediction.checkpoint_bytes == weight_bytes(tmp_path / name / "checkpoint")


def test_a_tied_head_is_made_float_again_and_converted_to_nothing_else(tiny_llama, tmp_path):
    tied = quantize_head(tiny_llama, tmp_path / "out", of_head="w4")
    convert(tied.path, tmp_path / "float", "float", dtype="float32", progress=False)
    made = Checkpoint.open(tmp_path / "float")
    assert "lm_head.weight" not in made
    assert torch.equal(made.tensor("model.embed_tokens.weight"), dequantized(tied, "lm_head"))
    with pytest.raises(CheckpointError, match="lm_head, which is the embedding, too"):
        convert(tied.path, tmp_path / "gptq", "gptq", progress=False)


def test_an_untied_head_goes_through_gptq_s_layout(tiny_llama, tmp_path):
    untied = quantize_head(tiny_llama, tmp_path / "out", of_head="w4", methods=(UntieSpec(), *RTN))
    convert(untied.path, tmp_path / "gptq", "gptq", progress=False)
    there = Engine.from_pretrained(tmp_path / "gptq")
    assert "lm_head" in there.checkpoint.quantized_modules
    assert torch.equal(there.checkpoint.weight("lm_head").q, untied.weight("lm_head").q)
    convert(tmp_path / "gptq", tmp_path / "back", "compressed_tensors", progress=False)
    back = Checkpoint.open(tmp_path / "back")
    assert torch.equal(back.weight("lm_head").q, untied.weight("lm_head").q)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_heads_of_families_that_are_not_declared(make_model, tmp_path, family):
    model = make_model(family, layers=1)
    checkpoint = quantize_head(model, tmp_path / "out", "w8", "a8w8_dynamic")
    wanted = fake_quantized_logits(checkpoint, IDS)
    found = Engine.from_pretrained(checkpoint.path).score(IDS)
    assert distance(found, wanted) < 0.02


@pytest.mark.parametrize(
    ("scheme", "of_head", "methods"),
    [
        ("a8w8c8", "a8w8", SMOOTH),
        ("w4", "w8", (RotationSpec(), GPTQSpec())),
        ("w8", "mxfp4", RTN),
        ("w8", "nvfp4", RTN),
        ("fp8_block", "fp8_block", RTN),
    ],
)
def test_heads_beside_other_methods_and_formats(tiny_llama, tmp_path, scheme, of_head, methods):
    checkpoint = quantize_head(tiny_llama, tmp_path / "out", scheme, of_head, methods=methods)
    assert checkpoint.shares_head is (not isinstance(methods[0], RotationSpec))
    found = Engine.from_pretrained(checkpoint.path).score(IDS)
    wanted = fake_quantized_logits(checkpoint, IDS)
    assert distance(found, wanted) < 0.03


def test_a_head_that_is_ignored_takes_no_scheme(tiny_llama, tmp_path):
    with pytest.raises(RecipeError, match="'lm_head' matches only layers that stay in float"):
        make_plan(tiny_llama, tmp_path / "o", "w4", methods=RTN, layers={"lm_head": "w8"})


def test_a_head_is_rounded_against_the_model(tiny_llama, tmp_path, monkeypatch):
    """Its gradients are those of the predictions; pieces of rows have a part of them each."""
    options = {"methods": (TwoSidedSpec(),), "of_head": "w4"}
    whole = quantize_head(tiny_llama, tmp_path / "whole", **options)
    monkeypatch.setattr(modules, "PIECE", 256 * 128)
    cut = quantize_head(tiny_llama, tmp_path / "cut", **options)
    plain = quantize_head(tiny_llama, tmp_path / "plain", of_head="w4")
    source = Checkpoint.open(tiny_llama).tensor("model.embed_tokens.weight").float()
    assert not torch.equal(whole.weight("lm_head").q, plain.weight("lm_head").q)
    errors = [
        (dequantized(c, "lm_head") - source).norm() / source.norm() for c in (whole, cut, plain)
    ]
    assert max(errors) < 0.2


def test_a_run_that_was_stopped_before_its_head_goes_on_there(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "SHARE", 1e9)  # states of every block, however little time it took
    whole = quantize_head(tiny_llama, tmp_path / "whole", methods=(GPTQSpec(),))
    options = {"methods": (GPTQSpec(),), "ignore": (), "layers": {"lm_head": "w8"}}
    plan, solved = make_plan(tiny_llama, tmp_path / "out", "w4", **options), driver.solve_head

    def stop(solver):
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "solve_head", stop)
    with pytest.raises(KeyboardInterrupt):
        executed(plan)
    monkeypatch.setattr(driver, "solve_head", solved)
    for blocks in (2, 3):  # all of them but the head; all of them, and nothing is solved again
        result = executed(plan, force=True, keep=True)
        assert result.resumed_blocks == blocks
        found = Checkpoint.open(result.checkpoint)
        for name in whole.names():
            assert torch.equal(found.tensor(name), whole.tensor(name)), name
