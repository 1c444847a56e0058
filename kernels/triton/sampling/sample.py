"""The next token of every row of logits, on the device: greedy, or drawn from the likely ones.

    x = (logits, edited) / temperature;  keep the top_k largest;  of those the fewest whose
    probabilities, relative to what top_k kept, sum to at least top_p;  of those the ones with
    x >= max x + log min_p;  token = argmax over the kept of x_i - log E_i,  E_i exponential noise
    of (seed, step, i)

which draws i with probability exp(x_i) / sum (Gumbel; noise by Philox4x32-7, Salmon et al. 2011).
The noise depends on the request's seed and its step alone, so that a request's tokens do not depend
on its batch. Semantics of top_k, top_p and min_p are those of `inference.scheduling.sampler`.

Nothing is sorted: `kernels.triton.sampling.logits` has the integers that stand for logits, and how
they are cut.

Two launches. `scan_kernel`: a program a chunk of a row edits it (`edits`) and finds its largest
element (greedy), or the largest x - log E where nothing is cut; the last program of a row has the
token. Where there is a cut it leaves the largest of each group of neighbours instead, and the row's
last program bisects those: a t that already has enough of group maxima at or above it bounds the
cut from below; min_p alone needs no bisection. `draw_kernel` (rows with a cut alone) gathers what
reaches the bound, mostly a few more than are kept; the last program bisects these in registers. If
they are more than `HELD`, as of nearly even probabilities, every step of the bisection reads the
row, which is slow and right.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import Workspace, require
from kernels.triton.sampling.logits import (
    LISTED,
    LOWEST,
    ONE,
    Edits,
    at_least,
    chunk_of,
    cut,
    edit,
    id_of,
    least_of,
    mass_of,
    order,
    share_of,
    token_of,
    value_of,
)

CHUNK = 4096  # logits of a program
HELD = 4096  # elements that a program bisects in registers
WARPS = 16
ROUNDS = tl.constexpr(7)
# int64 of a row in the workspace: what is known of it, then of its chunks, then elements.
TOP, BOUND, COUNT, MASS, TOTAL, HEAD = (tl.constexpr(i) for i in (0, 1, 2, 3, 4, 8))


@triton.jit
def noisy(x, i, seed, step):
    """x - log E, E = -log(1 - v) of a uniform v of 32 bits, exact where v is small."""
    zero = tl.zeros_like(i)
    low, high = step.to(tl.int32), (step >> 32).to(tl.int32)
    bits, _, _, _ = tl.philox(seed, i, zero + low, zero + high, zero, ROUNDS)
    v = (bits.to(tl.float32) + 0.5) * (2.0**-32)
    series = v * (1.0 + v * (0.5 + v * (0.3333333333 + v * 0.25)))
    return x - tl.log(tl.where(v < 0.0078125, series, -tl.log(1.0 - v)))


@triton.jit
def bound_of(
    largest, tops, sums, p, top, by_count, top_k, top_p, floor,
    logits, V, temperature, PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What no kept element of a row is below.

    `largest` are of groups of neighbours, `tops` of chunks p, whose masses beside them `sums` has.
    """
    most = value_of(top)
    masses = mass_of(largest, most)
    count, mass = at_least(largest, masses, LOWEST + 1)
    whole = tl.load(sums + p, mask=p < PARTS, other=0, cache_modifier=".cg")
    whole = tl.sum(whole.to(tl.float32) * (mass_of(tops, most).to(tl.float32) / ONE), 0)
    # Somewhat more than the share, since the sum is rounded here.
    target = tl.where(by_count, top_k.to(tl.int64), (whole * top_p * 1.0001).to(tl.int64))
    bound = top * 0 + LOWEST
    if not (by_count | (top_p < 1.0)):
        bound = least_of(most + floor)
    elif tl.where(by_count, count, mass) >= target:
        bound, _, _ = cut(
            largest, masses, True, bound, top + 1, count, mass, target, not by_count,
            logits, V, temperature, most, CHUNK,
        )  # fmt: skip
    return bound


@triton.jit
def scan_kernel(
    logits, temperatures, top_ks, top_ps, floors, seeds, steps, out, state, arrivals, V, size,
    ids, values, masks, lists, starts, ends, mask_rows,
    EDITS: tl.constexpr, LISTED: tl.constexpr, WORDS: tl.constexpr,
    PARTS: tl.constexpr, SPAN: tl.constexpr, CHUNK: tl.constexpr, HELD: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Program (chunk, row); PARTS chunks, SPAN of them with the empty ones up to a power of two."""
    part, row = tl.program_id(0), tl.program_id(1)
    temperature, top_p = tl.load(temperatures + row), tl.load(top_ps + row)
    top_k = tl.load(top_ks + row)
    by_count = (top_k > 0) & (top_k < V)
    drawn = temperature > 0
    floor = tl.load(floors + row)
    limited = drawn & (by_count | (top_p < 1.0) | (floor > float("-inf")))
    own = state + row.to(tl.int64) * size
    tops, sums, groups = own + HEAD, own + HEAD + SPAN, own + HEAD + 2 * SPAN
    if EDITS:
        edit(
            logits + row.to(tl.int64) * V, row, part, V,
            ids, values, masks, lists, starts, ends, mask_rows, LISTED, WORDS, CHUNK,
        )  # fmt: skip
    x, i = chunk_of(logits + row.to(tl.int64) * V, part, V, temperature, CHUNK)
    if drawn and not limited:
        x = noisy(x, i, tl.load(seeds + row), tl.load(steps + row))
    elements = tl.where(i < V, order(x, i), LOWEST)
    top = tl.max(elements, 0)
    tl.store(tops + part, top)
    if limited:
        largest = tl.max(tl.reshape(elements, [CHUNK // GROUP, GROUP]), 1)
        place = part * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
        tl.store(groups + place, largest)
        tl.store(sums + part, tl.sum(mass_of(elements, value_of(top)), 0))
    tl.debug_barrier()
    last = tl.atomic_add(arrivals + row, 1, sem="acq_rel") == PARTS - 1
    if last:
        tl.debug_barrier()
        p = tl.arange(0, SPAN)
        each = tl.load(tops + p, mask=p < PARTS, other=LOWEST, cache_modifier=".cg")
        top = tl.max(each, 0)
        tl.store(arrivals + row, 0)
        if limited:
            j = tl.arange(0, HELD)
            real = j < PARTS * (CHUNK // GROUP)
            largest = tl.load(groups + j, mask=real, other=LOWEST, cache_modifier=".cg")
            bound = bound_of(
                largest, each, sums, p, top, by_count, top_k, top_p, floor,
                logits, V, temperature, PARTS, CHUNK,
            )  # fmt: skip
            tl.store(own + TOP, top)
            tl.store(own + BOUND, bound)
            tl.store(own + COUNT, 0)
            tl.store(own + MASS, 0)
            tl.store(own + TOTAL, 0)
        else:
            tl.store(out + row, token_of(top, top))


@triton.jit
def best_of(elements, low, seed, step):
    """The largest x - log E of the elements from `low` up."""
    i = id_of(elements)
    kept = (elements >= low) & (elements > LOWEST)
    x = tl.where(kept, value_of(elements), 0.0)
    return tl.max(tl.where(kept, order(noisy(x, i, seed, step), i), LOWEST), 0)


@triton.jit
def best_of_row(line, low, seed, step, V, temperature, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    """The largest noisy logit of a row's elements from `low` on, read again chunk by chunk."""
    best = low * 0 + LOWEST
    for part in range(PARTS):
        x, i = chunk_of(line, part, V, temperature, CHUNK)
        elements = tl.where(i < V, order(x, i), LOWEST)
        best = tl.maximum(best, best_of(elements, low, seed, step))
    return best


@triton.jit
def cut_twice(
    few, masses, held, low, top, count, mass, total, by_count, top_k, top_p,
    line, V, temperature, most, CHUNK: tl.constexpr,
):  # fmt: skip
    """Where top_k, then top_p cut `count` elements from `low` up, which have `mass` of `total`."""
    for turn in range(2):
        by_mass = turn == 1
        wanted = (by_mass & (top_p < 1.0)) | (by_count & (turn == 0))
        if wanted:
            share = share_of(tl.where(by_count, mass, total), top_p)
            low, count, mass = cut(
                few, masses, held, low, top + 1, count, mass,
                tl.where(by_mass, share, top_k.to(tl.int64)), by_mass,
                line, V, temperature, most, CHUNK,
            )  # fmt: skip
    return low


@triton.jit
def draw_kernel(
    logits, temperatures, top_ks, top_ps, floors, seeds, steps, out, state, arrivals, V, size,
    PARTS: tl.constexpr, SPAN: tl.constexpr, CHUNK: tl.constexpr, HELD: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Program (chunk, row), after `scan_kernel`."""
    part, row = tl.program_id(0), tl.program_id(1)
    temperature, top_p = tl.load(temperatures + row), tl.load(top_ps + row)
    top_k = tl.load(top_ks + row)
    by_count = (top_k > 0) & (top_k < V)
    floor = tl.load(floors + row)
    cutting = by_count | (top_p < 1.0)
    if (temperature > 0) & (cutting | (floor > float("-inf"))):
        own = state + row.to(tl.int64) * size
        line, candidates = logits + row.to(tl.int64) * V, own + HEAD + 2 * SPAN
        top, bound = tl.load(own + TOP), tl.load(own + BOUND)
        most = value_of(top)
        x, i = chunk_of(line, part, V, temperature, CHUNK)
        elements = tl.where(i < V, order(x, i), LOWEST)
        masses = mass_of(elements, most)
        likely = (elements >= bound) & (i < V)
        number = likely.to(tl.int32)
        first = tl.atomic_add(own + COUNT, tl.sum(number, 0).to(tl.int64), sem="relaxed")
        tl.atomic_add(own + MASS, tl.sum(tl.where(likely, masses, 0), 0), sem="relaxed")
        tl.atomic_add(own + TOTAL, tl.sum(masses, 0), sem="relaxed")
        place = first + tl.cumsum(number, 0) - 1
        tl.store(candidates + place, elements, mask=likely & (place < HELD))
        tl.debug_barrier()
        last = tl.atomic_add(arrivals + row, 1, sem="acq_rel") == PARTS - 1
        if last:
            tl.debug_barrier()
            tl.store(arrivals + row, 0)
            count = tl.load(own + COUNT, cache_modifier=".cg")
            mass = tl.load(own + MASS, cache_modifier=".cg")
            total = tl.load(own + TOTAL, cache_modifier=".cg")
            low = bound
            enough = by_count | (not cutting) | (mass >= share_of(total, top_p))
            if not enough:  # what bounds the cut was rounded
                low, count, mass = low * 0 + LOWEST, count * 0 + V, total
            held = enough & (count <= HELD)
            j = tl.arange(0, HELD)
            there = j < tl.where(held, count, 0)
            few = tl.load(candidates + j, mask=there, other=LOWEST, cache_modifier=".cg")
            few_masses = mass_of(few, most)
            low = cut_twice(
                few, few_masses, held, low, top, count, mass, total, by_count, top_k, top_p,
                line, V, temperature, most, CHUNK,
            )  # fmt: skip
            low = tl.maximum(low, least_of(most + floor))
            seed, step = tl.load(seeds + row), tl.load(steps + row)
            if held:
                best = best_of(few, low, seed, step)
            else:
                best = best_of_row(line, low, seed, step, V, temperature, PARTS, CHUNK)
            tl.store(own + BOUND, low)
            tl.store(out + row, token_of(best, top))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    steps: Tensor,
    workspace: Workspace,
    *,
    log_min_p: Tensor | None = None,
    edits: Edits | None = None,
) -> Tensor:
    """One token a row.

    Args:
        logits: fp32, bf16 or fp16 [B, V], contiguous; -inf for tokens that may not come. Rows that
            are edited are so in place.
        temperature: fp32 [B]; 0 for the largest logit, of equals the lowest id.
        top_k: int32 [B], most tokens to keep; 0 for all.
        top_p: fp32 [B], in (0, 1]; 1 for all.
        seeds: int64 [B], of the requests.
        steps: int64 [B], how many tokens each has made.
        workspace: Of the stream that this runs in.
        log_min_p: fp32 [B], log of min_p; -inf for all, as by default.
        edits: Biases and masks.

    Returns:
        int64 [B]; -1 where a row holds NaN or infinity, or no token may come.

    Raises:
        ValueError: a shape or type does not fit, or the workspace is too small.
    """
    require(
        logits.dim() == 2 and logits.is_contiguous() and logits.dtype.is_floating_point,
        f"logits are {logits.dtype} {tuple(logits.shape)}; needed is float [B, V], contiguous",
    )
    rows, vocabulary = logits.shape
    if log_min_p is None:
        log_min_p = torch.full((rows,), -torch.inf, device=logits.device)
    for name, t, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("log_min_p", log_min_p, torch.float32),
        ("seeds", seeds, torch.int64),
        ("steps", steps, torch.int64),
    ):
        fits = t.shape == (rows,) and t.dtype == dtype and t.is_contiguous()
        require(fits, f"{name} is {t.dtype} {tuple(t.shape)}; needed is {dtype} ({rows},)")
    if edits is not None:
        edits.check(rows, vocabulary)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    each = (logits, temperature, top_k, top_p, log_min_p, seeds, steps, out)
    _launch(each, workspace, edits)
    return out


def _launch(each: tuple[Tensor, ...], workspace: Workspace, edits: Edits | None) -> None:
    """Run the kernels on what `sample` has checked, as many rows at once as the workspace holds."""
    (rows, vocabulary), out = each[0].shape, each[-1]
    parts = triton.cdiv(vocabulary, CHUNK)
    span = triton.next_power_of_2(parts)
    size = HEAD.value + 2 * span + HELD
    workspace.check(2 * size, 1)
    most = min(workspace.parts.numel() // (2 * size), workspace.arrivals.numel())  # rows at once
    shape = {
        "PARTS": parts, "SPAN": span, "CHUNK": CHUNK, "HELD": HELD,
        "GROUP": triton.next_power_of_2(triton.cdiv(parts * CHUNK, HELD)), "num_warps": WARPS,
        "enable_fp_fusion": True,
    }  # fmt: skip
    for start in range(0, rows, most):
        own = [t[start : start + most] for t in each]
        own += [workspace.parts.view(torch.int64), workspace.arrivals, vocabulary, size]
        listed = (out,) * 7 if edits is None else edits.rows(start, start + most)
        grid = (parts, len(own[0]))
        scan_kernel[grid](
            *own, *listed,
            EDITS=edits is not None, LISTED=LISTED, WORDS=triton.cdiv(vocabulary, 32), **shape,
        )  # fmt: skip
        draw_kernel[grid](*own, **shape)
