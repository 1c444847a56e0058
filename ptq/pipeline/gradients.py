"""The backward pass of a run, and what is kept of it until the run ends.

In `<output>/.gradients`:

    gradients.json           which model, tokens and code it was; written once all blocks are there
    <block>.safetensors      what the pass showed of a block (`calibrate.gradients`), or of the head
    inputs-00003.safetensors its hidden states while it runs, where memory is no place for them

The pass depends on no scheme and no method, so that a run that was stopped, and one of another
recipe on the same model and tokens, take what is there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from calibrate.backward import IN_MEMORY, KeptInputs, backward
from calibrate.gradients import BlockGradients, block_size
from calibrate.stream import BlockStream
from calibrate.workers import BackgroundWriter, BlockWorkers
from formats.command import bar
from formats.errors import CheckpointError
from formats.files import fsync_path, replace_file, writing
from formats.stored.safetensors_files import write_tensors
from ptq.output import GRADIENTS_FOLDER
from ptq.plan.schedule import KEPT_MOMENTS

MARK = "gradients.json"


class GradientStore:
    """What a backward pass showed of each block, in files; see the module's docstring.

    Args:
        output: A run's output folder.
        key: Tells the pass; what another key has left is removed.
    """

    def __init__(self, output: Path, key: str) -> None:
        self._folder, self._key = output / GRADIENTS_FOLDER, key
        if not self.complete:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def complete(self) -> bool:
        """Whether the pass has ended."""
        try:
            return json.loads((self._folder / MARK).read_bytes())["key"] == self._key
        except (OSError, ValueError, KeyError):
            return False

    def block(self, name: str) -> BlockGradients:
        """What it showed of a block, or of the layer that gives logits, by its full name.

        Raises:
            CheckpointError: its file is missing or damaged.
        """
        path = self._path(name)
        try:
            return BlockGradients.from_state(load_file(path))
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise damaged(path, error) from error

    def make(
        self,
        stream: BlockStream,
        sequences: Sequence[Tensor],
        workers: BlockWorkers,
        *,
        progress: bool = False,
    ) -> None:
        """Run the pass.

        Args:
            stream: Of the model; it is spent.
            sequences: Token ids of the samples; see `run_backward`.
            workers: Devices that take them between them.
            progress: Whether to show a bar.

        Raises:
            RecipeError: activations or gradients hold NaN or infinity.
            CheckpointError: the model is damaged or takes no gradients, or the disk is full.
        """
        states = 4 * sum(map(len, sequences)) * stream.hidden * len(stream.blocks)
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)

        writer = BackgroundWriter()

        def found(name: str, gradients: BlockGradients) -> None:
            writer.put(lambda: self._write(name, gradients))

        steps = bar(title="Backward", unit="block", total=2 * len(stream.blocks), shown=progress)
        inputs = KeptInputs(self._folder if states > IN_MEMORY else None)
        with steps, closing(inputs), writer:
            backward(
                stream,
                sequences,
                size=size_of_blocks(stream),
                inputs=inputs,
                found=found,
                step=steps.update,
                workers=workers,
            )
        with writing(self._folder):
            fsync_path(self._folder)
            replace_file(self._folder / MARK, json.dumps({"key": self._key}).encode())

    def _write(self, name: str, gradients: BlockGradients) -> None:
        with writing(self._folder):
            write_tensors(self._path(name), gradients.state())

    def _path(self, block: str) -> Path:
        return self._folder / f"{block}.safetensors"


def size_of_blocks(stream: BlockStream) -> int:
    """Most outputs in a block of G; see `calibrate.gradients.block_size`."""
    widths = (rows for block in stream.blocks for rows in stream.outputs(block))
    return block_size(widths, KEPT_MOMENTS)


def run_backward(sequences: Sequence[Tensor], most: int) -> list[Tensor]:
    """The first samples that are at most so many tokens together; one at the least."""
    samples, tokens = [], 0
    for ids in sequences:
        tokens += len(ids)
        if samples and tokens > most:
            break
        samples.append(ids)
    return samples


def damaged(path: Path, error: Exception) -> CheckpointError:
    """The error of a file or a folder that is kept for going on, and cannot be read."""
    return CheckpointError(
        f"{path}: what an earlier run left is damaged ({error}). Remove the folder and run the "
        "recipe again"
    )


def discard_folder(folder: Path, mark: str) -> None:
    """Remove a folder; what says that it is whole goes first: a kill leaves nothing to trust."""
    (folder / mark).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
