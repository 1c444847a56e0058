"""Adapters in an engine: each request's logits are those of the model with its adapter merged."""

import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, EngineError, RequestError
from inference.beam_search import BeamParams, beam_search
from inference.config import EngineConfig, SpeculateConfig
from inference.cpu.backend import CpuBackend
from inference.engine import Engine
from inference.requests.request import SamplingParams
from kernels.cpu import native
from tests.adapters import write_adapter
from tests.tiny_families import TINY

COUNT = int(os.environ.get("PTQ_ADAPTED_REQUESTS", "60"))
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 384, (count,), generator=generator).tolist()


def with_adapter(name: str | None, params: SamplingParams = PARAMS) -> SamplingParams:
    return params.model_copy(update={"adapter": name})


def merged_logits(base: Path, adapter: Path, tokens: list[int]) -> torch.Tensor:
    """What transformers gives for the float base with s B A added to its weights."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
            module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[key.replace("lora_A", "lora_B")]
            model.get_submodule(module).weight += 2.0 * b @ tensors[key]
        return model(torch.tensor([tokens])).logits[0]


@pytest.fixture
def adapters(tmp_path, tiny_llama) -> dict[str, Path]:
    """Of several ranks and targets."""
    made = {"a": (4, ("q_proj", "v_proj")), "b": (5, ("down_proj", "k_proj", "o_proj"))}
    folders = {
        name: write_adapter(tmp_path / name, tiny_llama, rank, targets, seed=i, scale=0.5)
        for i, (name, (rank, targets)) in enumerate(made.items())
    }
    return folders | {"all": write_adapter(tmp_path / "all", tiny_llama, 16, seed=7, scale=0.5)}


def engine_of(folder: Path, adapters: dict[str, Path], *, fused: bool = True, **config) -> Engine:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    backend = CpuBackend(fused=fused)
    engine = Engine(Checkpoint.open(folder), tokenizer, EngineConfig(**config), backend)
    for name, path in adapters.items():
        engine.load_adapter(name, path)
    return engine


def test_logits_are_those_of_merged_weights(tiny_llama, adapters):
    engine, tokens = engine_of(tiny_llama, adapters), ids(70)
    base = Engine.from_pretrained(tiny_llama).score(tokens)
    assert torch.equal(engine.score(tokens), base)
    for name, path in adapters.items():
        wanted = merged_logits(tiny_llama, path, tokens)
        assert (wanted - base).abs().max() > 0.5, "the adapter changes nothing"
        assert (engine.score(tokens, name) - wanted).abs().max() < 1e-4, name


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize(
    ("family", "sizes", "targets", "bound"),
    [
        *(
            (name, TINY.get(name, {}), ("q_proj", "k_proj", "o_proj"), 2e-4)
            for name in ("gemma2", "qwen3", "glm4")
        ),
        ("mixtral", EXPERTS | {"num_local_experts": 4}, ("q_proj", "o_proj"), 1e-4),
        ("qwen3_moe", EXPERTS | {"num_experts": 4}, ("q_proj", "o_proj"), 1e-4),
    ],
)
def test_other_families(tmp_path, make_model, family, sizes, targets, bound):
    """Norms after sub-layers and of q and k, channels that are turned at load, mixtures."""
    folder = make_model(family, **sizes)
    path = write_adapter(tmp_path / "a", folder, targets=targets, scale=0.5)
    engine, tokens = engine_of(folder, {"a": path}), ids(40)
    wanted = merged_logits(folder, path, tokens)
    assert (engine.score(tokens, "a") - wanted).abs().max() < bound
    assert (engine.score(tokens) - wanted).abs().max() > 0.1


@pytest.mark.parametrize("preset", ["a8w8c8", "w4", "fp8_channel"])
def test_in_one_call_and_op_by_op_the_bits_are_equal(tiny_llama, make_quantized, adapters, preset):
    if native.library() is None:
        pytest.skip("no compiled kernels")
    folder = make_quantized(tiny_llama, preset)
    one, ops = engine_of(folder, adapters), engine_of(folder, adapters, fused=False)
    base = one.score(ids(70))
    for name in adapters:
        found = one.score(ids(70), name)
        assert torch.equal(found, ops.score(ids(70), name))
        assert not torch.equal(found, base)


def test_without_compiled_kernels(tiny_llama, adapters, monkeypatch):
    compiled = engine_of(tiny_llama, adapters).score(ids(40), "all")
    monkeypatch.setattr(native, "library", lambda: None)
    plain = engine_of(tiny_llama, adapters).score(ids(40), "all")
    assert (plain - compiled).abs().max() < 1e-4


def test_requests_of_one_batch_do_not_touch_each_other(tiny_llama, make_quantized, adapters):
    """Bit for bit: tokens and log probabilities, chunks of prompts and preemption included."""
    folder = make_quantized(tiny_llama, "a8w8c8")
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2)
    names = [None, "a", "b", "all", "a", None, "all", "b"]
    prompts = [ids(35 + 9 * (i % 3), seed=i) for i in range(len(names))]
    each = [with_adapter(name, params) for name in names]
    engine = engine_of(folder, adapters, max_batched_tokens=33, max_model_len=128, kv_blocks=5)
    together = engine.generate(prompts, each)
    engine.check_integrity()
    assert engine.stats().preemptions > 0
    for prompt, own, found in zip(prompts, each, together, strict=True):
        alone = engine_of(folder, adapters).generate([prompt], own)[0]
        assert (found.token_ids, found.logprobs) == (alone.token_ids, alone.logprobs)


def test_what_is_cached_is_found_by_requests_of_the_same_adapter_alone(tiny_llama, adapters):
    engine, prompt = engine_of(tiny_llama, adapters), ids(130)

    def hits(name: str | None) -> int:
        before = engine.stats().hit_tokens
        found = engine.generate([prompt], with_adapter(name))[0].token_ids
        assert (
            found
            == engine_of(tiny_llama, adapters).generate([prompt], with_adapter(name))[0].token_ids
        )
        return engine.stats().hit_tokens - before

    assert [hits(name) for name in (None, "a", "all", None, "a")] == [0, 0, 0, 128, 128]
    engine.unload_adapter("a")
    engine.load_adapter("a", adapters["b"])  # the same name and slot, another adapter
    before = engine.stats().hit_tokens
    engine.generate([prompt], with_adapter("a"))
    assert engine.stats().hit_tokens == before


def test_beams_and_drafts(tiny_llama, adapters):
    plain = engine_of(tiny_llama, adapters)
    drafting = engine_of(tiny_llama, adapters, speculate=SpeculateConfig(method="ngram", depth=3))
    prompt = ids(6) * 8
    answers = []
    for name in (None, "all"):
        params = with_adapter(name, SamplingParams(max_tokens=24, ignore_eos=True))
        answers.append(plain.generate([prompt], params)[0].token_ids)
        assert drafting.generate([prompt], params)[0].token_ids == answers[-1]
    assert answers[0] != answers[1]
    best = beam_search(plain, [prompt], BeamParams(beam_width=1, max_tokens=8, adapter="all"))
    assert list(best[0][0].token_ids) == answers[1][:8]


def test_names_that_are_used_unknown_or_in_use(tiny_llama, adapters):
    engine = engine_of(tiny_llama, {"a": adapters["a"]})
    with pytest.raises(RequestError, match="'a' is loaded already"):
        engine.load_adapter("a", adapters["b"])
    with pytest.raises(RequestError, match="allowed are letters"):
        engine.load_adapter("a b", adapters["b"])
    for refused in (
        lambda: engine.add_request(ids(3), with_adapter("b")),
        lambda: engine.score(ids(3), "b"),
        lambda: engine.unload_adapter("b"),
        lambda: Engine.from_pretrained(tiny_llama).unload_adapter("b"),
    ):
        with pytest.raises(RequestError, match="found 'b'; loaded: ") as found:
            refused()
        assert found.value.param == "adapter"
    name = engine.add_request(ids(3), with_adapter("a"))
    with pytest.raises(RequestError, match="1 requests with 'a' wait or run"):
        engine.unload_adapter("a")
    engine.abort(name)
    engine.unload_adapter("a")
    assert engine.adapters == {}


def test_what_cannot_be_run_with_is_refused_by_name(tmp_path, tiny_llama, make_model, adapters):
    with pytest.raises(EngineError, match=r"by\s+transformers' own code"):
        engine_of(tiny_llama, adapters, transformers_code=True)
    other = make_model("llama", hidden_size=64)
    with pytest.raises(CheckpointError, match="q_proj"):
        engine_of(other, {"a": adapters["a"]})


def test_many_requests_adapters_loads_and_unloads(tiny_llama, adapters):
    """PTQ_ADAPTED_REQUESTS in the environment asks for another number of requests."""
    engine = engine_of(tiny_llama, {}, max_batch_size=4, max_model_len=128, kv_blocks=9)
    mix_requests(engine, tiny_llama, list(adapters.values()), COUNT)


def mix_requests(engine: Engine, base: Path, folders: list[Path], count: int) -> None:
    """Requests with adapters that are loaded and unloaded meanwhile get what each gets alone."""
    draw = random.Random(0)
    known = {path: engine_of(base, {"own": path}) for path in folders}
    known[None] = engine_of(base, {})
    asked: dict[str, tuple[list[int], Path | None]] = {}
    loaded: dict[str, Path] = {}
    done = wrong = 0
    while done < count:
        if len(loaded) < 3 and draw.random() < 0.3:
            name, path = f"n{draw.randrange(5)}", draw.choice(folders)
            if name not in loaded:
                engine.load_adapter(name, path)
                loaded[name] = path
        if loaded and draw.random() < 0.1:
            name = draw.choice(list(loaded))
            try:
                engine.unload_adapter(name)
            except RequestError:
                assert any(path == loaded[name] for _, path in asked.values())
            else:
                del loaded[name]
        if len(asked) < 8:
            name = draw.choice([None, *loaded])
            prompt = ids(draw.randrange(1, 90), seed=draw.randrange(6))
            request = engine.add_request(prompt, with_adapter(name))
            asked[request] = prompt, loaded.get(name or "")
        for output in engine.advance().finished:
            prompt, path = asked.pop(output.request_id)
            own = PARAMS if path is None else with_adapter("own")
            wrong += output.token_ids != known[path].generate([prompt], own)[0].token_ids
            done += 1
    for name in asked:
        engine.abort(name)
    engine.check_integrity()
    assert wrong == 0
    for name in list(loaded):
        engine.unload_adapter(name)
    assert engine.adapters == {}
