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

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from formats.errors import suggestion
from formats.scheme import Strict
from inference.bench.peers.process import PeerSpec

ADAPTERS = Path(__file__).resolve().parents[1] / "peers" / "adapters.py"
JOB_NEEDS = ("torch", "transformers", "safetensors")


@dataclass(frozen=True)
class Quantizer(PeerSpec):
    """One way to quantize with another package.

    Attributes:
        method: What it does, in a few words.
        options: What its adapter is given.
        in_extra: Whether our extra `peers` holds the package.
        function: Of its adapter.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    in_extra: bool = False
    function: str = "quantize"


def _quantizer(
    method: str, package: str, function: str, *needs: str, in_extra: bool = False, **options: Any
) -> Quantizer:
    """A way of a package; `needs` are distributions that it does not install itself."""
    needed = (*JOB_NEEDS, *needs)
    return Quantizer(package, needed, ADAPTERS, method, options, in_extra, function)


def _bitsandbytes(method: str, bits: int) -> Quantizer:
    package = function = "bitsandbytes"
    return _quantizer(method, package, function, "accelerate", in_extra=True, bits=bits)


def _llm_compressor(method: str, **options: Any) -> Quantizer:
    return _quantizer(method, "llmcompressor", "llm_compressor", **options)


QUANTIZERS = {
    "bitsandbytes-int8": _bitsandbytes("LLM.int8()", 8),
    "bitsandbytes-nf4": _bitsandbytes("NF4, blocks of 64", 4),
    "neural-compressor-rtn": _quantizer(
        "int4, RTN",
        "neural-compressor",
        "neural_compressor",
        *("prettytable", "torchao"),  # of its extra `pt`
        in_extra=True,
    ),
    "gptqmodel-gptq": _quantizer("int4, GPTQ", "gptqmodel", "gptqmodel", in_extra=True),
    "llm-compressor-rtn": _llm_compressor("int4, RTN", rounding="rtn", scheme="W4A16"),
    "llm-compressor-gptq": _llm_compressor("int4, GPTQ", rounding="gptq", scheme="W4A16"),
    "llm-compressor-gptq-64": _llm_compressor(
        "int4 in groups of 64, GPTQ", rounding="gptq", scheme="W4A16", group=64
    ),
    "llm-compressor-awq": _llm_compressor(
        "int4, AWQ, RTN", rounding="rtn", scheme="W4A16", before="awq"
    ),
    "llm-compressor-nvfp4-rtn": _llm_compressor("NVFP4, RTN", rounding="rtn", scheme="NVFP4A16"),
    "llm-compressor-nvfp4-gptq": _llm_compressor("NVFP4, GPTQ", rounding="gptq", scheme="NVFP4A16"),
    "llm-compressor-mxfp4-rtn": _llm_compressor("MXFP4, RTN", rounding="rtn", scheme="MXFP4A16"),
    "llm-compressor-mxfp4-gptq": _llm_compressor("MXFP4, GPTQ", rounding="gptq", scheme="MXFP4A16"),
    "llm-compressor-a8w8": _llm_compressor(
        "int8 static, SmoothQuant, GPTQ", rounding="gptq", scheme="static", before="smoothquant"
    ),
    "llm-compressor-a8w8-dynamic": _llm_compressor(
        "int8 dynamic, SmoothQuant, GPTQ", rounding="gptq", scheme="W8A8", before="smoothquant"
    ),
    "autoround": _quantizer("int4, 200 iterations", "auto-round", "auto_round", iterations=200),
    "autoround-autoscheme": _quantizer(
        "int4 and int8 mixed, 200 iterations", "auto-round", "auto_round", iterations=200, bits=5.0
    ),
    "autoround-rtn": _quantizer("int4, RTN", "auto-round", "auto_round", iterations=0),
}


def _known(name: str) -> str:
    if name not in QUANTIZERS:
        raise ValueError(f"unknown peer {name!r}; {suggestion(name, QUANTIZERS)}")
    return name


class PeerChoice(Strict):
    """Another tool that quantizes the same model, measured in addition to our run.

    YAML: ``peers: [{name: autoround, python: /envs/autoround/bin/python, timeout: 7200}]``
    """

    name: Annotated[str, AfterValidator(_known)]
    """The tool and its method; see the list below."""
    python: Path | None = None
    """Interpreter of an environment with the tool; null is that of ptq. Relative to the recipe's
    folder.
    """
    timeout: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 7200.0
    """Seconds after which it is stopped, its evaluation included."""

    @property
    def spec(self) -> Quantizer:
        """What the name stands for."""
        return QUANTIZERS[self.name]

    @property
    def interpreter(self) -> str:
        """The Python that runs it, in full."""
        return sys.executable if self.python is None else str(self.python.absolute())
