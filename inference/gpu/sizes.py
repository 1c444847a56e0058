"""What runs in a step on a GPU, and the size that it is padded to.

A step whose number of tokens is small is padded, so that a CUDA graph captured for one serves many:
first the sequences of one token, as many as the next power of two (or, in a step of more than 32 of
them and nothing else, what is halfway); then, in a step that has others, `PROMPTS` sequences of
`Size.tokens` tokens together. A draft counts as a sequence of one token.

The arrays of a step as one block of bytes: made on the host, moved to the device by one copy.

Memory of a GPU, and what is said where it is too small.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from numpy.typing import NDArray
from torch import Tensor

from formats.errors import EngineError
from formats.memory import available_bytes
from inference.scheduling.work import Work

Shape = tuple[torch.dtype, tuple[int, ...]]
Shapes = Mapping[str, Shape]
Arrays = Mapping[str, NDArray]
BLOCKS = 2  # of each kind: one is written while the other is on its way


class HostBlock:
    """A step's arrays as a block of bytes on the host.

    Args:
        shapes: Type and shape of each.
        pinned: Whether the block is to be moved without waiting.

    Attributes:
        bytes: uint8, one dimension; zero at first.
        arrays: The arrays in it, by name.
        moved: When its bytes have been moved; None if nobody moves them.
    """

    def __init__(self, shapes: Shapes, *, pinned: bool) -> None:
        self.bytes = torch.zeros(_size(shapes), dtype=torch.uint8, pin_memory=pinned)
        self.arrays: Arrays = {k: v.numpy() for k, v in _views(self.bytes, shapes).items()}
        self.moved: torch.cuda.Event | None = None


class HostBlocks:
    """Blocks that are written again and again, in turn; a step's arrays cost no allocation.

    Args:
        pinned: Whether they are to be moved without waiting.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._kinds: dict[Hashable, list[HostBlock]] = {}

    def next(self, kind: Hashable, shapes: Callable[[], Shapes]) -> HostBlock:
        """A block that nobody reads any more; what it holds is of an earlier step of its kind.

        Args:
            kind: All blocks of a kind have the same shapes.
            shapes: What these are, asked for the first of a kind.
        """
        blocks = self._kinds.setdefault(kind, [])
        if len(blocks) < BLOCKS:
            blocks.append(HostBlock(shapes(), pinned=self._pinned))
        else:
            blocks.append(blocks.pop(0))
        if (moved := blocks[-1].moved) is not None and not moved.query():
            moved.synchronize()  # hardly ever: a step is told before the next but one is planned
        return blocks[-1]


class Fields:
    """Named arrays in one block of bytes on the device.

    Args:
        shapes: Type and shape of each.
        device: Where they go.

    Attributes:
        on_device: The arrays there.
    """

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self._bytes = torch.empty(_size(shapes), dtype=torch.uint8, device=device)
        self.on_device = _views(self._bytes, shapes)

    def upload(self, block: Tensor) -> None:
        """Fill the arrays from the bytes of a `HostBlock` of the same shapes; does not wait."""
        self._bytes.copy_(block, non_blocking=True)


def _size(shapes: Shapes) -> int:
    return sum(_padded(dtype, shape) for dtype, shape in shapes.values())


def _padded(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return -(-dtype.itemsize * prod(shape) // 16) * 16


def _views(block: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    found, start = {}, 0
    for name, (dtype, shape) in shapes.items():
        size = dtype.itemsize * prod(shape)
        found[name] = block[start : start + size].view(dtype).view(shape)
        start += _padded(dtype, shape)
    return found


PROMPTS = 8  # sequences of more than one token in a padded step
MOST_TOKENS = 2048  # of them; launching a step of more takes less than running it


@dataclass(frozen=True)
class Size:
    """Rows of a padded step.

    Attributes:
        decodes: Sequences of one token.
        prompts: Sequences of more, after them; 0 if there are none.
        tokens: Of the latter.
    """

    decodes: int
    prompts: int = 0
    tokens: int = 0

    @property
    def sequences(self) -> int:
        """Of one token and of more."""
        return self.decodes + self.prompts


@dataclass(frozen=True)
class WholeSize:
    """Rows of a step that runs as it is, never captured.

    Attributes:
        decodes: Sequences of one token, which come first.
        sequences: Sequences of one token and of more.
        tokens: Tokens of all of them.
        rows: Tokens whose logits are wanted.
        samples: Sequences that get a next token.
    """

    decodes: int
    sequences: int
    tokens: int
    rows: int
    samples: int


def decodes_of(sequences: int) -> Size:
    """The size of a step of so many sequences of one token each."""
    return Size(_halfway(sequences))


def size_of(work: Work) -> Size | None:
    """The padded size of a step; None where it is not to be padded."""
    decodes, prompts = work.singles, len(work) - work.singles
    if not prompts and work.samples.all() and not work.whole.any():
        return decodes_of(decodes)
    tokens = work.tokens - decodes
    read = work.host.any() or work.whole.any() or work.tells  # logits of decodes alone are kept
    if read or prompts > PROMPTS or tokens > MOST_TOKENS:
        return None
    return Size(_power(decodes) if decodes else 0, PROMPTS, _rounded(tokens))


def padded_sizes(sequences: int, most: int, rows: int = 0) -> list[Size]:
    """Sizes of steps of up to so many decodes, of at most so many tokens of prompts, and of both.

    The largest come first: what they need of memory is enough for the others.

    Args:
        sequences: Most decodes.
        most: Most tokens of prompts.
        rows: Decodes and drafts of a step without prompts, where there are more of them.
    """
    alone = {decodes_of(n) for n in range(1, max(sequences, rows) + 1)}
    decodes = sorted({_power(n) for n in range(1, sequences + 1)}, reverse=True)
    tokens = sorted({_rounded(n) for n in range(1, min(most, MOST_TOKENS) + 1)}, reverse=True)
    both = [Size(beside, PROMPTS, count) for count in tokens for beside in (*decodes, 0)]
    return [*sorted(alone, key=lambda size: -size.decodes), *both]


def whole_size(work: Work) -> WholeSize:
    """The size of a step as it is."""
    return WholeSize(
        decodes=work.singles,
        sequences=len(work),
        tokens=work.tokens,
        rows=int(work.rows.sum()),
        samples=int(work.samples.sum()),
    )


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def _halfway(count: int) -> int:
    """The next power of two; above 32, or what is halfway to it."""
    power = _power(count)
    return power * 3 // 4 if power > 32 and count <= power * 3 // 4 else power


def _rounded(tokens: int) -> int:
    """The next of 16, 32, 48, 64, 96, 128, 192, ...: powers of two and what is halfway."""
    return max(16, _halfway(tokens))


OF_WEIGHTS = "quantize the model further, or take a GPU with more memory"
OF_CACHE = (
    "lower the number of requests or their length (max_batch_size, max_model_len, kv_blocks), or "
    "take a scheme with a quantized cache, such as a8w8c8"
)
OF_STEPS = "lower max_batched_tokens, or max_batch_size, max_model_len or kv_blocks"


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that nobody holds, what this process has freed included.

    Of a CPU, which stands for a GPU where Triton interprets, what the system has left.
    """
    if device.type != "cuda":
        return available_bytes()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def ran_out(error: Exception) -> bool:
    """Whether memory ran out: that of torch's allocator, or the driver's, as for a CUDA graph."""
    return isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error)


def too_small(what: str, device: torch.device, free: int, needed: int, remedy: str) -> EngineError:
    """What is raised where memory runs out.

    Args:
        what: What it ran out for.
        device: Where.
        free: Bytes that it had.
        needed: Bytes that are needed at least; 0 where that is not known.
        remedy: What to change.
    """
    wants = f"needs {needed / 1e9:.2f} GB" if needed else "found no more"
    return EngineError(
        f"{device}: memory is too small: {what} {wants}, {free / 1e9:.2f} GB are free; {remedy}"
    )


@contextmanager
def memory_for(what: str, device: torch.device, needed: int, remedy: str) -> Iterator[None]:
    """Tell where a GPU's memory runs out in the block; arguments as in `too_small`.

    Raises:
        EngineError: it did.
    """
    free = free_bytes(device)
    try:
        yield
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise too_small(what, device, free, needed, remedy) from error
