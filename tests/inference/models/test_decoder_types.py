"""Float weights are kept in the type of the checkpoint, and give the numbers of their fp32 copies."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference.engine import Engine
from inference.requests.request import SamplingParams

IDS = list(range(3, 60))


def stored_as(source, folder, dtype):
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    tensors = {name: t.half().to(dtype) for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_fp16_takes_half_of_fp32_and_has_its_bits(make_model, tmp_path, tied):
    source = make_model("llama", tie_word_embeddings=tied)
    half, whole = (
        Engine.from_pretrained(stored_as(source, tmp_path / str(dtype), dtype))
        for dtype in (torch.float16, torch.float32)
    )
    assert half.model.embedding.dtype == torch.float16
    assert half.model.weight_bytes < 0.51 * whole.model.weight_bytes
    assert torch.equal(half.score(IDS), whole.score(IDS))
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    wanted = [output.token_ids for output in whole.generate([IDS, IDS[:3]], params)]
    assert [output.token_ids for output in half.generate([IDS, IDS[:3]], params)] == wanted
