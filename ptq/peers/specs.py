"""The peers that a report can show beside our own, and what a recipe may say of them.

    report:
      peers:
        - bitsandbytes-nf4                      # a name: it runs under this interpreter
        - name: llm-compressor-gptq             # or a mapping
          python: ~/envs/llmc/bin/python        # the interpreter of an environment that has it
          timeout: 7200                         # seconds for all that it does

Weights are int4, symmetric, in groups of 128, unless the name says otherwise. A peer whose package
pins other versions than this project needs an environment of its own: torch, transformers,
safetensors and the package are enough there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from formats.scheme import Strict
from ptq.recipe.problems import suggestion

ADAPTERS = Path(__file__).resolve().parent / "adapters"
WORKER_NEEDS = ("torch", "transformers", "safetensors")


@dataclass(frozen=True)
class Peer:
    """One way to quantize with another package.

    Attributes:
        method: What it does, in a few words.
        package: The distribution whose version is told.
        adapter: File that holds its `quantize`.
        options: What that is given.
        needs: Further distributions that it does not install itself.
        in_extra: Whether our extra `peers` holds the package.
    """

    method: str
    package: str
    adapter: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    in_extra: bool = False

    @property
    def distributions(self) -> tuple[str, ...]:
        """All that its interpreter must have."""
        return (*WORKER_NEEDS, self.package, *self.needs)


def _bitsandbytes(method: str, bits: int) -> Peer:
    adapter, needs = ADAPTERS / "bitsandbytes_adapter.py", ("accelerate",)
    return Peer(method, "bitsandbytes", adapter, {"bits": bits}, needs, in_extra=True)


def _llm_compressor(method: str, **options: str) -> Peer:
    return Peer(method, "llmcompressor", ADAPTERS / "llm_compressor_adapter.py", options)


def _auto_round(method: str, iterations: int) -> Peer:
    adapter = ADAPTERS / "auto_round_adapter.py"
    return Peer(method, "auto-round", adapter, {"iterations": iterations})


PEERS = {
    "bitsandbytes-int8": _bitsandbytes("LLM.int8()", 8),
    "bitsandbytes-nf4": _bitsandbytes("NF4, blocks of 64", 4),
    "neural-compressor-rtn": Peer(
        "int4, RTN",
        "neural-compressor",
        ADAPTERS / "neural_compressor_adapter.py",
        needs=("prettytable", "torchao"),  # of its extra `pt`
        in_extra=True,
    ),
    "gptqmodel-gptq": Peer(
        "int4, GPTQ", "gptqmodel", ADAPTERS / "gptqmodel_adapter.py", in_extra=True
    ),
    "llm-compressor-rtn": _llm_compressor("int4, RTN", rounding="rtn", scheme="W4A16"),
    "llm-compressor-gptq": _llm_compressor("int4, GPTQ", rounding="gptq", scheme="W4A16"),
    "llm-compressor-awq": _llm_compressor(
        "int4, AWQ, RTN", rounding="rtn", scheme="W4A16", before="awq"
    ),
    "llm-compressor-a8w8": _llm_compressor(
        "int8 static, SmoothQuant, GPTQ", rounding="gptq", scheme="static", before="smoothquant"
    ),
    "llm-compressor-a8w8-dynamic": _llm_compressor(
        "int8 dynamic, SmoothQuant, GPTQ", rounding="gptq", scheme="W8A8", before="smoothquant"
    ),
    "autoround": _auto_round("int4, 200 iterations", 200),
    "autoround-rtn": _auto_round("int4, RTN", 0),
}


def _known(name: str) -> str:
    if name not in PEERS:
        raise ValueError(f"unknown peer {name!r}; {suggestion(name, PEERS)}")
    return name


class PeerSpec(Strict):
    """One peer of a recipe; see the module's docstring for its YAML.

    Attributes:
        name: Of `PEERS`.
        python: Interpreter that runs it; null is the one that runs us.
        timeout: Seconds after which it is stopped, the evaluation included.
    """

    name: Annotated[str, AfterValidator(_known)]
    python: Path | None = None
    timeout: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 7200.0

    @property
    def peer(self) -> Peer:
        """What the name stands for."""
        return PEERS[self.name]
