"""`certificate.json`: what was measured, of which files, and whether it can be measured again.

It is beside the weights, and the checkpoint's manifest lists it like any other file. It names the
SHA-256 of every weight file and of the original's configuration: of other files it says nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from formats.documents import Values, read_document
from formats.files import replace_file, sha256_file
from formats.namespace import version
from formats.scheme import Strict
from formats.stored.folder import CERTIFICATE, CONFIG, MANIFEST, Manifest, WrittenFile
from inference.bench.figures import environment
from ptq.certify.figures import MEAN_KL, Figure, Light, Row, Rows, judge, overall
from ptq.certify.setting import LevelName
from ptq.output import CERTIFICATE_PAGE, REPORT_FOLDER
from ptq.report.known import MARGIN, beside_margin, known_limit

WEIGHTS = (".safetensors", ".gguf")
AGAIN = "Certify the checkpoint again"


NO_REPORT = "Measure it again with `ptq report`, or remove it"


class _Check(Values):
    name: str
    limit: float


class _Known(Values):
    recipe: str
    device: str
    kl: float


class _Report(Values):
    """Of a run's report, of whichever version, what its limits are."""

    checks: tuple[_Check, ...] = ()
    known: _Known | None = None


class Made(Strict):
    """Where a certificate comes from: enough to measure it again.

    Attributes:
        when: Date and time, UTC.
        prompts: The file of prompts, as it was given; None for our own text.
        against_config: SHA-256 of its config.json.
        weights: SHA-256 of the checkpoint's weight files, by their path in it.
        invariant: Whether the device gives the same digits again.
    """

    when: str
    version: str
    environment: dict[str, str | int]
    device: str
    level: LevelName
    seed: int
    prompts: str | None
    prompts_sha256: str | None
    against: str
    against_config: str
    weights: dict[str, str]
    seconds: float
    processor_seconds: float
    invariant: bool = True


class Certificate(Strict):
    """A certificate; see the module's docstring.

    Attributes:
        verdict: Of all figures: that of the worst.
        limit: Of the mean KL divergence, which others go by, in nats.
        rows: What both models made of each case, by part.
    """

    verdict: Light
    headline: str
    limit: float
    limit_from: str
    made: Made
    figures: tuple[Figure, ...]
    rows: dict[str, list[list[Row]]]


def weight_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the files that hold weights and scales."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in WEIGHTS)
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}


def kl_limit(folder: Path, noise: float = 0.0) -> tuple[float, str]:
    """Most mean KL divergence of a checkpoint, and where that comes from.

    It is the threshold of its run's report, or else what its scheme is known to lose, with the
    report's margin and what rounding alone makes (`ptq.report.known.rounding_noise`); where neither
    is there, that of any checkpoint.

    Raises:
        CheckpointError: the report is damaged.
    """
    place = folder.absolute().parent / REPORT_FOLDER
    report = read_document(place, "report.json", _Report, NO_REPORT) or _Report()
    if known := report.known:
        limit = known_limit(known.kl, known.device, noise)
        more = beside_margin(known.kl, limit)
        return limit, f"{MARGIN:g} times what {known.recipe} is known to lose{more}"
    for check in report.checks:
        if check.name == "kl":
            return check.limit, "the threshold of its recipe"
    return MEAN_KL, "that of any checkpoint, as nothing is known of its scheme"


def certificate_of(rows: Rows, made: Made, limit: tuple[float, str]) -> Certificate:
    """Judge what was measured."""
    figures = judge((row for own in rows.values() for case in own for row in case), limit[0])
    verdict, headline = overall(figures)
    return Certificate(
        verdict=verdict, headline=headline, limit=limit[0], limit_from=limit[1], made=made,
        figures=tuple(figures), rows=rows,
    )  # fmt: skip


def made_now(
    folders: tuple[Path, Path],
    prompts: Path | None,
    since: tuple[float, float],
    *,
    device: str,
    **given: Any,
) -> Made:
    """Where a certificate comes from that ends now.

    Args:
        folders: Of the original and of the checkpoint.
        since: When it began, in seconds of the clock and of the processor.
        given: What else `Made` has: how it was asked for.
    """
    return Made(
        when=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        version=version(),
        environment=environment(device),
        device=device,
        prompts=None if prompts is None else str(prompts),
        prompts_sha256=None if prompts is None else sha256_file(prompts),
        against_config=sha256_file(folders[0] / CONFIG),
        weights=weight_hashes(folders[1]),
        seconds=round(time.monotonic() - since[0], 1),
        processor_seconds=round(time.process_time() - since[1], 1),
        **given,
    )


def write_certificate(folder: Path, certificate: Certificate, page: str) -> None:
    """Write both files into a checkpoint, and list the first in its manifest, if it has one.

    The manifest forgets an older certificate before that is replaced: a write that is cut short
    leaves a whole checkpoint.
    """
    data = (certificate.model_dump_json(indent=1) + "\n").encode()
    manifest = read_document(folder, MANIFEST, Manifest, AGAIN)
    if manifest is not None and CERTIFICATE in manifest.files:
        _list(folder, manifest, None)
    replace_file(folder / CERTIFICATE, data)
    replace_file(folder / CERTIFICATE_PAGE, page.encode())
    if manifest is not None:
        _list(folder, manifest, folder / CERTIFICATE)


def _list(folder: Path, manifest: Manifest, file: Path | None) -> None:
    files = {name: own for name, own in manifest.files.items() if name != CERTIFICATE}
    if file is not None:
        files[CERTIFICATE] = WrittenFile(bytes=file.stat().st_size, sha256=sha256_file(file))
    text = json.dumps({"files": {n: own.model_dump() for n, own in files.items()}}, indent=2)
    replace_file(folder / MANIFEST, f"{text}\n".encode())


def read_certificate(folder: Path) -> Certificate | None:
    """A checkpoint's certificate; None where it has none.

    Raises:
        CheckpointError: it is damaged.
    """
    return read_document(folder, CERTIFICATE, Certificate, AGAIN)


def other_files(folder: Path, certificate: Certificate) -> list[str]:
    """Weight files that are not those which were certified: changed, missing, or new."""
    now, then = weight_hashes(folder), certificate.made.weights
    return sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))


def describe(folder: Path) -> str:
    """A line on a checkpoint's certificate, for `ptq inspect`; empty where it has none."""
    found = read_certificate(folder)
    if found is None:
        return ""
    others = other_files(folder, found)
    summary = f"certificate ({found.made.level}, {found.made.when} UTC): {found.headline}"
    if not others:
        return f"{summary} These are the files that were certified."
    return f"{summary} It is of other files: {', '.join(others)} changed since. {AGAIN}."


def differences(old: Rows, numbers: dict[str, list[int]], new: Rows) -> Iterator[str]:
    """Sentences on the values that differ, each naming its figure."""
    for part, own in numbers.items():
        for number, found in zip(own, new[part], strict=True):
            yield from _row_differences(old[part][number], found)


def _row_differences(before: Sequence[Row], now: Sequence[Row]) -> Iterator[str]:
    if [row.case for row in before] != [row.case for row in now]:
        yield f"{before[0].case}: it asks for something else now"
        return
    for a, b in zip(before, now, strict=True):
        for name in sorted(a.values.keys() | b.values.keys()):
            then, new = a.values.get(name), b.values.get(name)
            if then != new:
                yield f"{name} of {a.case}: certified {then}, now {new}"
