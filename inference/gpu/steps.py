"""A step on a GPU, planned on the host: its size, and its arrays as one block of bytes.

Who executes a plan looks at nothing else: no slice, no sequence, no table of blocks.

Rows of a padded step that stand for no sequence have length 0, are written nowhere and keep their
tokens at an index beyond the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference.gpu.edit_tables import NewEdits
from inference.gpu.fields import Arrays, Shape
from inference.gpu.sizes import Size, WholeSize
from inference.scheduling.batch import DRAW_TYPES, Ints, RunningBatch
from inference.scheduling.sequence import Draw
from inference.scheduling.work import Work
from inference.transformers_code.state_rows import SPARE, Piece

OF_TOKENS = ("ids", "positions", "slots", "batch_index")  # int64
GREEDY = asdict(Draw())
DRAWS = {name: torch.from_numpy(np.zeros(0, own)).dtype for name, own in DRAW_TYPES.items()}


@dataclass(frozen=True)
class LogprobRows:
    """Rows of a step whose log probabilities are returned.

    Attributes:
        logits: int64, the rows among those of logits.
        tokens: int64, the rows among those of next tokens.
        count: How many of the likeliest tokens each needs at most.
    """

    logits: Tensor
    tokens: Tensor
    count: int


@dataclass(frozen=True)
class StepPlan:
    """A step as the device gets it.

    Attributes:
        size: Says which arrays there are, and of which shapes.
        block: The arrays: uint8 on the host.
        logprobs: Whose log probabilities are returned; None where nobody wants them.
        edits: What is put into the device's tables before it runs; None where nothing is.
        wanted: int64, the tokens whose logits are wanted, of a size that keeps the rows of all.
        pieces: Of a step that runs as it is: its tokens as modules that keep a state take them.
            (One that is padded has them among its arrays.)
    """

    size: Size | WholeSize
    block: Tensor
    logprobs: LogprobRows | None = None
    edits: NewEdits | None = None
    wanted: Tensor | None = None
    pieces: Sequence[Piece] = ()


def step_shapes(size: Size | WholeSize, width: int) -> dict[str, Shape]:
    """Types and shapes of a step's arrays, for sequences of so many blocks at most."""
    tokens = size.decodes + size.tokens if isinstance(size, Size) else size.tokens
    slots = {"adapters": (torch.int32, (tokens,))} if size.adapted else {}
    if isinstance(size, Size):
        return padded_shapes(size, width) | slots
    return slots | {
        **shapes_of(size.tokens, size.sequences, size.samples, width),
        "rows": (torch.int64, (size.rows,)),
        "samples": (torch.int64, (size.samples,)),
        "query_start": (torch.int32, (size.sequences + 1,)),
    }


def shapes_of(tokens: int, sequences: int, samples: int, width: int) -> dict[str, Shape]:
    """Types and shapes of what every step has."""
    return {
        **dict.fromkeys(OF_TOKENS, (torch.int64, (tokens,))),
        "tables": (torch.int32, (sequences, width)),
        "lengths": (torch.int32, (sequences,)),
        "sample_index": (torch.int64, (samples,)),
        **{name: (dtype, (samples,)) for name, dtype in DRAWS.items()},
        "steps": (torch.int64, (samples,)),
        **dict.fromkeys(("bias_start", "bias_end", "mask_row"), (torch.int32, (samples,))),
    }


def padded_shapes(size: Size, width: int) -> dict[str, Shape]:
    """Types and shapes of a padded step's arrays; of its prompts' too where it has any."""
    shapes = shapes_of(size.decodes + size.tokens, size.sequences, size.sequences, width)
    if size.prompts:
        shapes["rows"] = (torch.int64, (size.sequences,))
        shapes["query_start"] = (torch.int32, (size.sequences + 1,))
    if size.pieces is not None:
        shapes |= dict.fromkeys(("piece_tokens", "piece_keeps"), (torch.int64, size.pieces))
    return shapes


def write_step(arrays: Arrays, work: Work, size: Size | WholeSize) -> None:
    """Write a step's arrays; what they held is overwritten, but for blocks after the last of all.

    Args:
        arrays: Of `step_shapes`.
        work: Sequences of one token first.
        size: From `size_of` or `whole_size`, or one at least as large.
    """
    if isinstance(size, WholeSize):
        write_whole(arrays, work, size)
    else:
        write_padded(arrays, work, size)


def write_padded(arrays: Arrays, work: Work, size: Size) -> None:
    """Write a padded step; the sample of slice i is in row `places(work, size)[i]`."""
    ones, gap = work.singles, size.decodes
    blank = GREEDY | {
        "slots": -1,
        "mask_row": -1,
        "adapters": -1,
        **dict.fromkeys(("batch_index", "sample_index"), work.batch.spare),
    }
    own = _of_slices(work, adapted=size.adapted) | _of_draws(work, slice(None))
    for name, values in own.items():
        array, rest = arrays[name], gap + len(values) - ones
        array[:ones], array[gap:rest] = values[:ones], values[ones:]
        array[ones:gap] = array[rest:] = blank.get(name, 0)
    write_tables(arrays["tables"], work.batch, work.places[:ones])
    if size.prompts:
        write_tables(arrays["tables"][gap:], work.batch, work.places[ones:])
        _write_starts(arrays["query_start"], arrays["rows"], work, size)
    if size.pieces is not None:
        arrays["piece_tokens"][:], arrays["piece_keeps"][:] = size.decodes - 1, SPARE


def write_pieces(arrays: Arrays, pieces: Sequence[Piece]) -> None:
    """Write the pieces of a padded step of drafts. What is left of them is of the last row: it
    stands for no token where there are fewer tokens than rows."""
    for i, piece in enumerate(pieces):
        count = len(piece.tokens)
        arrays["piece_tokens"][i, :count] = piece.tokens
        if piece.keeps is not None:
            arrays["piece_keeps"][i, :count] = piece.keeps


def write_moved(arrays: Arrays, work: Work) -> None:
    """Write where the tokens of a step of single tokens stand, and which they are.

    Args:
        arrays: A padded step's, which hold all else of this work (`Work.moved`) already.
        work: What runs.
    """
    made = work.starts + 1 - work.batch.prompt[work.places]
    for name, values in (_of_slices(work) | {"steps": np.maximum(made, 0)}).items():
        arrays[name][: len(work)] = values


def _write_starts(starts: NDArray, rows: NDArray, work: Work, size: Size) -> None:
    """Write where the tokens of sequences begin, and the rows of their last."""
    gap, ends = size.decodes, size.decodes + np.cumsum(work.counts[work.singles :])
    starts[: gap + 1], rows[:gap] = np.arange(gap + 1), np.arange(gap)
    starts[gap + 1 :], rows[gap:] = ends[-1] if len(ends) else gap, 0
    starts[gap + 1 : gap + 1 + len(ends)], rows[gap : gap + len(ends)] = ends, ends - 1


def places(work: Work, size: Size | WholeSize) -> Ints:
    """The row of each one's next token among those that a step of a size gives."""
    if isinstance(size, WholeSize):
        return np.cumsum(work.samples) - work.samples
    rows = np.arange(len(work))
    rows[work.singles :] += size.decodes - work.singles
    return rows


def wanted_tokens(work: Work, size: Size | WholeSize) -> Tensor | None:
    """The tokens whose logits are wanted, where a padded step keeps the rows of all."""
    if isinstance(size, WholeSize) or not size.every:
        return None
    found = work.wanted
    return torch.from_numpy(
        np.where(found < work.singles, found, found + size.decodes - work.singles)
    )


def logprob_rows(work: Work, size: Size | WholeSize) -> LogprobRows | None:
    """Whose log probabilities the device tells, in the order of the slices."""
    which = work.logprobs >= 0
    if not which.any():
        return None
    logits, tokens = (np.cumsum(work.rows) - 1)[which], places(work, size)[which]
    return LogprobRows(torch.from_numpy(logits), torch.from_numpy(tokens), int(work.logprobs.max()))


def write_whole(arrays: Arrays, work: Work, size: WholeSize) -> None:
    """Write a step as it is."""
    ends, samples = np.cumsum(work.counts), np.flatnonzero(work.samples)
    own = _of_slices(work, adapted=size.adapted) | _of_draws(work, samples)
    for name, values in own.items():
        arrays[name][:] = values
    write_tables(arrays["tables"], work.batch, work.places)
    arrays["rows"][:] = work.wanted
    arrays["samples"][:] = np.cumsum(work.rows)[samples] - 1
    arrays["query_start"][0], arrays["query_start"][1:] = 0, ends


def _of_slices(work: Work, *, adapted: bool = False) -> dict[str, NDArray]:
    """Where tokens stand, and the adapters that they run with."""
    own = work.laid_out()
    slots = {"adapters": work.adapters} if adapted else {}
    return slots | {
        "ids": own.ids,
        "positions": own.positions,
        "slots": own.slots,
        "batch_index": own.owners,
        "lengths": own.contexts,
    }


def _of_draws(work: Work, which: Ints | slice) -> dict[str, NDArray]:
    """How the next tokens of sequences are chosen, and where they are kept."""
    batch, owners = work.batch, work.places[which]
    made = work.starts[which] + work.counts[which] - batch.prompt[owners]
    late = (made >= batch.terms.bias_until[owners]).astype(np.int64)
    here = work.samples[which] & ~work.host[which]
    spans = batch.terms.bias_spans[owners, late] * here[:, None]
    masked = work.masked
    return {
        "bias_start": spans[:, 0],
        "bias_end": spans[:, 1],
        "mask_row": np.where(masked, np.cumsum(masked) - 1, -1)[which],
        "sample_index": np.where(work.samples[which], owners, batch.spare),
        "steps": np.maximum(made, 0),
        **{name: column[owners] for name, column in batch.terms.draws.items()},
    }


def write_tables(rows: NDArray, batch: RunningBatch, places: Ints) -> None:
    """Write which blocks sequences have, from the first row on."""
    if len(places):
        widest = int(batch.held[places].max())
        rows[: len(places), :widest] = batch.tables[:, :widest][places]
