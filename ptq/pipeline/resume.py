"""Runs that go on where they were killed: finished blocks, and the activations after the last.

Beside the checkpoint that is being made, in `<output>/.resume`:

    progress.json                  what the run is (`ptq.pipeline.reuse`), and how many blocks are
                                   done
    block-00003.safetensors        what the checkpoint gets of a block, under `tensor/<name>`, what
                                   is beside it under `beside/<name>`, and under
                                   `found/<method>/<name>` what its methods found
    block-00003.json               its rows of the record
    block-00003.statistics         what calibration saw of it
    hessians/<block>.safetensors   second moments of its inputs, where the run is to keep them
    states-00003.safetensors       hidden states of every sample after it; of the last such block

A block's files are whole on the disk before `progress.json` counts it, and states are stored, not
computed again: a run that was killed at any moment and started again writes the same bytes as one
that was not. States of a large model take seconds to write; they are left out after a block where
writing them would take more than a tenth of the time, and a run goes on after the last that has
them. What has none, as a head, is always counted. A run of another recipe, model, data, code or
device starts over.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from calibrate.statistics import Statistics
from calibrate.workers import BackgroundWriter
from formats.command import Terminated
from formats.errors import CheckpointError, DiskFullError
from formats.files import fsync_path, replace_file, writing
from formats.scale_table import ScaleEntry
from formats.scheme import LayerScheme, Strict
from formats.stored.safetensors_files import SafetensorsFile, write_tensors
from ptq.methods.common.events import Event, SmoothingRow
from ptq.output import BUDGET_FOLDER, COSTS_FILE, GRADIENTS_FOLDER, PROGRESS_FILE, RESUME_FOLDER
from ptq.pipeline.gradients import MARK, damaged, discard_folder
from ptq.pipeline.reuse import differences
from ptq.result import BlockRow, ModuleRow

MOST_TOLD = 6  # settings in which two runs differ
SHARE = 0.1  # most of a run's time that goes into writing states


class BlockRecord(Strict):
    """Rows of the record that a block brings, and schemes that methods gave single layers."""

    entries: tuple[ScaleEntry, ...] = ()
    events: tuple[Event, ...] = ()
    smoothing: tuple[SmoothingRow, ...] = ()
    modules: tuple[ModuleRow, ...] = ()
    cost: BlockRow | None = None
    schemes: dict[str, LayerScheme] = Field(default_factory=dict)


@dataclass
class SolvedBlock:
    """All that is left of a block once it is solved.

    Attributes:
        tensors: For the checkpoint, by their full name, in the order in which they are written.
        beside: What is stored beside the served files, of its cache and its sink tokens, by name.
        record: Rows of the record.
        statistics: What calibration saw.
        found: What methods found by running samples, by `<method>/<name>`.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    beside: dict[str, Tensor] = field(default_factory=dict)
    record: BlockRecord = field(default_factory=BlockRecord)
    statistics: Statistics = field(default_factory=Statistics)
    found: dict[str, Tensor] = field(default_factory=dict)


class Progress(Strict):
    """How far a run has come, and which run it is.

    Attributes:
        blocks: Those that are stored with the states after them.
        total: Blocks of the model.
        facts: What the key stands for; see `ptq.pipeline.reuse.run_facts`.
    """

    key: str
    blocks: int
    total: int = 0
    facts: dict[str, str] = Field(default_factory=dict)

    @classmethod
    def read(cls, output: Path) -> Progress | None:
        """What a run has left in an output folder; None where that is nothing to go on with."""
        try:
            return cls.model_validate_json((output / RESUME_FOLDER / PROGRESS_FILE).read_bytes())
        except (OSError, ValidationError):
            return None


class ResumableRun:
    """The store of one run; see the module's docstring.

    Args:
        output: The run's output folder.
        key: From `ptq.pipeline.reuse.key_of`; what another key has left is removed.
        total: Blocks of the model.
        facts: What the key stands for.

    Attributes:
        done: Blocks that are stored with the states after them.
        left: What an earlier run had left.
    """

    def __init__(
        self, output: Path, key: str, total: int = 0, facts: Mapping[str, str] | None = None
    ) -> None:
        self._folder, self._key = output / RESUME_FOLDER, key
        self._total, self._facts = total, dict(facts or {})
        self._background = BackgroundWriter()
        self.done = self._solved = 0
        self._due = 0.0
        self.left = Progress.read(output)
        if self.left is not None and self.left.key == key:
            self.done = self._solved = self.left.blocks
            return
        discard_folder(self._folder, PROGRESS_FILE)
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._progress(0)

    def greeting(self) -> str | None:
        """The message about an earlier run: that it goes on, or starts over, and why."""
        left = self.left
        if left is None or (left.key == self._key and not left.blocks):
            return None
        if left.key == self._key and left.blocks < left.total:
            at = f"going on at block {left.blocks + 1} of {left.total}"
            return f"an earlier run was stopped; {at}"
        if left.key == self._key:
            return (
                f"an earlier run was stopped after all of its {left.total} blocks; going on there"
            )
        differ = differences(left.facts, self._facts)
        more = [f"and {len(differ) - MOST_TOLD} more"] if len(differ) > MOST_TOLD else []
        lines = "".join(f"\n  {line}" for line in [*differ[:MOST_TOLD], *more])
        return (
            f"an earlier run was stopped after {left.blocks} of {left.total} blocks, but other "
            f"than this one; starting over. What differs:{lines}"
        )

    def save(
        self, solved: SolvedBlock, states: Sequence[Tensor], quantized: Sequence[Tensor] | None
    ) -> None:
        """Store the next block and, where they are due, the hidden states after it.

        They are written while the run goes on; what went wrong is raised by the next call, or by
        `close`.

        Args:
            states: Hidden states of the float model.
            quantized: Those after the quantized blocks, where they are kept.
        """
        hidden = {f"float/{i}": state for i, state in enumerate(states)}
        hidden |= {f"quantized/{i}": state for i, state in enumerate(quantized or ())}
        self._background.put(partial(self._save, self._solved, solved, hidden))
        self._solved += 1

    def wait(self) -> None:
        """Wait for what is being written; raises what went wrong with it."""
        self._background.wait()

    def close(self) -> None:
        """`wait`, and take no more.

        Raises:
            CheckpointError: it could not be written.
        """
        self._background.close()

    def _save(self, index: int, solved: SolvedBlock, hidden: dict[str, Tensor]) -> None:
        self._save_block(self._name(index), solved)
        begin = time.monotonic()
        if hidden and begin < self._due:
            return
        self._write(self._states(index), hidden)
        before = self.done
        self._progress(index + 1)
        if before:
            (self._folder / self._states(before - 1)).unlink(missing_ok=True)
        end = time.monotonic()
        self._due = end + (end - begin) / SHARE

    def _save_block(self, name: str, solved: SolvedBlock) -> None:
        parts = {"tensor": solved.tensors, "beside": solved.beside, "found": solved.found}
        arrays = {f"{kind}/{key}": t for kind, own in parts.items() for key, t in own.items()}
        order = {"order": json.dumps(list(solved.tensors))}
        self._write(f"{name}.safetensors", arrays, order)
        replace_file(self._folder / f"{name}.json", solved.record.model_dump_json().encode())
        solved.statistics.save(self._folder / f"{name}.statistics")

    def block(self, index: int) -> SolvedBlock:
        """A stored block.

        Raises:
            CheckpointError: its files are damaged.
        """
        path = self._folder / self._name(index)
        parts: dict[str, dict[str, Tensor]] = {"tensor": {}, "beside": {}, "found": {}}
        try:
            file = SafetensorsFile(Path(f"{path}.safetensors"))
            for key in file.tensors:
                kind, _, name = key.partition("/")
                parts[kind][name] = file.tensor(key)
            order = json.loads(file.metadata["order"])  # a file sorts its tensors otherwise
            tensors = {name: parts["tensor"][name] for name in order}
            record = BlockRecord.model_validate_json(Path(f"{path}.json").read_bytes())
            statistics = Statistics.load(Path(f"{path}.statistics"))
        except (OSError, ValueError, KeyError, CheckpointError) as error:
            raise damaged(self._folder, error) from error
        return SolvedBlock(tensors, parts["beside"], record, statistics, parts["found"])

    def states(self) -> tuple[list[Tensor], list[Tensor] | None]:
        """Hidden states after the last stored block: of the float model, and quantized if kept.

        Raises:
            CheckpointError: their file is damaged.
        """
        try:
            arrays = load_file(self._folder / self._states(self.done - 1))
        except (OSError, SafetensorError) as error:
            raise damaged(self._folder, error) from error
        count = sum(key.startswith("float/") for key in arrays)
        quantized = [arrays[f"quantized/{i}"] for i in range(count) if f"quantized/{i}" in arrays]
        return [arrays[f"float/{i}"] for i in range(count)], quantized or None

    def _progress(self, blocks: int) -> None:
        progress = Progress(key=self._key, blocks=blocks, total=self._total, facts=self._facts)
        try:
            replace_file(self._folder / PROGRESS_FILE, progress.model_dump_json().encode())
        finally:  # an interrupt may come once the file is in its place
            stored = Progress.read(self._folder.parent)
            self.done = stored.blocks if stored else 0

    def _write(
        self, name: str, arrays: dict[str, Tensor], metadata: dict[str, str] | None = None
    ) -> None:
        with writing(self._folder):
            temporary = self._folder / f"{name}.tmp"
            temporary.unlink(missing_ok=True)
            write_tensors(temporary, {key: t.contiguous() for key, t in arrays.items()}, metadata)
            os.replace(temporary, self._folder / name)
            fsync_path(self._folder)

    @staticmethod
    def _name(index: int) -> str:
        return f"block-{index:05d}"

    @staticmethod
    def _states(index: int) -> str:
        return f"states-{index:05d}.safetensors"


@contextlib.contextmanager
def telling_what_is_kept(output: Path) -> Iterator[None]:
    """Say of a run that was interrupted, or met a full disk, what the next one goes on with."""
    try:
        yield
    except (KeyboardInterrupt, Terminated, DiskFullError) as error:
        left = Progress.read(output) or Progress.read(output / BUDGET_FOLDER)
        if left is not None and left.blocks > 0:
            kept = f"{left.blocks} of {left.total} blocks are kept"
            error.add_note(f"{kept}: the same command goes on from there.")
        elif (output / BUDGET_FOLDER / COSTS_FILE).is_file():
            error.add_note("What was counted for the budget is kept: the same command uses it.")
        else:
            error.add_note("No block is kept yet: the same command starts from the beginning.")
        raise


def discard(output: Path) -> None:
    """Remove what is kept for going on, and the output folder where nothing else is in it."""
    discard_folder(output / RESUME_FOLDER, PROGRESS_FILE)
    discard_folder(output / GRADIENTS_FOLDER, MARK)
    with contextlib.suppress(OSError):
        output.rmdir()
