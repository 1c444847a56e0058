"""Logits as integers in the order in which a sampler keeps them, and cuts through that order.

A logit and its id make one int64, an element: larger values are larger, of equal ones lower ids,
and no two are equal. Probability is counted in whole 2^-40ths of the largest, so that sums do not
depend on their order. A cut is the largest such integer t with enough elements, or enough of their
mass, at or above it, found by bisection.
"""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**63))  # below every element
ONE = tl.constexpr(2.0**40)  # mass of the largest logit


@triton.jit
def order(x, i):
    """Logits and their ids as int64: larger values are larger, of equal ones lower ids."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0 equals 0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - i).to(tl.int64)


@triton.jit
def value_of(element):
    """The logit of an element."""
    key = (element >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def id_of(element):
    """The id of an element."""
    return 0x7FFFFFFF - (element & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def least_of(x):
    """The least element whose logit is at least x."""
    return order(x, tl.full([], 0x7FFFFFFF, tl.int32))


@triton.jit
def token_of(element, top):
    """The id of an element as int64; -1 where the row's largest logit is infinite."""
    return tl.where(tl.abs(value_of(top)) == float("inf"), -1, id_of(element).to(tl.int64))


@triton.jit
def mass_of(elements, top):
    """exp(x - top) in 2^-40ths, int64; nothing for LOWEST."""
    x = tl.where(elements > LOWEST, value_of(elements), top)
    mass = (tl.exp(tl.where(x == top, 0.0, x - top)) * ONE).to(tl.int64)
    return tl.where(elements > LOWEST, mass, 0)


@triton.jit
def chunk_of(logits, part, V, temperature, CHUNK: tl.constexpr):
    """x and ids of a chunk of a row; a temperature of 0 leaves the logits. NaN becomes infinity."""
    i = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + i, mask=i < V, other=0.0).to(tl.float32)
    if temperature > 0:
        x = tl.div_rn(x, temperature + tl.zeros_like(x))
    x = tl.where(x == x, x, float("inf"))  # false of NaN alone
    return x, i


@triton.jit
def at_least(elements, masses, t):
    """Count and mass of the elements from t up, int64."""
    over = elements >= t
    return tl.sum(over.to(tl.int32), 0).to(tl.int64), tl.sum(tl.where(over, masses, 0), 0)


@triton.jit
def at_least_in_row(logits, V, temperature, top, t, CHUNK: tl.constexpr):
    """`at_least` of a whole row."""
    count, mass = t * 0, t * 0
    for part in range(tl.cdiv(V, CHUNK)):
        x, i = chunk_of(logits, part, V, temperature, CHUNK)
        elements = tl.where(i < V, order(x, i), LOWEST)
        c, s = at_least(elements, mass_of(elements, top), t)
        count += c
        mass += s
    return count, mass


@triton.jit
def cut(
    elements, masses, held, low, high, count, mass, target, by_mass,
    logits, V, temperature, top, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest t with enough at or above it, and what there is: (t, count, mass), int64.

    Args:
        elements, masses: Of a row, all that is at or above `low`, if `held`.
        held: Whether they are; else the row is read (`logits`, `V`, `temperature`, `top`).
        low: Has `count` elements of `mass` at or above it, enough.
        high: Has none.
        target: Enough.
        by_mass: Of mass, else of elements.
    """
    over = count * 0  # elements at or above `high`
    middle = (low >> 1) + (high >> 1) + (low & high & 1)
    found = tl.where(by_mass, mass, count)
    while (middle > low) & (found != target) & (count - over > 1):
        if held:
            c, s = at_least(elements, masses, middle)
        else:
            c, s = at_least_in_row(logits, V, temperature, top, middle, CHUNK)
        f = tl.where(by_mass, s, c)
        if f >= target:
            low, count, mass, found = middle, c, s, f
        else:
            high, over = middle, c
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
    return low, count, mass


@triton.jit
def share_of(mass, top_p):
    """The least whole mass that is at least the share top_p of a mass."""
    exact = mass.to(tl.float64) * top_p.to(tl.float64)
    whole = exact.to(tl.int64)
    return whole + (whole.to(tl.float64) < exact).to(tl.int64)
