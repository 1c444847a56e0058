"""JSON documents, and what the models are made of that say what may stand in them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from formats.errors import CheckpointError
from formats.files import find_file


class Strict(BaseModel):
    """Frozen configuration that rejects unknown keys and does not coerce types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Values(BaseModel):
    """Values of others' files that are read, by their types; others may stand beside them."""

    model_config = ConfigDict(frozen=True, strict=True)


T = TypeVar("T")


def read_document(folder: Path, name: str, kind: type[T], remedy: str) -> T | None:
    """A JSON file of a model's folder; None where there is no such file.

    Args:
        kind: What it holds: a pydantic model or any other type.
        remedy: What to do about a damaged one, as a sentence.

    Raises:
        CheckpointError: it is not JSON, or not of this kind, or is elsewhere.
    """
    path = find_file(folder, name)
    return None if path is None else parse(path.read_bytes(), kind, str(path), remedy)


def parse(data: str | bytes, kind: type[T], origin: str, remedy: str) -> T:
    """Read JSON.

    Args:
        kind: What it holds: a pydantic model or any other type.
        remedy: What to do about a damaged one, as a sentence.

    Raises:
        CheckpointError: it is not JSON, or not of this kind; the first faults are named.
    """
    try:
        return _adapter(kind).validate_json(data)
    except ValidationError as error:
        raise _refusal(error, origin, remedy) from error


def check_values(values: Any, kind: type[T], origin: str, remedy: str) -> T:
    """Values that were read as JSON already, as a model or another type.

    Raises:
        CheckpointError: as `parse`.
    """
    try:
        return _adapter(kind).validate_python(values)
    except ValidationError as error:
        raise _refusal(error, origin, remedy) from error


def _refusal(error: ValidationError, origin: str, remedy: str) -> CheckpointError:
    """The first faults that a model found, each with its place and what stands there."""
    faults = "; ".join(map(_fault, error.errors(include_url=False)[:3]))
    return CheckpointError(f"{origin}: {faults}. {remedy}")


def _fault(fault: Any) -> str:
    place, message = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
    if not place:
        return message
    message = re.sub(r" or instance of \w+", "", message)  # of a class that no file can hold
    if fault["type"] == "missing":
        return f"{place} is missing"
    return f"{place} is {repr(fault['input'])[:60]}: {message}"


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)
