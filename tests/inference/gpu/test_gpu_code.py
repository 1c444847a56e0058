"""transformers' own code on the GPU's engine without a GPU: its kernels interpreted."""

import pytest

from formats.errors import CheckpointError
from inference.requests.request import SamplingParams
from tests.gemma4 import write_tiny, write_wide
from tests.inference.gpu.test_gpu import engine_of, on_cpu, prompt
from tests.inference.transformers_code.test_transformers_code import KINDS as SIZES
from tests.inference.transformers_code.test_transformers_code import SMALL
from tests.kernels.triton_lab import distance, interpreted

KINDS = {  # heads of 512 beside others are those of Gemma 4's global layers, as published
    **{kind: SMALL | SIZES[kind] for kind in ("deepseek_v2", "gemma2", "gpt_oss")},
    **dict.fromkeys(("shared", "gemma3n", "wide")),
}


@pytest.mark.parametrize("kind", KINDS)
@interpreted
def test_logits_are_those_of_the_cpu(make_model, tmp_path, kind):
    """One of the layers with a window, one without; blocks that read K and V of others."""
    if KINDS[kind]:
        folder = make_model(kind, layers=2 if kind == "gemma2" else 1, **KINDS[kind])
    else:
        write = write_wide if kind == "wide" else write_tiny
        folder = write(tmp_path / "float", 512 if kind == "wide" else kind)
    path, tokens = str(folder), prompt(20)
    engine = engine_of(path, max_batched_tokens=16, transformers_code=True)
    assert type(engine.model).__name__ == "CodeModel"
    assert distance(engine.score(tokens), on_cpu(path, tokens, transformers_code=True)) < 0.03


@interpreted
def test_quantized_layers_are_those_of_the_fast_path(make_model, make_quantized):
    path = str(make_quantized(make_model("llama", layers=1), "a8w8c8"))
    fast, slow = engine_of(path), engine_of(path, transformers_code=True)
    assert distance(slow.score(prompt(20)), fast.score(prompt(20))) < 0.1
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    both = slow.generate([prompt(5), prompt(9)], params)
    assert all(len(output.token_ids) == 2 for output in both)
    slow.check_integrity()


@interpreted
def test_heads_that_kernels_do_not_take_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"heads of 528 .* GPUs run up to 512, the CPU any"):
        engine_of(str(write_wide(tmp_path / "float", 528)))
