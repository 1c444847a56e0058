"""The engine on a GPU: every recipe as accurate as on the CPU, graphs as steps one by one."""

from __future__ import annotations

import contextlib
import gc
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from calibrate.data import load_tokens
from formats.checkpoint.read import Checkpoint
from inference.accuracy import compare
from inference.backend import choose_backend
from inference.beam_search import BeamParams, beam_search
from inference.config import EngineConfig
from inference.engine import Engine
from inference.requests.constraint import Constraint
from inference.requests.request import SamplingParams
from ptq.commands.run import main
from ptq.recipe.reading import load_recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
SCHEMES = ["float", "w4c8", "w8", "a8w8c8", "a8w8c8_dynamic", "a8w4c8", "fp8_c8", "fp8_block"]
SCHEMES += ["c4", "k8v4", "a8w4c4_two_level"]
SMALLER = ("dataset.calibration.samples=32", "dataset.evaluation.samples=32", "report.speed=false")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_end_to_end(name, tmp_path, monkeypatch):
    """Quantized, measured on the GPU, and as accurate there as on the CPU."""
    monkeypatch.chdir(tmp_path)
    recipe = ROOT / "recipes" / f"{name}.yaml"
    settings = [*SMALLER, f"output.path={tmp_path / 'run'}", "report.device=cuda"]
    if name not in ("a8w8c8", "w4_rotated"):  # which parts are measured for is alike for all
        settings.append("report.attribution=false")
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert main([str(recipe), *arguments]) in (0, 1)  # 1: thresholds are for all of the data
    loaded = load_recipe(recipe)
    source = loaded.model.path
    tokenizer = AutoTokenizer.from_pretrained(source)
    sequences = load_tokens(loaded.dataset, tokenizer, "evaluation").sequences()[:16]
    found = {}
    for device in ("cpu", "cuda"):
        pair = [
            Engine.from_pretrained(path, device=device, config=EngineConfig(max_model_len=512))
            for path in (source, tmp_path / "run" / "checkpoint")
        ]
        found[device] = compare(*pair, sequences)
    cpu, gpu = found["cpu"], found["cuda"]
    print(
        f"\n{name}: KL cpu {cpu.kl_mean:.4f} gpu {gpu.kl_mean:.4f}, ratio cpu "
        f"{cpu.perplexity_ratio:.4f} gpu {gpu.perplexity_ratio:.4f}"
    )
    assert gpu.kl_mean < 1.1 * cpu.kl_mean + 1e-3
    assert abs(gpu.perplexity_ratio - cpu.perplexity_ratio) < 0.01


CASES = [(shape, scheme) for shape in ("small", "mixture") for scheme in SCHEMES]
OF_SHAPE = pytest.mark.parametrize(("shape", "scheme"), CASES)
MIXTURE = {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "shared_expert_intermediate_size": 512,
}


ODD = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
ODD |= {"intermediate_size": 1536}  # SmolLM2-135M's sizes, which tiles do not divide


def random_engine(shape: str, scheme: str, device: str = "cuda", **config) -> Engine:
    from inference.bench.random_model import RandomCheckpoint, random_tokenizer
    from inference.bench.shapes import SHAPES

    SHAPES["small"] = SHAPES["llama-3-8b"] | {"num_hidden_layers": 2, "vocab_size": 4096}
    SHAPES["odd"] = SHAPES["small"] | ODD
    SHAPES["mixture"] = {k: v for k, v in SHAPES["small"].items() if k != "head_dim"} | MIXTURE
    checkpoint = RandomCheckpoint(shape, scheme, device, quantize_head=scheme != "float")
    plain = {"max_model_len": 1024, "max_batch_size": 16, "prefix_cache": False}  # equal runs
    sizes = EngineConfig(**(plain | config))
    return Engine(checkpoint, random_tokenizer(4096), sizes, choose_backend(device, checkpoint))


@OF_SHAPE
def test_graphs_give_the_tokens_of_steps_one_by_one(shape, scheme):
    """As long as none waits for a place: then both run the same batches."""
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(4096, (int(n),), generator=generator).tolist()
        for n in torch.randint(1, 400, (16,), generator=generator)
    ]
    params = [
        SamplingParams(max_tokens=8 + i, ignore_eos=True, temperature=0.8 * (i % 2), seed=i)
        for i in range(len(prompts))
    ]
    tokens = []
    for eager in (True, False):
        engine = random_engine(shape, scheme, eager=eager, max_batched_tokens=512)
        tokens.append([out.token_ids for out in engine.generate(prompts, params)])
        engine.check_integrity()
        del engine
        torch.cuda.empty_cache()
    assert tokens[0] == tokens[1]
    assert [len(own) for own in tokens[0]] == [8 + i for i in range(len(prompts))]


def test_constraints_biases_and_min_p_in_graphs_are_those_of_steps_one_by_one():
    """Beside requests that ask for none of it, and get what they get alone with their kind."""
    pytest.importorskip("xgrammar")
    schema = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 2, "maxItems": 4}
    constraint = Constraint.json_schema(schema)
    kinds = [
        {},
        {"constraint": constraint, "max_tokens": 200},
        {"logit_bias": {7: 100.0, 9: -100.0}, "min_tokens": 5},
        {"min_p": 0.2, "temperature": 1.5},
        {"constraint": constraint, "temperature": 1.0, "min_p": 0.01, "max_tokens": 200},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05},
    ]
    params = [
        SamplingParams(**({"max_tokens": 24, "seed": i, "ignore_eos": True} | kind))
        for i, kind in enumerate(kinds)
    ]
    found, grammars = [], None
    for eager in (True, False):
        sizes = EngineConfig(max_model_len=512, eager=eager)
        engine = Engine.from_pretrained(
            ROOT / "recipes" / "tiny-python", device="cuda", config=sizes
        )
        engine._grammars = grammars or engine._grammars
        grammars = engine._grammars
        grammars.compile(constraint).result(60)  # so that both runs begin with the same batch
        found.append(engine.generate(["def add(a, b):"] * len(params), params))
        engine.check_integrity()
    for eager, graphs in zip(*found, strict=True):
        assert eager.token_ids == graphs.token_ids
    for constrained in (found[1][1], found[1][4]):
        assert constrained.finish_reason == "stop"
        assert set(json.loads(constrained.text)) <= {"red", "blue"}
    assert set(found[1][2].token_ids) == {7}


@pytest.mark.parametrize("scheme", ["float", "a8w8c8", "a8w8c8_dynamic", "fp8_c8"])
def test_what_is_found_in_the_cache_gives_the_logits_of_what_is_computed(scheme):
    """But for last bits: another number of rows share the step."""
    prompt, other = [(37 * i) % 4000 + 1 for i in range(300)], [5] * 200
    params = SamplingParams(max_tokens=1, logprobs=0, ignore_eos=True)
    engine = random_engine("small", scheme, prefix_cache=True)
    miss, _, hit = (engine.generate([p], params)[0] for p in (prompt, other, prompt))
    assert engine.stats().hit_tokens == 256
    first, second = (max(o.logprobs[0].values()) for o in (miss, hit))
    assert first == pytest.approx(second, abs=0.1)
    engine.check_integrity()


@pytest.mark.parametrize("scheme", ["float", "a8w8c8", "a8w8c8_dynamic", "fp8_c8"])
def test_beams_in_graphs_are_those_of_steps_one_by_one(scheme):
    """Forks share blocks that are partly filled, and get copies before they write."""
    prompts = [[7] * 65, list(range(1, 100)), [3]]
    params = BeamParams(beam_width=4, n=4, max_tokens=70, ignore_eos=True)
    found = []
    for eager in (True, False):
        engine = random_engine("small", scheme, eager=eager)
        found.append(beam_search(engine, prompts, params))
        engine.check_integrity()
        stats = engine.stats()
        assert stats.free + stats.cached == stats.total
    for one, other in zip(*found, strict=True):
        assert [h.token_ids for h in one] == [h.token_ids for h in other]
        assert [h.score for h in one] == pytest.approx([h.score for h in other], abs=1e-3)


@OF_SHAPE
def test_prompts_beside_decodes_run_in_graphs(shape, scheme):
    """The same requests again and again: at first steps run one by one, then they are replayed.

    Without prefix hits: these would leave fewer rows to compute, which differ in their last bits.
    """
    engine = random_engine(shape, scheme, max_batched_tokens=512, prefix_cache=False)
    turns = []
    for _ in range(3):
        tokens: dict[str, list[int]] = {}
        for i in range(6):
            params = SamplingParams(max_tokens=9 + i, ignore_eos=True, temperature=i % 2, seed=i)
            name = engine.add_request([(7 + i * j) % 4000 for j in range(60 * i + 2)], params)
            tokens[name] = []
            tokens |= {out.request_id: out.token_ids for out in engine.step()}
        while engine.has_unfinished:
            tokens |= {out.request_id: out.token_ids for out in engine.step()}
        turns.append(list(tokens.values()))
        engine.check_integrity()
    assert turns[0] == turns[1] == turns[2]
    assert [len(own) for own in turns[0]] == [9 + i for i in range(6)]
    assert sum(size.prompts > 0 for size in engine.loop.runner.graphs.captured) >= 3


@OF_SHAPE
def test_kernels_that_start_early_give_the_same_tokens(shape, scheme):
    """What a kernel reads is there, though it started before the kernel ahead had ended."""
    from kernels.triton.common import alone

    prompts = [[7 * i + j for j in range(40 * i + 1)] for i in range(8)]
    tokens = []
    for context in (contextlib.nullcontext, alone):
        engine = random_engine(shape, scheme)
        greedy = SamplingParams(max_tokens=100, ignore_eos=True)
        with context():
            tokens.append([out.token_ids for out in engine.generate(prompts, greedy)])
    assert tokens[0] == tokens[1]


def test_graphs_are_captured_again_after_all_were_given_up():
    """torch forgets the memory that graphs share with the last of them."""
    engine, prompt = random_engine("small", "a8w8c8"), [7] * 20
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    before = engine.generate([prompt], params)[0].token_ids
    graphs = engine.loop.runner.graphs
    assert graphs.captured
    graphs.forget()
    assert not graphs.captured
    assert engine.generate([prompt], params)[0].token_ids == before
    assert graphs.captured


@pytest.mark.parametrize("shape", ["small", "mixture"])
def test_steps_do_not_wait_for_the_host(shape, monkeypatch):
    """A decode step launches without one synchronization."""
    engine = random_engine(shape, "a8w8c8")
    assert engine.loop.runner.graphs.enabled
    for i in range(4):
        engine.add_request([5 + i] * 30, SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(6):
        engine.step()
    from inference.gpu import runner

    tokens = runner.Launched.tokens

    def allowed(self):
        torch.cuda.set_sync_debug_mode("default")
        try:
            return tokens(self)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(runner.Launched, "tokens", allowed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            assert len(engine.step()) == 4
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_log_probabilities_are_told_by_the_device():
    """Beside others, ahead of their tokens: the same tokens, and what scoring them gives."""
    prompts, plain = (
        [[5 + i] * 30 for i in range(4)],
        SamplingParams(max_tokens=12, ignore_eos=True),
    )
    asked = [plain.model_copy(update={"logprobs": 2 + i}) if i % 2 else plain for i in range(4)]
    engine = random_engine("small", "a8w8c8", prefix_cache=False)
    wanted = [out.token_ids for out in engine.generate(prompts, plain)]
    outputs = engine.generate(prompts, asked)
    assert [out.token_ids for out in outputs] == wanted
    for i in (1, 3):
        told = outputs[i].logprobs
        assert told is not None
        assert [max(own, key=own.__getitem__) for own in told] == wanted[i]
        assert {len(own) for own in told} == {2 + i}
        rows = torch.log_softmax(engine.score([*prompts[i], *wanted[i]]).cpu(), dim=1)[29:-1]
        found = torch.tensor([own[token] for own, token in zip(told, wanted[i], strict=True)])
        own = rows.gather(1, torch.tensor(wanted[i])[:, None])[:, 0]
        assert (found - own).abs().max() < 0.1
    assert outputs[0].logprobs is None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_as_one_and_one_by_one(scheme, monkeypatch):
    """A prompt through all at once, and through each in turn, as large ones go."""
    from inference.gpu import feed_forward

    engine = random_engine("mixture", scheme, max_batched_tokens=512)
    for length in (3, 40, 400):
        tokens = [(11 * i) % 4000 for i in range(length)]
        found = engine.score(tokens)
        with monkeypatch.context() as patch:
            patch.setattr(feed_forward, "as_one", lambda own, tokens: False)
            wanted = engine.score(tokens)
        errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
        bound = 4e-2 if scheme.startswith("fp8") else 2e-2  # a sum's last bit moves a step of e4m3
        assert errors.median() < bound, "a token may be near two experts, most are not"
        assert errors.mean() < 5e-2


def test_logits_of_a_router_that_are_none_name_experts():
    """Else weights would be read outside of memory."""
    from kernels.triton.experts import route

    for experts in (5, 60, 200):
        logits = torch.full((9, experts), float("nan"), device="cuda")
        logits[3:6, ::2] = 1.0
        logits[6:] = -float("inf")
        _, chosen = route(logits, 3, True)
        assert bool(((chosen >= 0) & (chosen < experts)).all())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_that_are_not_finite_end_a_request(scheme):
    """Maxima of rows pass over NaN, and integers hold none."""
    engine, tokens = random_engine("small", scheme), [7] * 9
    engine.model.embedding[5, 3] = float("nan")
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    broken, other = engine.generate([[*tokens, 5], tokens], params)
    assert (broken.finish_reason, other.finish_reason) == ("error", "length")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_engine_runs_on_its_own_gpu():
    """In turns, whichever GPU is the current one."""
    greedy = SamplingParams(max_tokens=9, ignore_eos=True)
    engines = [random_engine("small", "a8w8c8", f"cuda:{i}") for i in (0, 1, 1)]
    engines[1].warm_up()
    tokens = [engine.generate([[5] * 30], greedy)[0].token_ids for engine in engines * 2]
    assert tokens == tokens[:1] * 6
    assert torch.cuda.current_device() == 0


def test_an_engine_leaves_no_memory_behind():
    """Neither weights nor cache, graphs or their workspace; the first one may fill tables."""
    held = []
    for _ in range(3):
        engine = random_engine("small", "a8w8c8")
        engine.generate([[5] * 30], SamplingParams(max_tokens=4, ignore_eos=True))
        del engine
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[2] - held[0] < 1 << 20


def test_a_checkpoint_on_disk_loads(tiny_llama, make_quantized):
    path = make_quantized(tiny_llama, "a8w8c8")
    engine = Engine.from_pretrained(path, device="cuda")
    assert Checkpoint.open(path).scheme.wac == "a8w8c8"
    output = engine.generate(["def add(a, b):"], SamplingParams(max_tokens=9, ignore_eos=True))[0]
    assert len(output.token_ids) == 9
