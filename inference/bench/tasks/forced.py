"""Outputs that are said beforehand: the logit of each one's next token is made the largest.

It costs some microseconds a step, which a run with drafts pays as one without does, and less than
one for each row of logits, those of wrong drafts too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from formats.errors import EngineError, RequestError
from inference.cpu.batch import Batch
from inference.cpu.loop import HostLoop
from inference.engine import Engine

LARGEST = 1e6  # no model's logit comes near


class ForcedLogits:
    """Logits of steps, of which the largest are those of known texts' next tokens.

    Sequences are known by the first of their blocks, which no two may share, and a block's by the
    tokens that are computed at its beginning.

    Args:
        forward: Runs the tokens of a step.
        texts: Token ids of each request, prompt and output; no two begin alike.
    """

    def __init__(self, forward: Callable[[Batch], Tensor], texts: Sequence[Sequence[int]]) -> None:
        self._forward, self._texts = forward, [tuple(text) for text in texts]
        self._of_block: dict[int, tuple[int, ...]] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """Logits [R, vocabulary] of a step."""
        logits = self._forward(batch)
        starts, positions = batch.query_start.tolist(), batch.positions.tolist()
        rows, at, forced, tokens = batch.rows.tolist(), 0, list[int](), list[int]()
        for i, block in enumerate(batch.block_tables[:, 0].tolist()):
            start, end = starts[i], starts[i + 1]
            if positions[start] == 0:
                self._of_block[block] = self._text(tuple(batch.ids[start:end].tolist()))
            text = self._of_block[block]
            while at < len(rows) and rows[at] < end:
                following = positions[rows[at]] + 1
                if following < len(text):  # else it is the row of a draft behind the end
                    forced.append(at)
                    tokens.append(text[following])
                at += 1
        logits.numpy()[forced, tokens] = LARGEST
        return logits

    def _text(self, begun: tuple[int, ...]) -> tuple[int, ...]:
        found = [text for text in self._texts if text[: len(begun)] == begun]
        if len(found) != 1:
            raise EngineError(
                f"{len(found)} of the texts that are forced begin with the {len(begun)} tokens of "
                "a request; exactly one has to"
            )
        return found[0]


@contextmanager
def forced(engine: Engine, texts: Sequence[Sequence[int]]) -> Iterator[None]:
    """Have an engine's requests go on as texts do.

    Args:
        engine: On a CPU, without a prefix cache.
        texts: As in `ForcedLogits`.

    Raises:
        RequestError: the engine chooses tokens on a device.
    """
    loop = engine.loop
    if not isinstance(loop, HostLoop):
        raise RequestError("task: outputs are forced on the host; editing runs on a cpu", "task")
    forward = loop.forward
    loop.forward = ForcedLogits(forward, texts)
    try:
        yield
    finally:
        loop.forward = forward
