"""The report's section of standard tasks that both models were given."""

from __future__ import annotations

from ptq.evaluate.figures import AGAINST, HEADER, cells
from ptq.report.data import ReportData
from ptq.report.page.section import Section, Table


def tasks_section(data: ReportData) -> Section:
    """What is left of the original's figures, and how many answers flipped."""
    rows = [cells(row.quantized, row) for row in data.tasks]
    return Section(
        "Standard tasks",
        "Both models answered the same items, on the same engine, through lm-eval. Recovery is the "
        "quantized model's figure over the original's (the reverse of perplexities, so that less "
        "than 100% is a loss), with a 95% interval from drawing the items anew. Flips are items "
        "that one of the two has right and the other has not: a model may keep its accuracy and "
        "still answer differently.",
        tables=(Table((*HEADER, *AGAINST), rows),),
    )
