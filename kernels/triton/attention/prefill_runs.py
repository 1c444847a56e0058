"""The end of a program of prefill attention: its sums are its rows, or a part of them, a run's.

`kernels.triton.attention.decode` does the same with rows and columns exchanged.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention.paged_cache import LOWEST, PER_TOKEN, finish


@triton.jit
def leave_run(
    m, l, acc, parts, arrivals, item, split, r, d, runs, SPLITS: tl.constexpr  # noqa: E741
):  # fmt: skip
    """Leave a run's sums [ROWS, WIDE]; the last of its tile and head gets those of all runs.

    Returns:
        (whether the caller is last, l, acc), the sums only if it is.
    """
    ROWS: tl.constexpr = acc.shape[0]
    WIDE: tl.constexpr = acc.shape[1]
    run: tl.constexpr = ROWS * (WIDE + 2)  # a run's acc, m and l
    cells = r[:, None] * WIDE + d[None, :]
    place = parts + (item * SPLITS + split).to(tl.int64) * run
    tl.store(place + cells, acc)
    tl.store(place + ROWS * WIDE + r, m)
    tl.store(place + ROWS * WIDE + ROWS + r, l)
    tl.debug_barrier()
    last = tl.atomic_add(arrivals + item, 1, sem="acq_rel") == runs - 1
    if last:
        tl.debug_barrier()
        place = parts + (item * SPLITS).to(tl.int64) * run
        m = tl.full([ROWS], LOWEST, tl.float32)
        l = tl.zeros([ROWS], tl.float32)  # noqa: E741
        acc = tl.zeros([ROWS, WIDE], tl.float32)
        for i in range(runs):
            own = place + i * run
            part_m = tl.load(own + ROWS * WIDE + r, cache_modifier=".cg")
            part_l = tl.load(own + ROWS * WIDE + ROWS + r, cache_modifier=".cg")
            top = tl.maximum(m, part_m)
            old, new = tl.exp2(m - top), tl.exp2(part_m - top)
            l = l * old + part_l * new  # noqa: E741
            part = tl.load(own + cells, cache_modifier=".cg")
            acc = acc * old[:, None] + part * new[:, None]
            m = top
        tl.store(arrivals + item, 0)
    return last, l, acc


@triton.jit
def store_rows(
    l, acc, v_scale, out, out_scale, head, cells, inside,  # noqa: E741
    SCALES: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """Divide sums of rows by those of their weights, which LIFT is in, and store them."""
    unit = 1.0
    if SCALES == PER_TOKEN:
        unit = 1.0 / LIFT
    elif SCALES > 0:
        unit = tl.load(v_scale + head)
    y = acc * tl.where(l > 0, unit / l, 0.0)[:, None]
    tl.store(out + cells, finish(y, out, out_scale), mask=inside)
