"""The report's section of texts that both models wrote."""

from __future__ import annotations

from ptq.report.data import ReportData
from ptq.report.page.section import Pair, Section

SHOWN = 200  # characters of a prompt


def completions_section(data: ReportData) -> Section:
    """Completions side by side, from where they differ marked."""
    same = sum(row.original == row.quantized for row in data.completions)
    return Section(
        "Side by side",
        "Both models go on from the same beginnings of evaluation text, always with the most "
        f"likely token. {same} of {len(data.completions)} completions are equal; of the others, "
        "what follows the first difference is marked. One token that is chosen otherwise changes "
        "all that follows, so a difference is not yet a fault: read whether both make sense.",
        pairs=tuple(
            Pair(
                caption=f"… {row.prompt[-SHOWN:].strip()}",
                original=row.original,
                quantized=row.quantized,
                common=row.common,
            )
            for row in data.completions
        ),
    )
