"""The GPU's engine without a GPU: its kernels interpreted, in fp16, its loop as it is."""

import gc
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from formats.cache_scheme import KVCacheSpec
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, EngineError
from inference.bench.random_model import random_checkpoint
from inference.bench.shapes import SHAPES
from inference.config import EngineConfig
from inference.cpu.backend import CpuBackend
from inference.engine import Engine
from inference.gpu import decoder, execute, layers
from inference.gpu.backend import TritonBackend
from inference.gpu.graphs import StepGraph, StepGraphs
from inference.gpu.runner import Launched
from inference.gpu.sizes import Size
from inference.requests.request import SamplingParams
from kernels.triton import common
from kernels.triton.attention import paged_cache
from kernels.triton.common import Workspace
from kernels.triton.linear import dispatch
from kernels.triton.linear.w16a16 import DenseWeight
from tests.experts import MOE
from tests.families import but_in_ci
from tests.inference.engines import finish
from tests.inference.engines import ids as prompt
from tests.inference.speculate.test_wrong_drafts import InPlaceOf
from tests.kernels.triton_lab import distance, interpreted
from tests.older_families import write_older
from tests.ptq.quantizing import quantize_head
from tests.tiny_families import DEEPSEEK, TINY

SCHEMES = [
    "float", "w8", "w4", "a8w8c8", "a8w8c8_dynamic", "a8w4c8", "fp8_c8", "fp8_block", "c8_fp8",
]  # fmt: skip
SCHEMES += ["a8w4c4_two_level"]
# Few steps of a scale, or of e4m3's bits.
COARSE = ("a8w4c4_two_level", "a8w8c8", "a8w4c8", "fp8_c8", "fp8_block")
SHAPE = SHAPES["llama-1.1b"] | {
    "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 256, "vocab_size": 384, "max_position_embeddings": 512,
}  # fmt: skip


def checkpoint_of(folder: Path, scheme: str, **overrides) -> str:
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(SHAPE | overrides))
    head = scheme not in ("float", "c8", "c8_fp8", "c4")
    return str(random_checkpoint(folder, str(folder / "shape"), scheme, quantize_head=head))


def engine_of(path: str, dtype=torch.float16, *, triton: bool = True, **config):
    on_gpu = TritonBackend(torch.device("cpu"), dtype)
    return Engine(
        Checkpoint.open(path),
        AutoTokenizer.from_pretrained(path),
        EngineConfig(**({"max_model_len": 192, "max_batch_size": 4} | config)),
        on_gpu if triton else CpuBackend(),
    )


@pytest.mark.parametrize("scheme", SCHEMES)
@interpreted
def test_logits_are_those_of_the_cpu(tmp_path, scheme):
    path = checkpoint_of(tmp_path, scheme)
    compare(path, 0.1 if scheme in COARSE else 0.03)


@interpreted
def test_steps_that_are_not_captured_are_replayed_kernel_by_kernel(tmp_path):
    """Rows for nobody, which leave the cache as it is."""
    engine = engine_of(checkpoint_of(tmp_path, "a8w8c8"))
    before = [pool.k.clone() for pool in engine.pools]
    engine.loop.replay(2, 2)
    assert all(torch.equal(pool.k, k) for pool, k in zip(engine.pools, before, strict=True))


@pytest.mark.parametrize("experts", [False, True])
@interpreted
def test_rows_of_sink_tokens_have_scales_of_their_own(
    tmp_path, make_model, make_quantized, experts
):
    """Inputs of two tokens have a scale that leaves them few steps, on both devices."""
    if experts:
        source = make_quantized(make_model("qwen3_moe", **MOE["qwen3_moe"]), "a8w8")
        path = str(shutil.copytree(source, tmp_path / "checkpoint"))
    else:
        path = checkpoint_of(tmp_path, "a8w8")
    with_sinks(Path(path))
    compare(path, 0.1 if experts else 0.05)  # a router that hardly knows may choose another expert
    sinks_matter(path)


def with_sinks(folder: Path) -> None:
    """Give a checkpoint two sink tokens, whose scales are eight times those of all others."""
    scales = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if name.endswith(".input_scale"):
                scales[name.replace(".input_scale", ".input_sink_scale")] = 8 * tensor
    (folder / "quant").mkdir(exist_ok=True)
    for name in ("manifest.json", "scale_table.json"):
        (folder / "quant" / name).unlink(missing_ok=True)
    save_file(scales, folder / "quant" / "sink_scales.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["ptq"] = {"kv_cache": None, **config.get("ptq", {}), "sink_tokens": 2}
    (folder / "config.json").write_text(json.dumps(config))


def sinks_matter(path: str):
    ids = torch.tensor(prompt(5))
    found = engine_of(path).score(ids)
    config = json.loads((Path(path) / "config.json").read_text())
    del config["ptq"]["sink_tokens"]
    (Path(path) / "config.json").write_text(json.dumps(config))
    (Path(path) / "quant" / "sink_scales.safetensors").unlink()
    assert not torch.allclose(engine_of(path).score(ids)[:2], found[:2], atol=1e-3)


@pytest.mark.parametrize("scheme", but_in_ci(["c8", "c4"], "c8"))
@interpreted
def test_keys_and_values_of_sink_tokens_are_cached_as_floats(tmp_path, scheme):
    path = checkpoint_of(tmp_path, scheme)
    with_sinks(Path(path))
    compare(path, 0.1)
    ids, params = prompt(70), SamplingParams(max_tokens=2, ignore_eos=True)
    engine = engine_of(path)
    assert engine.pools[0].sink_tokens == 2
    first, again = (engine.generate([ids], params)[0] for _ in "ab")
    assert engine.stats().hit_tokens == 64
    assert again.token_ids == first.token_ids
    sinks_matter(path)


@interpreted
def test_sink_tokens_have_the_same_bits_in_any_chunks(tmp_path):
    path, ids = checkpoint_of(tmp_path, "a8w8c8_dynamic"), prompt(40)
    with_sinks(Path(path))
    whole = engine_of(path, invariant=True).score(ids)
    assert torch.equal(whole, engine_of(path, invariant=True, max_batched_tokens=30).score(ids))


@interpreted
def test_each_block_has_a_cache_of_its_own(tmp_path):
    path = checkpoint_of(tmp_path, "c4", num_hidden_layers=3)
    turned = KVCacheSpec(value_dtype="int4", granularity="per_token_head", rotate_keys=True)
    given, own = Checkpoint.kv_scheme_of, {"1": None, "2": turned}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Checkpoint,
            "kv_scheme_of",
            lambda self, name: own.get(name.split(".")[2], given(self, name)),
        )
        held = [(pool.k.dtype, pool.v.dtype) for pool in engine_of(path).pools]
        assert held == [
            (torch.uint8, torch.uint8),
            (torch.float16, torch.float16),
            (torch.int8, torch.uint8),
        ]
        compare(path, 0.1)


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_c8", "fp8_block"])
@interpreted
def test_e4m3_before_ada_runs_dequantized(tmp_path, scheme):
    path = checkpoint_of(tmp_path, scheme)
    fp8_cache = scheme == "fp8_c8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "capability", lambda: 80)
        for module in (decoder, dispatch, paged_cache):
            patch.setattr(module, "has_e4m3", lambda device: False)
        if fp8_cache:
            with pytest.raises(EngineError, match="use an int8 cache"):
                engine_of(path)
            return
        compare(path, 0.1)


FAMILIES = {  # one that has each part; all of them run in tests/gpu
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 16},
    "olmo2": {},
    "phi3": {"head_dim": 48},
    **{kind: TINY[kind] for kind in ("gemma2", "gemma3_text", "granite", "ministral3")},
    **dict(DEEPSEEK[kind] for kind in ("v2_lite", "v3")),
}
# What is quantized comes after a norm of a sum, or after none.
QUANTIZED = [("gemma2", "a8w8c8"), ("olmo2", "a8w8c8_dynamic"), ("deepseek_v3", "a8w8c8")]


@pytest.mark.parametrize(
    ("family", "preset"), [*((family, None) for family in FAMILIES), *QUANTIZED]
)
@interpreted
def test_families(make_model, make_quantized, family, preset):
    layers = 2 if family == "gemma3_text" else 1
    folder = make_model(family, layers=layers, tie_word_embeddings=False, **FAMILIES[family])
    compare(str(make_quantized(folder, preset)), 0.1 if preset else 0.03)


@interpreted
def test_biases_by_distance(tmp_path):
    compare(str(write_older(tmp_path, "falcon_alibi", num_hidden_layers=1)), 0.03)


@interpreted
def test_a_tied_head_and_its_embedding_are_held_once(make_model):
    path = str(make_model("llama", layers=1))
    compare(path, 0.03)
    model = engine_of(path).model
    layer = model.layers[0]
    others = (layer.qkv, layer.o, layer.feed_forward)
    assert model.embedding is model.head.matrix
    assert model.weight_bytes == model.embedding.nbytes + sum(part.nbytes for part in others)


def compare(path: str, tolerance: float):
    tokens = prompt(40)
    wanted = on_cpu(path, tokens)
    for config in ({}, {"max_batched_tokens": 30}):  # whole, and in chunks
        assert distance(engine_of(path, **config).score(tokens), wanted) < tolerance


def on_cpu(path: str, tokens: list[int], **config) -> torch.Tensor:
    """Logits of a text by the other backend."""
    return engine_of(path, triton=False, **config).score(tokens)


def run(path: str, requests: list, *, eager: bool, **config) -> list:
    """Tokens and reasons of requests (prompt, parameters); all arrive at once."""
    engine = engine_of(path, eager=eager, **config)
    names = [engine.add_request(p, SamplingParams(**params)) for p, params in requests]
    found = finish(engine)
    return [(found[name].token_ids, found[name].finish_reason) for name in names]


@interpreted
def test_logits_of_a_text_stay_where_the_model_runs(tmp_path):
    engine = engine_of(checkpoint_of(tmp_path, "float"))
    moved = AssertionError("logits were brought to the host")
    with patch.object(Launched, "logits_of", side_effect=moved):
        logits = engine.score(prompt(20))
        kept = logits.clone()
        engine.score(prompt(9))
    assert torch.equal(logits, kept), "a step writes over none that were given away"


@interpreted
def test_what_attention_does_not_take_is_refused_at_once(tmp_path):
    path = checkpoint_of(tmp_path, "float", head_dim=520)
    with pytest.raises(CheckpointError, match="heads of 520 .* GPUs run up to 512"):
        engine_of(path)
    assert torch.isfinite(on_cpu(path, prompt(5))).all()


@pytest.mark.parametrize(
    ("scheme", "channels", "held"), [("a8w8c8", 32, torch.int8), ("c4", 16, torch.uint8)]
)
@interpreted
def test_what_the_fast_path_refuses_runs_by_transformers_code(tmp_path, scheme, channels, held):
    """Heads of 24 channels lie in the cache as heads of 32; for an int4 cache keys are turned."""
    path = checkpoint_of(tmp_path, scheme, head_dim=24)
    engine = engine_of(path)
    assert type(engine.model).__name__ == "CodeModel"
    assert engine.pools[0].k.shape[3] == channels
    assert engine.pools[0].k.dtype == held
    assert distance(engine.score(prompt(20)), on_cpu(path, prompt(20))) < 0.1


@interpreted
def test_steps_ahead_give_the_tokens_of_steps_one_by_one(tmp_path):
    path = checkpoint_of(tmp_path, "a8w8c8")
    requests = [
        (prompt(9, 1), {"max_tokens": 5, "ignore_eos": True}),
        (prompt(70, 2), {"max_tokens": 1, "ignore_eos": True}),  # ends with its prompt
        (prompt(5, 3), {"max_tokens": 7, "temperature": 0.9, "seed": 3, "ignore_eos": True}),
        (prompt(3, 4), {"max_tokens": 4, "top_k": 5, "top_p": 0.8, "temperature": 1.0, "seed": 8}),
        (prompt(20, 5), {"max_tokens": 3, "ignore_eos": True}),  # waits for a place
    ]
    wanted = run(path, requests, eager=True)
    assert [len(tokens) for tokens, _ in wanted[:3]] == [5, 1, 7]
    assert run(path, requests, eager=False) == wanted
    assert run(path, requests, eager=False, max_batched_tokens=16) == wanted
    few = run(path, requests, eager=False, kv_blocks=3)  # some give way and start over
    assert few == wanted
    stop = wanted[0][0][2]  # found out when a step more is on its way
    requests[0][1]["stop_token_ids"] = (stop,)
    found = run(path, requests, eager=False)
    first = wanted[0][0].index(stop)
    assert found[0] == (wanted[0][0][: first + 1], "stop")
    assert found[1:] == wanted[1:]


@interpreted
def test_what_needs_logits_is_chosen_on_the_host(tmp_path):
    path = checkpoint_of(tmp_path, "float")
    engine, tokens = engine_of(path), prompt(9, 1)
    plain = engine.generate([tokens], SamplingParams(max_tokens=6, ignore_eos=True))[0]
    told = engine.generate(
        [tokens, prompt(4, 2)],
        [
            SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1),
            SamplingParams(max_tokens=8, ignore_eos=True),
        ],
    )
    assert told[0].token_ids == plain.token_ids
    for token, logprobs in zip(plain.token_ids, told[0].logprobs, strict=True):
        assert max(logprobs, key=logprobs.get) == token
    assert len(told[0].prompt_logprobs) == len(tokens)
    once = SamplingParams(
        max_tokens=6, ignore_eos=True, frequency_penalty=2.0, presence_penalty=2.0
    )
    output = engine.generate([tokens], once)[0]
    assert len(set(output.token_ids)) == 6
    never = SamplingParams(max_tokens=6, stop_token_ids=tuple(plain.token_ids[:1]), min_tokens=4)
    output = engine.generate([tokens], never)[0]
    assert plain.token_ids[0] not in output.token_ids[:4]


@pytest.mark.parametrize("scheme", ["float", "w4", "a8w8c8", "a8w8c8_dynamic"])
@interpreted
def test_numbers_that_are_not_finite_end_a_request(tmp_path, scheme):
    """Integers between them hide none, though the largest of a row may not see them."""
    path = checkpoint_of(tmp_path, scheme)
    engine, params = engine_of(path), SamplingParams(max_tokens=2, ignore_eos=True)
    engine.model.embedding[prompt(5)[4], 3] = float("nan")
    broken, other = engine.generate([prompt(5), prompt(5)[:4]], params)
    assert broken.finish_reason == "error"
    assert "NaN or infinity" in broken.error
    assert other.finish_reason == "length"
    engine.check_integrity()


@pytest.mark.parametrize("triton", [False, True])
@interpreted
def test_what_a_request_that_failed_left_in_the_cache_harms_no_other(tmp_path, triton):
    """0 times NaN is NaN: pages have room behind a sequence's last token."""
    path = checkpoint_of(tmp_path, "float")
    engine = engine_of(path, triton=triton, kv_blocks=3, max_batched_tokens=100)
    params = SamplingParams(max_tokens=3)
    wanted = engine.generate([prompt(5)], params)[0].token_ids
    broken = prompt(150)
    engine.model.embedding[broken[9]] = float("inf")
    assert engine.generate([broken], params)[0].finish_reason == "error"
    output = engine.generate([prompt(5)], params)[0]
    assert (output.token_ids, output.error) == (wanted, None)
    name = engine.add_request(broken, params)
    engine.step()
    engine.abort(name)
    assert all(torch.isfinite(engine.score(prompt(5))).all() for _ in range(3)), "in each block"
    assert not torch.isfinite(engine.score(broken)).all()
    assert torch.isfinite(engine.score(prompt(5))).all()


@interpreted
def test_what_a_wrong_draft_left_in_the_cache_harms_nobody(tmp_path):
    """Its K and V are not finite, and lie behind the last token of the sequence that rejects it."""
    path = checkpoint_of(tmp_path, "float")
    engine = engine_of(path, kv_blocks=4)
    poison, tokens = 77, [9, 8, 7]
    params = SamplingParams(max_tokens=7, ignore_eos=True, logit_bias={poison: -100.0})
    engine.model.embedding[poison] = float("inf")
    wanted = engine.generate([tokens], params)[0]
    assert wanted.finish_reason == "length"
    text = [*tokens, *wanted.token_ids]
    others = {len(tokens) + 1: poison, len(text) - 2: poison}  # also in the last step
    proposer = InPlaceOf(text, others, follows=False)
    engine.speculate_by(proposer, 2)
    found = engine.generate([tokens], params)[0]
    assert (found.token_ids, found.finish_reason) == (wanted.token_ids, "length")
    assert proposer.proposed == 3
    assert engine.stats().preemptions > 0
    engine.speculate_by(None)
    assert all(torch.isfinite(engine.score(prompt(5))).all() for _ in range(4)), "in each block"
    engine.check_integrity()


@interpreted
def test_prompts_without_memory_for_a_graph_run_all_the_same(tmp_path):
    path = checkpoint_of(tmp_path, "w8")
    engine, params = engine_of(path), SamplingParams(max_tokens=1)
    wanted = engine.generate([prompt(20)], params)[0].token_ids
    engine.loop.runner.graphs.enabled = True
    full = RuntimeError("CUDA error: out of memory\nSearch for ...")  # the driver's
    with (
        patch.object(StepGraphs, "_capture", side_effect=full) as capture,
        patch.object(logging.Logger, "warning") as warning,
    ):
        for _ in range(4):
            assert engine.generate([prompt(20)], params)[0].token_ids == wanted
        assert capture.call_count == warning.call_count == 1
        with pytest.raises(EngineError, match="memory is too small: warming up found no more"):
            engine.warm_up()  # decodes have to have their graphs
    assert "no memory for the CUDA graph" in warning.call_args.args[0]
    engine.check_integrity()


@interpreted
def test_warming_up_goes_on_without_memory_for_prompts(tmp_path):
    path = checkpoint_of(tmp_path, "w8")
    asked: list[Size] = []

    def capture(self, size, steps):
        asked.append(size)
        if size.prompts:
            raise torch.OutOfMemoryError("full")
        return StepGraph(Mock(), Mock())

    engine = engine_of(path, max_batched_tokens=40)
    engine.loop.runner.graphs.enabled = True
    with patch.object(StepGraphs, "_capture", capture):
        engine.warm_up()
    assert [size.decodes for size in asked if not size.prompts] == [4, 2, 1]
    assert {size.tokens for size in asked if size.prompts} == {16, 32, 48}
    assert {size.decodes for size in asked if size.prompts} == {0, 1, 2, 4}
    assert engine.loop.runner.graphs.short == {size for size in asked if size.prompts}


@interpreted
def test_a_workspace_lives_as_long_as_the_engines_that_use_it(tmp_path):
    path = checkpoint_of(tmp_path, "w8")
    gc.collect()  # engines of tests before
    with patch.object(Workspace, "on", wraps=Workspace.on) as make:
        first, second = engine_of(path), engine_of(path)
        for engine in (first, second, first):
            engine.generate([prompt(2)], SamplingParams(max_tokens=1))
    assert make.call_count == 1
    del first, engine
    gc.collect()
    assert len(layers._workspaces) == 1
    del second
    gc.collect()
    assert not layers._workspaces


@interpreted
def test_steps_run_on_the_device_of_their_model(tmp_path):
    """Triton launches on the current one."""
    path = checkpoint_of(tmp_path, "w8")
    inside: list[torch.device] = []
    run_blocks, seen = execute.run_blocks, []

    @contextmanager
    def current(device):
        inside.append(device)
        yield
        inside.pop()

    def run(*args):
        seen.append(list(inside))
        return run_blocks(*args)

    engine = engine_of(path)
    with patch.object(execute, "launches_on", current), patch.object(execute, "run_blocks", run):
        engine.generate([prompt(20)], SamplingParams(max_tokens=3, ignore_eos=True))
        engine.score(prompt(3))
    assert len(seen) == 4
    assert all(devices == [engine.backend.device] for devices in seen)


@pytest.mark.parametrize(
    ("of_head", "hidden"),
    [
        *((layout, 128) for layout in ("w8", "w4", "a8w8_dynamic", "fp8_channel", "a8w4")),
        ("w8", 192),
    ],
)
@interpreted
def test_a_quantized_head_that_is_the_embedding(make_model, tmp_path, of_head, hidden):
    """Its 1,000 outputs are no multiple of a tile's, 192 inputs neither; no rows of a8w4's are
    gathered."""
    folder = make_model("llama", layers=1, vocab_size=1000, hidden_size=hidden)
    path = str(quantize_head(folder, tmp_path / "out", "w8", of_head).path)
    compare(path, 0.1 if of_head in ("fp8_channel", "a8w4") else 0.03)
    model, other = (engine_of(path, triton=triton).model for triton in (True, False))
    assert (model.embedding is None) is (of_head != "a8w4")
    assert model.head.outputs == 1000
    numbers = torch.tensor([0, 63, 64, 127, 999, 5])
    assert torch.equal(model.embed(numbers), other.embed(numbers).to(model.dtype))


ODD = {"hidden_size": 96, "head_dim": 32, "num_attention_heads": 3, "intermediate_size": 160}


@pytest.mark.parametrize("scheme", ["a8w8c8", "w8"])
@interpreted
def test_odd_sizes_run_on_kernels(scheme, tmp_path):
    """96 and 160 inputs are no multiples of 128, 160 outputs none of 64: tiles are filled up."""
    path = checkpoint_of(tmp_path, scheme, **ODD, num_key_value_heads=1)
    compare(path, 0.03)
    with logged() as lines:
        block = engine_of(path).model.layers[0]
    linear = (block.qkv, block.o, block.feed_forward.gate_up, block.feed_forward.down)
    assert not any(isinstance(layer.weight, DenseWeight) for layer in linear)
    assert not lines


@interpreted
def test_what_runs_dequantized_is_logged_in_one_line(tmp_path):
    """However many layers there are: here no kernel takes any."""
    path = checkpoint_of(tmp_path, "a8w8_dynamic", **ODD, num_key_value_heads=3)
    with logged() as lines, patch.object(dispatch, "_packed", lambda *_: None):
        engine_of(path)
    (line,) = lines
    assert line.startswith("lm_head and 4 more: no GPU kernel takes int8 weights ")
    assert line.endswith(
        " of (384, 96), (288, 96), (96, 96), (320, 96), (96, 160); they run dequantized, with "
        "the same numbers"
    )


@contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that engines log inside."""
    lines: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("ptq.inference")
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
