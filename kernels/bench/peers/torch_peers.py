"""What stock torch offers for the shapes that benchmarks measure, timed as our kernels are.

A peer is a function of a shape: it makes random arguments, rotated as ours are, and gives a call
and what that must come to. Where torch has nothing for the shape it raises `UnavailableError` with
the reason; what torch itself refuses on a device is a reason too. Layers compete with the 16-bit
one as well, since that is what quantization is to beat. Inputs come as ours do: on a GPU quantized,
on a CPU in fp32, so that what a peer needs of them is part of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from kernels.bench.draw import relative
from kernels.bench.peers.torch_layers import (
    BF16,
    CHECKED,
    Calls,
    UnavailableError,
    fp32_linear,
    int8_pack_mm,
    int_mm,
    linear,
    scaled_mm,
    scaled_mm_blocks,
    tinygemm,
)
from kernels.bench.shapes import AttentionShape, Gemm, Rows, Shape
from kernels.bench.timing import copies_of, rotated


@dataclass(frozen=True)
class Peer:
    """A way of torch to compute a shape.

    Attributes:
        name: For a person.
        build: Makes its arguments on a device.
    """

    name: str
    build: Callable[[Shape, torch.device], Calls]


def sdpa(
    backend: SDPBackend | None, dtype: torch.dtype = BF16
) -> Callable[[Shape, torch.device], Calls]:
    """Attention over contiguous K and V of equal lengths, by a backend or torch's choice."""

    def build(shape: Shape, device: torch.device) -> Calls:
        assert isinstance(shape, AttentionShape)
        if not shape.even:
            raise UnavailableError("it takes sequences with equal numbers of new tokens")
        size = (shape.sequences, shape.kv_heads, shape.context, shape.dim)
        k, v = (rotated(torch.randn(size, device=device, dtype=dtype), 2, 8) for _ in "kv")
        q = torch.randn(
            shape.sequences, shape.heads, shape.new, shape.dim, device=device, dtype=dtype
        )
        mask = causal_lower_right(shape.new, shape.context) if shape.new > 1 else None
        chosen = nullcontext if backend is None else partial(sdpa_kernel, backend)
        own, grouped = q, shape.kv_heads < shape.heads
        if device.type == "cpu" and shape.new == 1:  # heads that share K and V, as its queries
            own, grouped = q.view(shape.sequences, shape.kv_heads, -1, shape.dim), False

        def call(i: int) -> Tensor:
            with chosen():
                y = F.scaled_dot_product_attention(own, k[i], v[i], mask, enable_gqa=grouped)
                return y.view(q.shape)

        return Calls(call, len(k), lambda y: relative(*_attended(shape, y, q, k[0], v[0])))

    return build


def _attended(
    shape: AttentionShape, y: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The last queries of the last sequence: as found and in fp64 [H, few, D]."""
    few, each = min(shape.new, CHECKED // 8), shape.heads // shape.kv_heads
    wide = [t[-1].double().repeat_interleave(each, dim=0) for t in (k, v)]
    scores = q[-1, :, -few:].double() @ wide[0].mT * shape.dim**-0.5
    seen = torch.ones_like(scores[0], dtype=torch.bool).tril(shape.context - few)
    scores = scores.masked_fill(~seen, float("-inf"))
    return y[-1, :, -few:], scores.softmax(-1) @ wide[1]


def copy(shape: Shape, device: torch.device) -> Calls:
    """As many bytes, half of them read and half written."""
    assert isinstance(shape, Rows)
    copies, half = copies_of(shape.nbytes, device), shape.nbytes // 2
    sources = torch.randint(0, 256, (copies, half), device=device, dtype=torch.uint8)
    targets = torch.zeros_like(sources)
    return Calls(
        lambda i: targets[i].copy_(sources[i]),
        copies,
        lambda y: float((y != sources[0]).any()),
    )


OnRows = Callable[[Tensor, Tensor, Tensor], Tensor]


TORCH_ROWS: dict[str, OnRows] = {  # of x, y [rows, size] and w [size]
    "norm": lambda x, y, w: F.rms_norm(x, w.shape, w, 1e-5),
    "silu": lambda x, y, w: F.silu(x) * y,
    "quantize": lambda x, y, w: (x / (x.abs().amax(-1, keepdim=True) / 127)).round().to(torch.int8),
}


def on_rows(shape: Shape, device: torch.device) -> Calls:
    """An elementwise op, of torch's functions."""
    assert isinstance(shape, Rows)
    x, y = (torch.randn(shape.rows, shape.size, device=device) for _ in "xy")
    weight, run = torch.randn(shape.size, device=device), TORCH_ROWS[shape.op]
    wanted = run(x.double(), y.double(), weight.double()).double()
    return Calls(lambda i: run(x, y, weight), 1, lambda found: relative(found, wanted))


LINEAR, INT_MM, TINYGEMM = (
    Peer("F.linear", linear),
    Peer("_int_mm", int_mm),
    Peer("tinygemm", tinygemm),
)


OF_GEMMS = {
    "cuda": {
        "w4a16": (TINYGEMM, LINEAR),
        "w4a8": (INT_MM, LINEAR),
        "w4a8_two_level": (INT_MM, LINEAR),
        "w8a8": (INT_MM, LINEAR),
        "fp8": (Peer("_scaled_mm", scaled_mm), LINEAR),
        "fp8_block": (Peer("scaled_mm 128", scaled_mm_blocks), LINEAR),
    },
    "cpu": {
        "w4a16": (TINYGEMM,),
        "w4a8": (TINYGEMM,),
        "w8a16": (Peer("int8pack_mm", int8_pack_mm),),
        "w8a8": (INT_MM, LINEAR),
        "w16a16": (LINEAR, Peer("F.linear fp32", fp32_linear)),
    },
}


OF_ATTENTION = {
    "cuda": (
        Peer("flash sdpa", sdpa(SDPBackend.FLASH_ATTENTION)),
        Peer("cudnn sdpa", sdpa(SDPBackend.CUDNN_ATTENTION)),
    ),
    "cpu": (Peer("sdpa bf16", sdpa(None)), Peer("sdpa fp32", sdpa(None, torch.float32))),
}


OF_ROWS = {"cuda": Peer("copy", copy), "cpu": Peer("torch", on_rows)}


def peers_for(shape: Shape, device: torch.device) -> tuple[Peer, ...]:
    """What may compute a shape on a device, the closest relative first."""
    if isinstance(shape, Gemm):
        return OF_GEMMS[device.type].get(shape.base, (LINEAR,))
    if isinstance(shape, AttentionShape):
        return () if shape.kind else OF_ATTENTION[device.type]
    return () if shape.op in ("sample", "experts") else (OF_ROWS[device.type],)
