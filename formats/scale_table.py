"""The scale table: every scale of a checkpoint with its origin.

Calibration produces it, the writer and the loader check it against the tensors. On disk it is
`quant/scale_table.json`; in a notebook, `ScaleTable.to_pandas()`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor

from formats.documents import Strict, parse
from formats.errors import CheckpointError
from formats.namespace import later

with later():
    import pandas as pd

Role = Literal["weight", "input", "input_sink", "k_cache", "v_cache"]
TOGETHER = 32  # scales that are read at once


class ScaleEntry(Strict):
    """One scale tensor and its provenance.

    Attributes:
        module: Full name of the linear layer, or of the attention for the cache's scales.
        role: What the scale belongs to.
        dtype: Quantized type, such as `int8`.
        granularity: `per_channel`, `per_tensor`, `per_head`.
        shape: Shape of the scale tensor.
        tensor: Its name in the checkpoint.
        scale_min: Smallest scale, exactly as stored in fp32.
        scale_max: Largest scale, exactly as stored in fp32.
        statistic: How the clipping range was found, such as `absmax` or `percentile`.
        absmax: Largest magnitude that was seen.
        tokens: Tokens that it was seen on; 0 for weights.
        clip_fraction: Share of the values beyond the range.
        sqnr_db: Signal-to-quantization-noise ratio in dB; None where nothing was lost or
            measured.
    """

    module: str
    role: Role
    dtype: str
    granularity: str
    shape: tuple[int, ...]
    tensor: str
    scale_min: float = Field(gt=0, allow_inf_nan=False)
    scale_max: float = Field(gt=0, allow_inf_nan=False)
    statistic: str
    absmax: float = Field(ge=0, allow_inf_nan=False)
    tokens: int = Field(ge=0)
    clip_fraction: float = Field(ge=0, le=1)
    sqnr_db: float | None

    @classmethod
    def of(
        cls,
        tensor: str,
        role: Role,
        scale: Tensor,
        *,
        dtype: str,
        granularity: str,
        statistic: str,
        absmax: float,
        tokens: int = 0,
        clip_fraction: float = 0.0,
        sqnr_db: float | None = None,
    ) -> ScaleEntry:
        """The row of a tensor of scales; defaults stand for what was not measured."""
        return cls(
            module=tensor.rpartition(".")[0],
            role=role,
            dtype=dtype,
            granularity=granularity,
            shape=tuple(scale.shape),
            tensor=tensor,
            scale_min=scale.min().item(),
            scale_max=scale.max().item(),
            statistic=statistic,
            absmax=absmax,
            tokens=tokens,
            clip_fraction=clip_fraction,
            sqnr_db=sqnr_db,
        )


def unmeasured_entry(
    tensor: str,
    role: Role,
    scale: Tensor,
    dtype: str,
    granularity: str,
    absmax: float,
    statistic: str = "imported",
) -> ScaleEntry:
    """The row of a scale that was not calibrated here, such as one that another tool has chosen.

    Args:
        tensor: Its name in the checkpoint.
        dtype: Type of what it scales.
        granularity: What shares it.
        absmax: The largest magnitude that it stands for.
        statistic: Where it is from.
    """
    return ScaleEntry.of(
        tensor,
        role,
        scale,
        dtype=dtype,
        granularity=granularity,
        statistic=statistic,
        absmax=absmax,
    )


class ScaleTable(Strict):
    """All scales of a checkpoint; see `ScaleEntry` for a row."""

    entries: tuple[ScaleEntry, ...]

    def get(self, module: str, role: Role) -> ScaleEntry | None:
        """The row of a module's role, or None."""
        rows = (row for row in self.entries if row.module == module and row.role == role)
        return next(rows, None)

    def to_pandas(self) -> pd.DataFrame:
        """One row a scale, with the attributes of `ScaleEntry` as columns."""
        columns = list(ScaleEntry.model_fields)
        return pd.DataFrame([row.model_dump() for row in self.entries], columns=columns)

    def to_json(self) -> str:
        """JSON text that `from_json` reads back to an equal table."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> ScaleTable:
        """Read a table.

        Raises:
            CheckpointError: the text is not a scale table; the first faults are named.
        """
        return parse(text, cls, "scale table is damaged", "Write the checkpoint again")

    def check(self, read: Callable[[Sequence[str]], Sequence[Tensor]]) -> None:
        """Compare every row with its tensor.

        Args:
            read: Gives the scale tensors of some names, fp32.

        Raises:
            CheckpointError: two rows name one tensor, or a shape, minimum or maximum differs.
        """
        twice = [name for name, n in Counter(row.tensor for row in self.entries).items() if n > 1]
        if twice:
            raise CheckpointError(f"scale table lists {', '.join(twice)} more than once")
        runs = (self.entries[i : i + TOGETHER] for i in range(0, len(self.entries), TOGETHER))
        scales = (scale for run in runs for scale in read([row.tensor for row in run]))
        for row, scale in zip(self.entries, scales, strict=True):
            low, high = scale.aminmax()
            found = (tuple(scale.shape), low.item(), high.item())
            if found != (row.shape, row.scale_min, row.scale_max):
                raise CheckpointError(
                    f"{row.tensor}: shape, minimum and maximum are {found}, but the scale table "
                    f"says {(row.shape, row.scale_min, row.scale_max)}; the checkpoint is damaged "
                    "or was edited, write it again"
                )
