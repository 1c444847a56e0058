"""Which way an all-reduce goes, by the number of ranks and the bytes of a rank's part.

    one_shot   every rank sends its part to all: one trip over the links, the most bytes
    two_shot   a rank sums some rows and sends results: two trips, the fewest bytes
    library    torch's (NCCL, gloo) and the kernel of one GPU after it

Bounds are in bytes of a part, [rows, hidden] in its type, but for the rows of the two-shot kernel,
for which there is room whatever the type. They come from times on 2 and 4 H200s
(NVLink between all, no multicast) in CUDA graphs, microseconds, bf16, hidden 4096:

| rows (bytes)     | 2 GPUs: one shot / two-shot / NCCL | 4 GPUs                |
|------------------|------------------------------------|-----------------------|
| 16 (128 KiB)     | 4.6 / 7.4 / 11.9                   | 7.9 / 10.6 / 15.6     |
| 64 (512 KiB)     | 6.7 / 10.3 / 14.1                  | 14.6 / 10.9 / 20.3    |
| 128 (1 MiB)      | 10.2 / - / 18.2                    | 25.3 / - / 23.6       |
| 256 (2 MiB)      | - / 15 / 33                        | - / 20 / 31           |
| 1024 (8 MiB)     | - / 33 / 52                        | - / 52 / 64           |
| 4096 (32 MiB)    | - / 108 / 138                      | - / 174 / 177         |

"One shot" was a prototype of the kernel here, with residual and norm; "two-shot" torch's own
(`symm_mem.two_shot_all_reduce_`) and NCCL are sums alone. The kernels of this folder on 2 H100s,
with residual, norm and static int8 rows (NCCL: with the kernel of one GPU that does this):

| rows x hidden | bf16: one shot / two-shot / NCCL | int32 parts        |
|---------------|----------------------------------|--------------------|
| 1 x 4096      | 5.2 / 8.3 / 9.8                  | 5.7 / 9.6 / 16.9   |
| 16 x 4096     | 5.7 / 9.4 / 11.1                 | 8.5 / 10.4 / 19.9  |
| 64 x 8192     | 12.1 / 11.7 / 17.7               | 19.6 / 15.0 / 43.6 |
| 1024 x 8192   | - / 71 / 100                     | - / 95 / 239       |

Those of 4 ranks are estimated between 128 and 512 KiB, those of 8 from the bytes that a rank sends,
which grow with their number. Two-shot ends at 64 MiB of floats, or 16, since its memory grows with
that; there it is ahead of NCCL. More rows of integers go through it piece by piece
(`kernels.triton.collective.all_reduce`). A launch takes the host 120 us, more than a piece of 2,048
rows takes two GPUs: in steps of 8,192 tokens of Llama-3-8B's shape, four pieces a sum kept two
H200s busy for 144 ms where one needs 106; in one piece they take 74.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.triton.common import require

Way = Literal["one_shot", "two_shot", "library"]

KIB, MIB = 1 << 10, 1 << 20
MOST_FEW_ROWS = 128  # whose programs all run at once, on a GPU with as many SMs


@dataclass(frozen=True)
class Bounds:
    """Bytes of a part of 16 bits a value up to which a way is taken."""

    one_shot: int
    two_shot: int


BOUNDS = {
    2: Bounds(MIB, 64 * MIB),
    4: Bounds(256 * KIB, 16 * MIB),
    8: Bounds(128 * KIB, 16 * MIB),
}


def bounds_of(ranks: int) -> Bounds:
    """Of a number of ranks.

    Raises:
        ValueError: there are none for so many.
    """
    allowed = ", ".join(map(str, BOUNDS))
    require(
        ranks in BOUNDS,
        f"a sum over {ranks} ranks; the kernels are for {allowed}: start as many, or sum by "
        "torch.distributed",
    )
    return BOUNDS[ranks]


def most_rows_of(ranks: int, hidden: int, most_rows: int) -> tuple[int, int]:
    """The most rows of the one-shot and of the two-shot kernel, in types of 16 bits."""
    bounds, row = bounds_of(ranks), 2 * hidden
    few = min(MOST_FEW_ROWS, max(1, bounds.one_shot // row))
    return min(few, most_rows), min(max(1, bounds.two_shot // row), most_rows)


def choose(ranks: int, nbytes: int, rows: int, few: int, most: int) -> Way:
    """The way of a part of so many bytes, where there is room for `few` and `most` rows."""
    if nbytes <= bounds_of(ranks).one_shot and rows <= few:
        return "one_shot"
    return "two_shot" if rows <= most else "library"
