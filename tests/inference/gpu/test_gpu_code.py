"""transformers' own code on the GPU's engine without a GPU: its kernels interpreted."""

import pytest

from formats.errors import CheckpointError
from inference.requests.request import SamplingParams
from tests.gemma4 import write_tiny, write_wide
from tests.inference.gpu.test_gpu import engine_of, prompt
from tests.inference.transformers_code.test_transformers_code import KINDS, SMALL
from tests.kernels.triton_lab import interpreted


@pytest.mark.parametrize("kind", ["deepseek_v2", "gemma2", "gpt_oss"])
def test_logits_are_those_of_the_cpu(make_model, kind):
    layers = 2 if kind == "gemma2" else 1  # one with a window, one without
    near_the_cpu(str(make_model(kind, layers=layers, **(SMALL | KINDS[kind]))))


@interpreted
def near_the_cpu(path: str):
    wanted = engine_of(path, triton=False, transformers_code=True).score(prompt(20))
    engine = engine_of(path, max_batched_tokens=16, transformers_code=True)
    assert type(engine.model).__name__ == "CodeModel"
    error = (engine.score(prompt(20)) - wanted).norm() / wanted.norm()
    assert error < 0.03, error


def test_quantized_layers_are_those_of_the_fast_path(make_model, make_quantized):
    near_the_fast_path(str(make_quantized(make_model("llama", layers=1), "a8w8c8")))


@interpreted
def near_the_fast_path(path: str):
    fast, slow = engine_of(path), engine_of(path, transformers_code=True)
    wanted = fast.score(prompt(20))
    assert (slow.score(prompt(20)) - wanted).norm() / wanted.norm() < 0.1
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    both = slow.generate([prompt(5), prompt(9)], params)
    assert all(len(output.token_ids) == 2 for output in both)
    slow.check_integrity()


@pytest.mark.parametrize("layout", ["shared", "gemma3n"])
def test_blocks_that_read_the_keys_and_values_of_others(tmp_path, layout):
    near_the_cpu(str(write_tiny(tmp_path / "float", layout)))


def test_heads_of_512_beside_others(tmp_path):
    """Those of Gemma 4's global layers, as they are published."""
    near_the_cpu(str(write_wide(tmp_path / "float", 512)))


def test_heads_that_kernels_do_not_take_are_named(tmp_path):
    refused_by_the_gpu(str(write_wide(tmp_path / "float", 528)))


@interpreted
def refused_by_the_gpu(path: str):
    with pytest.raises(CheckpointError, match=r"heads of 528 .* GPUs run up to 512, the CPU any"):
        engine_of(path)
