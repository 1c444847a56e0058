"""Adapters in an engine: each request's logits are those of the model with its adapter merged."""

import os
import random
from pathlib import Path
from typing import Any

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
from tests.adapters import write_adapter, write_prefix
from tests.experts import MOE
from tests.inference.engines import ids
from tests.inference.parallel.thread_ranks import engine_on
from tests.tiny_families import TINY

COUNT = int(os.environ.get("PTQ_ADAPTED_REQUESTS", "60"))
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


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


def adapters_of(folder: Path, base: Path) -> dict[str, Path]:
    """Of several ranks and targets: layers that ranks cut by outputs, by inputs, and all."""
    made = {"few": (4, ("q_proj", "v_proj")), "inputs": (5, ("down_proj", "k_proj", "o_proj"))}
    return {
        name: write_adapter(folder / name, base, rank, targets, seed=i, scale=0.5)
        for i, (name, (rank, targets)) in enumerate(made.items())
    } | {"all": write_adapter(folder / "all", base, 16, seed=7, scale=0.5)}


@pytest.fixture
def adapters(tmp_path, tiny_llama) -> dict[str, Path]:
    return adapters_of(tmp_path, tiny_llama)


def engine_of(folder: Path, adapters: dict[str, Path], *, fused: bool = True, **config) -> Engine:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    backend = CpuBackend(fused=fused)
    engine = Engine(Checkpoint.open(folder), tokenizer, EngineConfig(**config), backend)
    for name, path in adapters.items():
        engine.load_adapter(name, path)
    return engine


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_logits_are_those_of_merged_weights(tmp_path, make_model, ranks):
    """With four ranks two have a head of K and V together."""
    path, tokens = make_model("llama", tie_word_embeddings=False), ids(70)
    with engine_on(path, ranks, adapters_of(tmp_path, path)) as engine:
        base = engine.score(tokens)
        assert ranks > 1 or torch.equal(base, engine_of(path, {}).score(tokens))
        for name, folder in engine.adapters.items():
            wanted = merged_logits(path, folder, tokens)
            assert (wanted - base).abs().max() > 0.5, "the adapter changes nothing"
            assert (engine.score(tokens, name) - wanted).abs().max() < 1e-4, name
        assert torch.equal(engine.score(tokens), base)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "glm4", "mixtral", "qwen3_moe"])
def test_other_families(tmp_path, make_model, family, ranks):
    """Biases, norms of heads and after sub-layers, channels that are turned at load, mixtures."""
    folder, tokens = make_model(family, **TINY.get(family, {}) | MOE.get(family, {})), ids(40)
    targets = ("q_proj", "k_proj", "o_proj")
    path = write_adapter(tmp_path / "a", folder, targets=targets, scale=0.5)
    wanted, bound = merged_logits(folder, path, tokens), 1e-4 if family in MOE else 2e-4
    with engine_on(folder, ranks, {"a": path}) as engine:
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_compiled_kernels(tiny_llama, adapters, monkeypatch, ranks):
    found, wanted = [], merged_logits(tiny_llama, adapters["all"], ids(40))
    for library in (native.library, lambda: None):
        monkeypatch.setattr(native, "library", library)
        with engine_on(tiny_llama, ranks, adapters) as engine:
            found.append(engine.score(ids(40), "all"))
    assert (found[1] - found[0]).abs().max() < 1e-4
    assert (found[1] - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("preset", [None, "a8w8c8", "k8v4"])
def test_requests_of_one_batch_do_not_touch_each_other(
    tmp_path, tiny_llama, make_quantized, adapters, preset
):
    """Bit for bit, prefixes among them: tokens and log probabilities, in chunks of prompts, after
    preemption, and with what is found in the prefix cache."""
    folder = make_quantized(tiny_llama, preset)
    prefixes = {"p": (70, 0), "q": (5, 1)}
    own = adapters | {n: write_prefix(tmp_path / n, tiny_llama, *v) for n, v in prefixes.items()}
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2)
    each = [with_adapter(name, params) for name in [None, *own] * 2]
    prompts = [ids(25 + 9 * (i % 4), seed=i % 5) for i in range(len(each))]
    engine = engine_of(folder, own, max_batched_tokens=33, max_model_len=192, kv_blocks=5)
    quiet = engine_of(folder, own, max_model_len=192, prefix_cache=False)
    together = engine.generate(prompts, each)
    assert engine.stats().preemptions > 0
    again = engine.generate(prompts, each)
    assert engine.stats().hit_tokens > 0
    engine.check_integrity()
    for prompt, params, *found in zip(prompts, each, together, again, strict=True):
        alone = quiet.generate([prompt], params)[0]
        for one in found:
            assert (one.token_ids, one.logprobs) == (alone.token_ids, alone.logprobs)


NGRAM = SpeculateConfig(method="ngram", depth=3)


@pytest.mark.parametrize(("ranks", "speculate"), [(1, None), (1, NGRAM), (2, NGRAM)])
def test_what_is_cached_is_found_by_requests_of_the_same_adapter_alone(
    tiny_llama, adapters, ranks, speculate
):
    """And what an adapter's requests get is no other's, with drafts as well."""
    prompt, params = [5, 9, 31, 7] * 33, SamplingParams(max_tokens=10, ignore_eos=True)

    def hits(name: str | None) -> int:
        before = engine.stats().hit_tokens
        found = engine.generate([prompt], with_adapter(name, params))[0].token_ids
        (alone,) = engine_of(tiny_llama, adapters).generate([prompt], with_adapter(name, params))
        assert found == alone.token_ids
        return engine.stats().hit_tokens - before

    names = (None, "inputs", "all", None, "inputs")
    sizes = {"speculate": speculate, "max_model_len": 192}
    with engine_on(tiny_llama, ranks, adapters, **sizes) as engine:
        assert [hits(name) for name in names] == [0, 0, 0, 128, 128]
        engine.unload_adapter("inputs")
        engine.load_adapter("inputs", adapters["few"])  # the same name and slot, another adapter
        before = engine.stats().hit_tokens
        engine.generate([prompt], with_adapter("inputs"))
        assert engine.stats().hit_tokens == before


def test_beams_and_drafts(tiny_llama, adapters):
    plain = engine_of(tiny_llama, adapters)
    drafting = engine_of(tiny_llama, adapters, speculate=NGRAM)
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
    engine = engine_of(tiny_llama, {"a": adapters["few"]})
    with pytest.raises(RequestError, match="'a' is loaded already"):
        engine.load_adapter("a", adapters["inputs"])
    wrong: Any
    for wrong in ("a b", 5, None):
        with pytest.raises(RequestError, match="allowed are letters"):
            engine.load_adapter(wrong, adapters["inputs"])
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
        engine_of(other, {"a": adapters["few"]})


@pytest.mark.parametrize(("ranks", "count"), [(1, COUNT), (2, COUNT // 2)])
def test_many_requests_adapters_loads_and_unloads(tmp_path, tiny_llama, ranks, count):
    """PTQ_ADAPTED_REQUESTS in the environment asks for another number of requests."""
    folders = list(adapters_of(tmp_path, tiny_llama).values())
    with engine_on(tiny_llama, ranks, max_batch_size=4, kv_blocks=9) as engine:
        mix_requests(engine, tiny_llama, folders, count)


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
