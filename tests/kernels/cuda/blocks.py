"""Blocks of a decoder with random weights, and their attention, for tests of `kernels.cuda`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.cuda.attention import Attention
from kernels.cuda.block_weights import BlockWeights, Router
from kernels.op_inputs import AttentionInputs, KVPool
from kernels.triton.linear.w8a8 import pack_w8a8
from kernels.triton.linear.w16a16 import DenseWeight
from kernels.triton.linear.weight import InputFormat
from kernels.triton.linear.weight_only import pack_w4a16

EPS = 1e-5
FLOATS = [InputFormat(torch.bfloat16)] * 4


def draw(shape, device, *, zeros=False, bias=False):
    """(packed weights, weights as fp64 [N, K], their biases) of (inputs of o, channels, inputs of
    down, outputs of q, k and v).
    """
    attention, hidden, inner, qkv = shape
    packed, plain, biases = [], [], []
    for n, k in ((hidden, attention), (2 * inner, hidden), (hidden, inner), (qkv, hidden)):
        q = torch.randint(-8, 8, (n, k), dtype=torch.int8, device=device)
        scale = (torch.rand(n, k // 128, device=device) + 0.5) / k**0.5 / 4
        zero = torch.randint(-8, 8, scale.shape, dtype=torch.int8, device=device) if zeros else None
        own = torch.randn(n, device=device) / 4 if bias else None
        packed.append(pack_w4a16(q, scale, own, zero))
        less = 0 if zero is None else zero.double().repeat_interleave(128, 1)
        plain.append(scale.double().repeat_interleave(128, 1) * (q.double() - less))
        biases.append(0 if own is None else own.double())
    norms = [(torch.rand(hidden, device=device) + 0.5).bfloat16() for _ in range(2)]
    return BlockWeights(*packed, norms=tuple(norms), inputs=FLOATS), plain, biases


def draw_dense(shape, device, *, bias=False):
    """As `draw`, of weights in bf16."""
    attention, hidden, inner, qkv = shape
    weights = []
    for n, k in ((hidden, attention), (2 * inner, hidden), (hidden, inner), (qkv, hidden)):
        own = torch.randn(n, device=device).bfloat16() / 4 if bias else None
        weights.append(DenseWeight((torch.randn(n, k, device=device) / k**0.5).bfloat16(), own))
    norms = [(torch.rand(hidden, device=device) + 0.5).bfloat16() for _ in range(2)]
    plain = [own.weight.double() for own in weights]
    biases = [0 if own.bias is None else own.bias.double() for own in weights]
    return BlockWeights(*weights, norms=tuple(norms), inputs=FLOATS), plain, biases


def normed(x, weight):
    """RMSNorm in fp64."""
    scaled = x.double() / (x.double().square().mean(1, keepdim=True) + EPS).sqrt()
    return scaled * weight.double()


def expected(weights, plain, biases, x, residual):
    """(the residual stream after a block, q, k and v of the next) in fp64, rounded to bf16 where the
    single kernels round, but after norms.
    """

    def linear(i, x):
        return (x.double() @ plain[i].T + biases[i]).bfloat16()

    middle = (linear(0, x).float() + residual.float()).bfloat16()
    gate, up = linear(1, normed(middle, weights.norms[0])).double().chunk(2, 1)
    h = (torch.nn.functional.silu(gate) * up).bfloat16()
    total = (linear(2, h).float() + middle.float()).bfloat16()
    return total, linear(3, normed(total, weights.norms[1]))


def in_int8(y, own, sinks):
    """(integers, scales [rows, 1]) of floats, as a layer wants them."""
    scale, which = own.scales_of(sinks)
    if scale is None:
        scale = (y.double().abs().amax(1, keepdim=True).float() / 127).clamp(min=2**-60)
    else:
        scale = (scale if which is None else scale[which.long()]).reshape(-1, 1)
    return (y.float() / scale).round().clamp(-127, 127), scale


class Integers:
    """A block of int8 weights and inputs.

    Args:
        shape: As of `draw`.
        kind: How inputs are scaled: "by token", "static", or "sinks", two static scales by token.
    """

    def __init__(self, shape: Sequence[int], rows: int, kind: str, device: str) -> None:
        attention, hidden, inner, qkv = shape
        self.sinks = torch.tensor([1, 0, 0, 1][:rows], dtype=torch.int32, device=device)
        both = torch.tensor([[0.03, 0.1], [0.05, 0.2], [0.06, 0.2], [0.05, 0.1]], device=device)
        formats = [InputFormat(torch.int8)] * 4
        if kind != "by token":
            formats = [InputFormat(torch.int8, scales[:1].clone()) for scales in both]
        if kind == "sinks":  # that of o is one for all, as attention may end in
            pairs = zip(formats, both, strict=True)
            formats[1:] = [replace(own, both=scales) for own, scales in pairs][1:]
        packed, self.plain = [], []
        for n, k in ((hidden, attention), (2 * inner, hidden), (hidden, inner), (qkv, hidden)):
            q = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
            scale = (torch.rand(n, device=device) + 0.5) / k**0.5 / 64
            bias = torch.randn(n, device=device) / 4
            packed.append(pack_w8a8(q, scale, bias))
            self.plain.append((q.double(), scale, bias))
        norms = [(torch.rand(hidden, device=device) + 0.5).bfloat16() for _ in range(2)]
        self.weights = BlockWeights(*packed, norms=tuple(norms), inputs=formats)
        self.residual = torch.randn(rows, hidden, device=device).bfloat16()
        self.x = in_int8(torch.randn(rows, attention, device=device), formats[0], self.sinks)

    @property
    def given(self) -> tuple[Tensor, Tensor]:
        """Rows of o, and their scales."""
        x, scale = self.x
        own = self.weights.inputs[0].scale
        return x.to(torch.int8), scale if own is None else scale[:1].reshape(1)

    def linear(self, i: int, q: Tensor, scale: Tensor) -> Tensor:
        w, own, bias = self.plain[i]
        return ((q.double() @ w.T).float() * (scale * own) + bias).bfloat16()

    def normed(self, x: Tensor, i: int) -> Tensor:
        x = x.double()
        return x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * self.weights.norms[i].double()

    def expected(self) -> tuple[Tensor, Tensor]:
        formats, sinks = self.weights.inputs, self.sinks
        middle = (self.linear(0, *self.x).float() + self.residual.float()).bfloat16()
        n = in_int8(self.normed(middle, 0), formats[1], sinks)
        gate, up = self.linear(1, *n).double().chunk(2, 1)
        h = in_int8(torch.nn.functional.silu(gate) * up, formats[2], sinks)
        total = (self.linear(2, *h).float() + middle.float()).bfloat16()
        return total, self.linear(3, *in_int8(self.normed(total, 1), formats[3], sinks))


def first(weight):
    """The first of a stack of weights."""
    return replace(weight, packed=weight.packed[0], scale=weight.scale[0])


class Mixture:
    """A block with a mixture of experts.

    Args:
        shape: As of `draw`, of one expert; then experts, and how many are chosen.
    """

    def __init__(self, shape: Sequence[int], device: str, *, normalized: bool) -> None:
        attention, hidden, inner, qkv, experts, chosen = shape
        weights, self.plain, _ = draw((attention, hidden, inner, qkv), device)
        self.stacks = {}
        for name, n, k in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            q = torch.randint(-8, 8, (experts, n, k), dtype=torch.int8, device=device)
            scale = (torch.rand(experts, n, k // 128, device=device) + 0.5) / k**0.5 / 4
            self.stacks[name] = pack_w4a16(q, scale), scale, q
        router = (torch.randn(experts, hidden, device=device) / hidden**0.5).bfloat16()
        self.weights = replace(
            weights,
            gate_up=first(self.stacks["gate_up"][0]),
            down=first(self.stacks["down"][0]),
            router=Router(router, chosen, normalized, 1.5),
        )

    def expert(self, name: str, e: int) -> Tensor:
        _, scale, q = self.stacks[name]
        return scale[e].double().repeat_interleave(128, 1) * q[e].double()

    def expected(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        plain, norms, router = self.plain, self.weights.norms, self.weights.router
        assert router is not None
        middle = ((x.double() @ plain[0].T).bfloat16().float() + residual.float()).bfloat16()
        n = normed(middle, norms[0])
        scores = (n.double() @ router.weight.double().T)[0].softmax(0)
        best, which = scores.topk(router.chosen)
        best = router.factor * (best / best.sum() if router.normalized else best)
        y = torch.zeros_like(middle).double()
        for share, e in zip(best, which.tolist(), strict=True):
            gate, up = (n.double() @ self.expert("gate_up", e).T).bfloat16().double().chunk(2, 1)
            h = (torch.nn.functional.silu(gate) * up).bfloat16()
            y += share * (h.double() @ self.expert("down", e).T)
        total = (y.bfloat16().float() + middle.float()).bfloat16()
        return total, normed(total, norms[1]).double() @ plain[3].T


class Heads:
    """Pools, rows and places of an attention; `pools` are two alike.

    Args:
        lengths: Of the sequences, the new token included.
        centred: Whether q and k are normed, and keys of int8 centred.
        joined: How many rows, the last ones, are tokens of one sequence.
    """

    def __init__(
        self,
        hidden: int,
        kv: int,
        queries: int,
        dim: int,
        cache: int,
        lengths: Sequence[int],
        centred: bool,
        device: str,
        joined: int = 1,
    ) -> None:
        rows, pages = len(lengths), sum(-(-n // 64) for n in lengths) + 3
        offset = torch.randn(kv, dim, device=device) / 4 if centred and cache == 8 else None
        shape = pages, kv, 64, dim
        if cache == 8:
            k, v = (torch.randint(-100, 100, shape, device=device).to(torch.int8) for _ in "kv")
            k_scale, v_scale = ((torch.rand(kv, device=device) + 0.5) / 40 for _ in "kv")
        else:
            k, v = (torch.randn(shape, device=device).bfloat16() for _ in "kv")
            k_scale = v_scale = None
        v = v.transpose(2, 3).contiguous()
        pool = KVPool(k, v, k_scale, v_scale, k_offset=offset)
        self.pools = pool, replace(pool, k=k.clone(), v=v.clone())
        self.tables = torch.zeros(rows, max(lengths) // 64 + 2, dtype=torch.int32, device=device)
        self.slots = torch.full((rows,), -1, device=device)
        free = torch.randperm(pages, device=device).int()
        for row, n in enumerate(lengths):
            own, free = free.tensor_split([-(-n // 64)])
            self.tables[row, : len(own)] = own
            if n:
                self.slots[row] = own[-1].long() * 64 + (n - 1) % 64
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.positions = (self.lengths.long() - 1).clamp(min=0)
        if joined > 1:
            self.tables[-joined:], own = self.tables[-1].clone(), self.positions[-joined:]
            self.slots[-joined:] = self.tables[-1, own // 64].long() * 64 + own % 64
        angle = torch.rand(max(lengths) + 1, dim // 2, device=device) * 6.28
        self.turn = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        q_norm, k_norm = ((torch.rand(dim, device=device) + 0.5).bfloat16() for _ in "qk")
        self.norms = (q_norm, k_norm) if centred else (None, None)
        self.qkv = 2 * torch.randn(rows, (queries + 2) * kv * dim, device=device).bfloat16()
        self.residual = torch.randn(rows, hidden, device=device).bfloat16()
        self.heads = [kv * queries, kv, kv]
        self.dim = dim

    def inputs(self, pool: KVPool) -> AttentionInputs:
        return AttentionInputs(pool, self.tables, self.lengths, None, self.dim**-0.5)

    def attention(self) -> Attention:
        """Of the first pool."""
        own = self.inputs(self.pools[0])
        return Attention(self.qkv, self.norms, self.turn, self.positions, self.slots, own)

    def expected(self) -> Tensor:
        """In fp64, rounded to bf16; K and V of the new tokens are put into the second pool."""
        pool, rows = self.pools[1], []
        q, k, v = self.qkv.double().unflatten(1, (-1, self.dim)).split(self.heads, 1)
        if self.norms[0] is not None:
            q, k = (
                x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
                for x, norm in zip((q, k), self.norms, strict=True)
            )
        q, k = self.rotated(q).bfloat16().double(), self.rotated(k)
        if pool.k_offset is not None:
            k = k - pool.k_offset.double()
        for row, (n, slot) in enumerate(
            zip(self.lengths.tolist(), self.slots.tolist(), strict=True)
        ):
            if not n:
                rows.append(torch.zeros_like(q[row]))
                continue
            page, at = divmod(slot, 64)
            pool.k[page, :, at] = self.stored(k[row], pool.k_scale).to(pool.k.dtype)
            pool.v[page, :, :, at] = self.stored(v[row], pool.v_scale).to(pool.v.dtype)
            pages = self.tables[row, : -(-n // 64)].long()
            keys = pool.k[pages].double().transpose(0, 1).flatten(1, 2)[:, :n]
            values = pool.v[pages].double().permute(1, 0, 3, 2).flatten(1, 2)[:, :n]
            if pool.k_scale is not None and pool.v_scale is not None:
                keys = keys * pool.k_scale.double()[:, None, None]
                values = values * pool.v_scale.double()[:, None, None]
            own = q[row].unflatten(0, (len(keys), -1))
            weights = (own @ keys.transpose(1, 2) * self.dim**-0.5).softmax(-1)
            rows.append((weights @ values).flatten(0, 1))
        return torch.stack(rows).flatten(1).bfloat16()

    def rotated(self, x: Tensor) -> Tensor:
        cos, sin = (own[self.positions].double()[:, None] for own in self.turn)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    @staticmethod
    def stored(x: Tensor, scale: Tensor | None) -> Tensor:
        return x if scale is None else (x / scale.double()[:, None]).round().clamp(-127, 127)
