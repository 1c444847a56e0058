"""What a report was made of, when and with what: enough to make it again."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version as version_of
from pathlib import Path

from formats.scheme import Strict
from inference.bench.figures import environment
from ptq.evaluate.devices import report_devices
from ptq.recipe.schema import Recipe
from ptq.version import version


class Provenance(Strict):
    """Where, when and with what a report was made.

    Attributes:
        made: Date and time in UTC, such as `2025-03-01 14:05 UTC`.
        model: Full path of the original, or its name and commit on the hub.
        checkpoint: Full path of the quantized checkpoint.
        device: Where both models ran: the name of the processor or of the GPU.
        threads: Threads of the processor that they were allowed.
        versions: Of ptq and of what it stands on, by name.
    """

    made: str
    model: str
    checkpoint: str
    device: str
    threads: int
    versions: dict[str, str]

    def line(self) -> str:
        """The least of it, in one line."""
        return f"{self.made} · ptq {self.versions['ptq']} · {self.device}"


def provenance_of(recipe: Recipe, checkpoint: Path) -> Provenance:
    """What a report of this recipe's run is made of, now and here."""
    machine = environment(report_devices(recipe)[0])
    return Provenance(
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        model=recipe.model.told,
        checkpoint=str(checkpoint.absolute()),
        device=str(machine.get("gpu", machine["processor"])),
        threads=int(machine["threads"]),
        versions={
            "ptq": version(),
            "torch": str(machine["torch"]),
            "transformers": version_of("transformers"),
            "Python": str(machine["python"]),
        },
    )
