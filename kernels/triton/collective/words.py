"""How values go from one GPU's memory to another's, and how they are waited for.

Two ways, those of NCCL (its protocols LL and Simple):

- Words. Every 8 bytes that are written carry 4 bytes of data and the number of the exchange. A
  reader knows a word by that number: there is no flag and no fence, at twice the bytes. A grain of
  8 values is cut into pieces of 8 bytes, and a piece is two words, which one store of 16 bytes
  writes. Pieces of one place of their grains follow each other, so that the threads of a warp write
  one stretch.
- Flags. Data as they are, then a fence and a flag; the reader acquires the flag.

Whoever waits gives up after `patience` nanoseconds, leaves 1 + the rank that it waited for in
`fault`, and what of it (`PARTS`, `RESULTS`), and goes on with what is there. Once a fault is set,
others wait for 34 ms alone. It is in the host's memory, and looks of all warps that wait take as
long again: a rank that is late by milliseconds must cause none.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: RUF005  (the compiler knows no starred tuples)
from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.common import ASM

GRAIN = tl.constexpr(8)  # values of a row that a thread has together
KIND = 16  # ranks that a fault has room for; beyond it, what of a rank is waited for
PARTS, RESULTS = tl.constexpr(KIND), tl.constexpr(2 * KIND)  # of the two-shot kernel

# A piece to another GPU: its two halves, each with the number of the exchange.
_PUSH = tl.constexpr("""{ .reg .b64 at;
mad.wide.u32 at, $2, 16, $1;
st.volatile.global.v4.b32 [at], {$3, $5, $4, $5};
mov.b32 $0, 0; }""")

# What is in the place of a piece, and whether it is that of the exchange.
_PEEK = tl.constexpr("""{ .reg .pred good; .reg .b32 a, b; .reg .b64 at;
mad.wide.u32 at, $4, 16, $3;
ld.volatile.global.v4.b32 {$0, a, $1, b}, [at];
setp.eq.b32 good, a, $5;
setp.eq.and.b32 good, b, $5, good;
selp.b32 $2, 1, 0, good; }""")

# After a look that did not find it: give up after so long, sooner once a fault is reported.
_PATIENCE = """mov.u64 now, %globaltimer;
sub.u64 now, now, start;
setp.lt.u64 more, now, 33554432;
@more bra AGAIN;
ld.volatile.global.b32 told, [{fault}];
setp.ne.b32 more, told, 0;
@more bra DONE;
setp.lt.u64 more, now, {patience};
@more bra AGAIN;
st.volatile.global.b32 [{fault}], {peer};
"""

# A piece: what a look has found, or what comes.
_AWAIT_PIECE = tl.constexpr(
    """{ .reg .pred good, more; .reg .b32 low, high, a, b, told; .reg .b64 start, now, at;
mov.b32 low, $2;
mov.b32 high, $3;
setp.ne.b32 good, $4, 0;
@good bra DONE;
mov.u64 start, %globaltimer;
mad.wide.u32 at, $6, 16, $5;
AGAIN:
ld.volatile.global.v4.b32 {low, a, high, b}, [at];
setp.eq.b32 good, a, $7;
setp.eq.and.b32 good, b, $7, good;
@good bra DONE;
"""
    + _PATIENCE.format(fault="$8", patience="$9", peer="$10")
    + "DONE:\nmov.b32 $0, low;\nmov.b32 $1, high; }"
)

_AWAIT_FLAG = tl.constexpr(
    """{ .reg .pred good, more; .reg .b32 found, told; .reg .b64 start, now;
setp.eq.b32 good, $3, 0;
@good bra DONE;
mov.u64 start, %globaltimer;
AGAIN:
ld.acquire.sys.global.b32 found, [$1];
setp.eq.b32 good, found, $2;
@good bra DONE;
"""
    + _PATIENCE.format(fault="$4", patience="$5", peer="$6")
    + "DONE:\nmov.b32 $0, 0; }"
)

# Of one thread, once all threads of its program have written: others see what is written so far
# before what this thread writes from here on.
_FENCE = tl.constexpr("""{ .reg .pred first; .reg .b32 t;
mov.u32 t, %tid.x;
setp.eq.u32 first, t, 0;
@first fence.acq_rel.sys;
mov.b32 $0, 0; }""")
_RAISE = tl.constexpr("""{ .reg .pred first; .reg .b32 t;
mov.u32 t, %tid.x;
setp.eq.u32 first, t, 0;
@first st.relaxed.sys.global.b32 [$1], $2;
mov.b32 $0, 0; }""")


@triton.jit
def load_grains(x, j, WORDS: tl.constexpr):
    """Grains j [E] of a row in memory, a pointer to int32: tuple of WORDS of int32 [E]."""
    words = ()
    for k in tl.static_range(0, WORDS, 4):
        four = tl.load(x + j[:, None] * WORDS + k + tl.arange(0, 4)[None, :])
        even, odd = four.reshape(j.shape[0], 2, 2).split()
        a, c = even.split()
        b, d = odd.split()
        words = words + (a, b, c, d)
    return words


@triton.jit
def push(place, words, j, grains, epoch):
    """Write grains j to a row's place in the words of another GPU, two words a piece."""
    for k in tl.static_range(0, len(words), 2):
        at = k // 2 * grains + j
        if ASM:
            tl.inline_asm_elementwise(
                _PUSH, "=r,l,r,r,r,r", [place, at, words[k], words[k + 1], epoch],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            number = epoch.to(tl.int64) << 32
            tl.store(place + at * 2, (words[k].to(tl.int64) & 0xFFFFFFFF) | number)
            tl.store(place + at * 2 + 1, (words[k + 1].to(tl.int64) & 0xFFFFFFFF) | number)


@triton.jit
def peek(place, j, grains, epoch, WORDS: tl.constexpr):
    """What is there now; the loads of several ranks are on their way at once."""
    found = ()
    if ASM:
        for k in tl.static_range(WORDS // 2):
            low, high, good = tl.inline_asm_elementwise(
                _PEEK, "=r,=r,=r,l,r,r", [place, k * grains + j, epoch],
                dtype=(tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
            )  # fmt: skip
            found = found + (low, high, good)
    return found


@triton.jit
def receive(found, place, j, grains, epoch, fault, patience, peer, WORDS: tl.constexpr):
    """The grains of a rank, of which `peek` found what was there: tuple of int32 [E]."""
    words = ()
    for k in tl.static_range(WORDS // 2):
        at = k * grains + j
        if ASM:
            low, high = tl.inline_asm_elementwise(
                _AWAIT_PIECE, "=r,=r,r,r,r,l,r,r,l,l,r",
                [found[3 * k], found[3 * k + 1], found[3 * k + 2], place, at, epoch, fault,
                 patience, peer + 1],
                dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
            )  # fmt: skip
        else:
            low, high = _await_piece(place + at * 2, epoch, fault, patience, peer)
        words = words + (low, high)
    return words


@triton.jit
def _await_piece(there, epoch, fault, patience, peer):
    """As the assembly does it; a look counts as a microsecond."""
    low, high = tl.load(there, volatile=True), tl.load(there + 1, volatile=True)
    looks = patience // 1000
    while tl.max((((low >> 32) != epoch) | ((high >> 32) != epoch)).to(tl.int32), 0) > 0:
        low, high = tl.load(there, volatile=True), tl.load(there + 1, volatile=True)
        looks = _looks_left(looks, fault, peer)
        if looks == 0:
            break
    return low.to(tl.int32), high.to(tl.int32)


@triton.jit
def _looks_left(looks, fault, peer):
    """After one more look in vain."""
    if looks % 1000 == 0 and tl.load(fault) != 0:
        return looks * 0
    if looks == 1:
        tl.store(fault, peer + 1)
    return looks - 1


@triton.jit
def await_flag(place, epoch, needed, fault, patience, peer):
    """Wait until a flag, or each of some, is `epoch`, where it is `needed`."""
    if ASM:
        tl.inline_asm_elementwise(
            _AWAIT_FLAG, "=r,l,r,r,l,l,r", [place, epoch, needed, fault, patience, peer + 1],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        looks = patience // 1000
        late = tl.max(tl.where((needed != 0) & (tl.load(place) != epoch), peer + 1, 0))
        while late > 0:
            looks = _looks_left(looks, fault, late - 1)
            late = tl.max(tl.where((needed != 0) & (tl.load(place) != epoch), peer + 1, 0))
            if looks == 0:
                break


@triton.jit
def fence(epoch):
    """All that the threads of this program have written can be read before what follows."""
    tl.debug_barrier()
    if ASM:
        tl.inline_asm_elementwise(_FENCE, "=r,r", [epoch], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def raise_flag(place, epoch):
    """Set a flag, after `fence`."""
    if ASM:
        tl.inline_asm_elementwise(
            _RAISE, "=r,l,r", [place, epoch], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(place, epoch)


@triton.jit
def count(turns, epoch):
    """Keep the number of this exchange, once every thread of the program has read the last one.

    Each warp reads it for itself. Where the first writes the next number before another has read,
    that one sends and awaits words of an exchange that no rank is at.
    """
    tl.debug_barrier()
    tl.store(turns, epoch)


@triton.jit
def values_of(words, TYPE: tl.constexpr):
    """The values of grains, in order: tuple of 8 [E], int32, or fp32 of a type of 16 bits."""
    values = ()
    for k in tl.static_range(len(words)):
        if TYPE.is_int():
            values = values + (words[k],)
        else:
            low = words[k].to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
            high = (words[k] >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
            values = values + (low, high)
    return values


@triton.jit
def together(v):
    """The row of 8 E values of which a tuple has those of each place of grains."""
    E: tl.constexpr = v[0].shape[0]
    low = tl.join(tl.join(v[0], v[2]), tl.join(v[1], v[3])).reshape(E, 4)
    high = tl.join(tl.join(v[4], v[6]), tl.join(v[5], v[7])).reshape(E, 4)
    return tl.join(low, high).permute(0, 2, 1).reshape(E * 8)
