"""What `ptq bench --steps` measures of a scheme, as lines, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version

PROMPTS, PROMPT, SHORT = 8, 1024, 128  # of a prefill, their tokens, and those of a short prompt


@dataclass(frozen=True)
class Step:
    """Milliseconds of a decode step.

    Attributes:
        batch: Its requests.
        whole: From one to the next.
        graph: Of its CUDA graph alone.
        host: What the host does but waiting.
    """

    batch: int
    whole: float
    graph: float
    host: float

    @property
    def host_us(self) -> float:
        """Microseconds of the host a request."""
        return 1e3 * self.host / self.batch

    @property
    def tokens_s(self) -> float:
        """Tokens per second of all its requests."""
        return 1e3 * self.batch / self.whole


@dataclass(frozen=True)
class Figures:
    """What was measured of a scheme.

    Attributes:
        steps: Of each batch.
        prefill_ms: From the arrival of the prompts to the first token of each.
        short_ms: From the arrival of one short prompt to its first token.
        peak_bytes: Most memory of the GPU, weights and cache included.
    """

    scheme: str
    steps: list[Step]
    prefill_ms: float
    short_ms: float
    weight_bytes: int
    cache_bytes: int
    peak_bytes: int

    @property
    def prefill_tokens_s(self) -> float:
        """Tokens of the prompts per second."""
        return 1e3 * PROMPTS * PROMPT / self.prefill_ms


def describe(own: Figures) -> list[str]:
    """The lines of a scheme."""
    lines = [
        f"{own.scheme:12} batch {step.batch:3}: {step.whole:7.3f} ms a step, {step.tokens_s:6.0f} "
        f"tokens/s; graph {step.graph:7.3f} ms, host {step.host:6.3f} ms ({step.host_us:.1f} us a "
        f"request), beyond the graph {1 - step.graph / step.whole:5.1%}"
        for step in own.steps
    ]
    return [
        *lines,
        f"{own.scheme:12} prefill {PROMPTS} x {PROMPT}: {own.prefill_ms:.1f} ms, "
        f"{own.prefill_tokens_s:.0f} tokens/s; 1 x {SHORT}: {own.short_ms:.1f} ms; "
        f"peak memory {own.peak_bytes / 1e9:.2f} GB of "
        f"{own.weight_bytes / 1e9:.2f} weights and {own.cache_bytes / 1e9:.2f} cache",
    ]


def table(found: Sequence[Figures], context: int) -> str:
    """All schemes in Markdown: tokens per second of all requests."""
    batches = [step.batch for step in found[0].steps] if found else []
    heads = [f"batch {batch}" for batch in batches]
    heads += [
        f"prefill {PROMPTS} x {PROMPT}",
        f"first token of {SHORT}",
        "beyond the graph",
        "peak memory / weights + cache",
    ]
    rows = [[f"context {context}, tokens/s", *heads], ["---"] * (len(heads) + 1)]
    for own in found:
        beyond = [1 - step.graph / step.whole for step in own.steps]
        held = own.weight_bytes + own.cache_bytes
        cells = [f"{step.tokens_s:,.0f}" for step in own.steps] + [f"{own.prefill_tokens_s:,.0f}"]
        cells += [f"{own.short_ms:.1f} ms"]
        cells += [f"{min(beyond):.1%} to {max(beyond):.1%}"]
        rows.append([own.scheme, *cells, f"{own.peak_bytes / 1e9:.1f} / {held / 1e9:.1f} GB"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def to_json(
    device: str, shape: str, context: int, found: Sequence[Figures], missing: Mapping[str, str]
) -> str:
    """All figures, and why a scheme has none."""
    data = {"device": device, "torch": version("torch"), "shape": shape, "context": context}
    schemes = [
        asdict(own) | {"tokens_s": {str(step.batch): step.tokens_s for step in own.steps}}
        for own in found
    ]
    return json.dumps(data | {"schemes": schemes, "missing": dict(missing)}, indent=1) + "\n"
