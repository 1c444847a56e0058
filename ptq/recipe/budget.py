"""A budget: how much accuracy a model may lose, or how many bytes it may take."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from formats.documents import Strict

Target = Literal["cpu", "gpu", "vllm"]
LIMITS = ("kl", "perplexity_ratio", "bytes", "bits")
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"([\d.]+(?:e\d+)?)\s*([a-z]*)", re.IGNORECASE)


def read_bytes(value: Any) -> Any:
    """Bytes of a text such as `2.5GB` (10^9) or `2 GiB` (2^30); what is none is left as it is."""
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None or found[2].upper() not in UNITS:
        return value
    try:
        return round(float(found[1]) * UNITS[found[2].upper()])
    except ValueError:
        return value


class BudgetSpec(Strict):
    """A limit of the quantized model's loss or size, which sets the bits of each group of layers.

    YAML: ``budget: {kl: 0.01, target: cpu}``

    Give one limit. For a limit of accuracy, the search minimizes bytes, measured on the evaluation
    split; for one of size, the loss. Layers that are multiplied as one share a scheme. The recipe's
    `scheme` then sets inputs and the cache, and the budget chooses `layers`.

    Raises:
        ValueError: no limit is given, or several are.
    """

    kl: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Most mean KL divergence of the next token's distribution, in nats."""
    perplexity_ratio: Annotated[float, Field(gt=1.0, allow_inf_nan=False)] | None = None
    """Most that the quantized model's perplexity may be of the original's: 1.01 allows 1% more."""
    bytes: Annotated[int, Field(gt=0), BeforeValidator(read_bytes)] | None = None
    """Most bytes of the checkpoint's weight files, such as `2.5GB`."""
    bits: Annotated[float, Field(gt=0.0, le=16.0)] | None = None
    """Most bits of a weight of the blocks' quantized layers on average, scales included; the head
    then stays in float.
    """
    target: Target = "cpu"
    """Where the model will run: only schemes that are fast there are chosen. `cpu` and `gpu` mean
    this engine; `vllm` reads the same files.
    """

    head: bool = True
    """Whether the layer that gives logits may be quantized, too, and with it an embedding that is
    the same tensor; not for the target `vllm`.
    """

    @property
    def counts_head(self) -> bool:
        """Whether the head is one of the groups."""
        return self.head and self.target != "vllm"

    @model_validator(mode="after")
    def _one_limit(self) -> BudgetSpec:
        given = [key for key in LIMITS if getattr(self, key) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"found {found} of {', '.join(LIMITS)}; give one of them")
        return self

    @property
    def limit(self) -> tuple[str, float]:
        """Name of the limit, and its value."""
        name = next(key for key in LIMITS if getattr(self, key) is not None)
        return name, getattr(self, name)

    @property
    def of_accuracy(self) -> bool:
        """Whether accuracy is limited, and bytes are to be few; else the other way round."""
        return self.limit[0] in ("kl", "perplexity_ratio")

    @property
    def text(self) -> str:
        """The limit as it is typed: `kl=0.01`."""
        name, value = self.limit
        return f"{name}={value:g}" if name != "bytes" else f"bytes={value:.0f}"
