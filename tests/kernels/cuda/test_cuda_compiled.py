"""The CUDA C++ compiles for Hopper; no device is needed, but NVRTC, which CPUs' torch is without."""

from __future__ import annotations

import os

import pytest

from kernels.cuda import nvrtc
from kernels.cuda.attention import AttentionShape
from kernels.cuda.block_weights import BlockShape
from kernels.cuda.fused_block import SOURCE
from kernels.cuda.nvrtc import compiled
from tests.kernels.fetched import fetched

pytestmark = pytest.mark.ci  # fetches it

SHARED = 232_448  # bytes that a program may have on sm_90
SHAPES = {
    "Llama-3-8B": BlockShape(4096, 4096, 14336, 6144),
    "Llama-3-8B in int8": BlockShape(4096, 4096, 14336, 6144, bits=8),
    "Qwen2.5-7B, zero points": BlockShape(3584, 3584, 18944, 4608, zeros=True),
    "Qwen3-30B-A3B": BlockShape(4096, 2048, 768, 5120, experts=128, chosen=8),
    "small in int8": BlockShape(1024, 1280, 1408, 1984, bits=8),
    "Llama-3-8B with attention": BlockShape(
        4096, 4096, 14336, 6144, heads=AttentionShape(8, 4, 128, 8)
    ),
    "the same in int8": BlockShape(
        4096, 4096, 14336, 6144, bits=8, heads=AttentionShape(8, 4, 128, 8)
    ),
    "the same with static scales": BlockShape(
        4096, 4096, 14336, 6144, bits=8, static=True, heads=AttentionShape(8, 4, 128, 8)
    ),
    "the same in bf16": BlockShape(
        4096, 4096, 14336, 6144, bits=16, heads=AttentionShape(8, 4, 128, 16)
    ),
    "TinyLlama in int8 with attention": BlockShape(
        2048, 2048, 5632, 2560, bits=8, heads=AttentionShape(4, 8, 64, 16)
    ),
    "Qwen3-30B-A3B with attention": BlockShape(
        4096, 2048, 768, 5120, experts=128, chosen=8, heads=AttentionShape(4, 8, 128, 16)
    ),
}


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """NVRTC from a package of its own."""
    (path,) = fetched("nvidia-cuda-nvrtc", "13.0.88", 90).glob("nvidia/*/lib/libnvrtc.so.13")
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: nvrtc.load_nvrtc(path))


@pytest.mark.parametrize(
    ("name", "rows"),
    [(name, n) for name, own in SHAPES.items() for n in range(1, 2 if own.experts else 5)],
)
def test_the_kernel_of_a_block_compiles_and_fits(name, rows):
    shape = SHAPES[name]
    programs = shape.programs(132)
    depth = max(d for d in (2, 3) if shape.shared(rows, programs, d) <= SHARED)
    image = compiled(SOURCE, shape.values(rows, programs, depth), (9, 0))
    assert image.startswith(b"\x7fELF")
    assert b"fused_block" in image


def test_machine_code_is_kept_and_follows_from_all_that_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("PTQ_CACHE", str(tmp_path / "cache"))
    source, included = tmp_path / "one.cu", tmp_path / "two.cuh"
    source.write_text(
        '#include "two.cuh"\nextern "C" __global__ void one(int* x) { *x = 9 * N + TWO; }'
    )
    included.write_text("#define TWO 2")
    first = compiled(source, {"N": 1}, (9, 0))
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_compiled", None)
        assert compiled(source, {"N": 1}, (9, 0)) == first
    others = [compiled(source, {"N": 3}, (9, 0)), compiled(source, {"N": 1}, (10, 0))]
    included.write_text("#define TWO 4")
    others.append(compiled(source, {"N": 1}, (9, 0)))
    assert len({first, *others}) == 4
    assert len(list((tmp_path / "cache").iterdir())) == 4
    monkeypatch.setenv("PTQ_CACHE", os.devnull)  # where nothing can be kept
    assert compiled(source, {"N": 1}, (9, 0)) == others[-1]


def test_a_wrong_source_says_where(tmp_path):
    source = tmp_path / "wrong.cu"
    source.write_text('extern "C" __global__ void wrong() { nothing(); }')
    with pytest.raises(RuntimeError, match=r"(?s)wrong\.cu does not compile.*nothing"):
        compiled(source, {}, (9, 0))


def test_shared_memory_that_is_counted_wrongly_does_not_compile():
    shape = SHAPES["small in int8"]
    values = shape.values(1, shape.programs(132), 2)
    values["SHARED"] -= 4096
    with pytest.raises(RuntimeError, match="counts shared memory"):
        compiled(SOURCE, values, (9, 0))


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(nvrtc.torch.version, "cuda", "12.0")
    nvrtc._nvrtc.cache_clear()
    with pytest.raises(nvrtc.CompilerMissingError, match=r"libnvrtc\.so\.12 is not installed"):
        compiled(SOURCE, {}, (9, 0))
    nvrtc._nvrtc.cache_clear()
