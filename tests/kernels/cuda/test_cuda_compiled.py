"""The CUDA C++ compiles for Hopper, where NVRTC is installed; no device is needed."""

from __future__ import annotations

import pytest

from kernels.cuda.fused_block import SOURCE, BlockShape
from kernels.cuda.nvrtc import CompilerMissingError, compiled

SHARED = 232_448  # bytes that a program may have on sm_90
SHAPES = {
    "Llama-3-8B": BlockShape(4096, 4096, 14336, 6144),
    "Llama-3-8B in int8": BlockShape(4096, 4096, 14336, 6144, bits=8),
    "Qwen2.5-7B, zero points": BlockShape(3584, 3584, 18944, 4608, zeros=True),
    "Qwen3-30B-A3B": BlockShape(4096, 2048, 768, 5120, experts=128, chosen=8),
    "small in int8": BlockShape(1024, 1280, 1408, 1984, bits=8),
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_of_a_block_compiles_and_fits(name, rows):
    shape = SHAPES[name]
    programs = shape.programs(132)
    depth = max(d for d in (2, 3) if shape.shared(rows, programs, d) <= SHARED)
    try:
        image = compiled(SOURCE, shape.values(rows, programs, depth), (9, 0))
    except CompilerMissingError as error:
        pytest.skip(str(error))
    assert image.startswith(b"\x7fELF")
    assert b"fused_block" in image


def test_a_wrong_source_says_where(tmp_path):
    source = tmp_path / "wrong.cu"
    source.write_text('extern "C" __global__ void wrong() { nothing(); }')
    try:
        with pytest.raises(RuntimeError, match=r"(?s)wrong\.cu does not compile.*nothing"):
            compiled(source, {}, (9, 0))
    except CompilerMissingError as error:
        pytest.skip(str(error))


def test_shared_memory_that_is_counted_wrongly_does_not_compile():
    shape = SHAPES["small in int8"]
    values = shape.values(1, shape.programs(132), 2)
    values["SHARED"] -= 4096
    try:
        with pytest.raises(RuntimeError, match="counts shared memory"):
            compiled(SOURCE, values, (9, 0))
    except CompilerMissingError as error:
        pytest.skip(str(error))
