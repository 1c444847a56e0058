"""The runtimes that `ptq bench --peer` shows beside the engine.

    --peer llama.cpp=envs/llama/bin/python --peer transformers

A peer runs the shape of the checkpoint with random weights of its own, in the format nearest to the
checkpoint's weights unless `--peer-format` names another.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from formats.errors import EngineError, RequestError
from formats.scheme import LayerScheme
from inference.bench.peers.spec import PeerSpec

ADAPTERS = Path(__file__).resolve().parent / "adapters"


@dataclass(frozen=True)
class Runtime(PeerSpec):
    """A runtime that `--peer` names.

    Attributes:
        formats: How it can store weights.
        by_bits: The format nearest to weights of 4, 8 and 16 bits.
        caches: Types of its cache that can be asked for.
        has_files: Whether it loads a model from files, which are written first.
    """

    formats: tuple[str, ...]
    by_bits: Mapping[int, str]
    caches: tuple[str, ...]
    has_files: bool = True


RUNTIMES = {
    "llama.cpp": Runtime(
        "llama-cpp-python",
        ("gguf", "numpy"),
        ADAPTERS / "llama_cpp_adapter.py",
        ("Q4_0", "Q4_K_M", "Q8_0", "F16"),
        {4: "Q4_0", 8: "Q8_0", 16: "F16"},
        ("f16", "q8_0"),
    ),
    "openvino": Runtime(
        "openvino",
        ("optimum-intel", "nncf", "transformers", "torch"),
        ADAPTERS / "openvino_adapter.py",
        ("int4", "int8", "fp16"),
        {4: "int4", 8: "int8", 16: "fp16"},
        ("u8", "f16", "f32"),
    ),
    "transformers": Runtime(
        "transformers",
        ("torch",),
        ADAPTERS / "transformers_adapter.py",
        ("bfloat16", "float32"),
        {4: "bfloat16", 8: "bfloat16", 16: "bfloat16"},
        (),
        has_files=False,
    ),
}


@dataclass(frozen=True)
class RuntimeChoice:
    """A runtime as it is asked for.

    Attributes:
        name: Of `RUNTIMES`.
        python: Interpreter that runs it.
        format: How it stores weights.
        cache: Type of its cache, None for its default.
    """

    name: str
    python: str
    format: str
    cache: str | None

    @property
    def spec(self) -> Runtime:
        """What the name stands for."""
        return RUNTIMES[self.name]

    @property
    def text(self) -> str:
        """Name and format."""
        return f"{self.name} {self.format}" + (f" cache {self.cache}" if self.cache else "")

    def check_installed(self) -> str:
        """The version of its package.

        Raises:
            EngineError: its interpreter is none, or lacks something.
        """
        missing = self.spec.missing(self.python)
        if missing:
            raise EngineError(
                f"{self.name} needs {', '.join(missing)}, which {self.python} does not have; "
                f"install with `{self.python} -m pip install {' '.join(missing)}`, or name the "
                f"interpreter of an environment that has it: --peer {self.name}=PYTHON"
            )
        return str(self.spec.version(self.python))


def read_choices(
    texts: Sequence[str], formats: Sequence[str], caches: Sequence[str], scheme: LayerScheme
) -> list[RuntimeChoice]:
    """The peers of a command line.

    Args:
        texts: Names, each with `=` and an interpreter where it is not this one.
        formats: How they store weights; each goes to the peers that know it.
        caches: Types of their caches; each goes to the peers that know it.
        scheme: Of our weights, whose bits choose the formats that are not given.

    Raises:
        RequestError: a name, format or type is unknown, or known to none of them.
    """
    pairs = [text.partition("=")[::2] for text in texts]
    for name, _ in pairs:
        if name not in RUNTIMES:
            raise RequestError(f"peer: found {name!r}; allowed are {', '.join(RUNTIMES)}", "peer")
    peers = [RUNTIMES[name] for name, _ in pairs]
    _check_known("peer_format", formats, [peer.formats for peer in peers])
    _check_known("peer_kv", caches, [peer.caches for peer in peers])
    bits = 16 if scheme.weights is None else scheme.weights.bits
    return [
        RuntimeChoice(
            name=name,
            python=python or sys.executable,
            format=_last(formats, peer.formats) or peer.by_bits[bits],
            cache=_last(caches, peer.caches),
        )
        for (name, python), peer in zip(pairs, peers, strict=True)
    ]


def _check_known(param: str, asked: Sequence[str], allowed: Iterable[tuple[str, ...]]) -> None:
    known = list(dict.fromkeys(name for names in allowed for name in names))
    for name in asked:
        if name not in known:
            raise RequestError(
                f"{param}: found {name!r}; the peers that are asked for allow "
                f"{', '.join(known) or 'none'}",
                param,
            )


def _last(asked: Sequence[str], allowed: tuple[str, ...]) -> str | None:
    return next((name for name in reversed(asked) if name in allowed), None)
