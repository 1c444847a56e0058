"""The runtimes that `ptq bench --peer` shows beside the engine, and how one runs loads.

    --peer llama.cpp=envs/llama/bin/python --peer transformers

A peer runs the shape of the checkpoint with random weights of its own, in the format nearest to the
checkpoint's weights unless `--peer-format` names another.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from formats.errors import EngineError, RequestError
from formats.scheme import LayerScheme
from inference.bench.peers.process import PeerProcess, PeerSpec, installed, threads

if TYPE_CHECKING:
    from inference.bench.load import Load, Run

KIND = Path(__file__).resolve().parent / "run_loads.py"
ADAPTERS = KIND.parent / "adapters"


@dataclass(frozen=True)
class Runtime(PeerSpec):
    """A runtime that `--peer` names.

    Attributes:
        by_bits: The format nearest to weights of 4, 8 and 16 bits.
        caches: Types of its cache that can be asked for.
        has_files: Whether it loads a model from files, which are written first.
    """

    formats: tuple[str, ...]
    by_bits: Mapping[int, str]
    caches: tuple[str, ...]
    has_files: bool = True


# fmt: off
RUNTIMES = {
    "llama.cpp": Runtime(
        "llama-cpp-python", ("gguf", "numpy"), ADAPTERS / "llama_cpp_adapter.py",
        ("Q4_0", "Q4_K_M", "Q8_0", "F16"), {4: "Q4_0", 8: "Q8_0", 16: "F16"}, ("f16", "q8_0"),
    ),
    "openvino": Runtime(
        "openvino", ("optimum-intel", "nncf", "transformers", "torch"),
        ADAPTERS / "openvino_adapter.py",
        ("int4", "int8", "fp16"), {4: "int4", 8: "int8", 16: "fp16"}, ("u8", "f16", "f32"),
    ),
    "transformers": Runtime(
        "transformers", ("torch",), ADAPTERS / "transformers_adapter.py",
        ("bfloat16", "float32"), dict.fromkeys((4, 8, 16), "bfloat16"), (), has_files=False,
    ),
}
# fmt: on


@dataclass(frozen=True)
class RuntimeChoice:
    """A runtime as it is asked for.

    Attributes:
        name: Of `RUNTIMES`.
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
        versions = installed(self.python, self.spec.distributions)
        if missing := [name for name, version in versions.items() if version is None]:
            raise EngineError(
                f"{self.name} needs {', '.join(missing)}, which {self.python} does not have; "
                f"install with `{self.python} -m pip install {' '.join(missing)}`, or name the "
                f"interpreter of an environment that has it: --peer {self.name}=PYTHON"
            )
        return str(versions[self.spec.package])


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
    own = _last_known("peer_format", formats, [peer.formats for peer in peers])
    kinds = _last_known("peer_kv", caches, [peer.caches for peer in peers])
    bits = 16 if scheme.weights is None else scheme.weights.bits
    return [
        RuntimeChoice(name, python or sys.executable, format or peer.by_bits[bits], kind)
        for (name, python), peer, format, kind in zip(pairs, peers, own, kinds, strict=True)
    ]


def _last_known(
    param: str, asked: Sequence[str], allowed: Sequence[tuple[str, ...]]
) -> list[str | None]:
    """For each peer the last that is asked for of those that it allows; None where none is."""
    known = list(dict.fromkeys(name for names in allowed for name in names))
    for name in asked:
        if name not in known:
            names = ", ".join(known) or "none"
            message = f"{param}: found {name!r}; the peers that are asked for allow {names}"
            raise RequestError(message, param)
    return [next((n for n in reversed(asked) if n in names), None) for names in allowed]


class MeasuredModel(NamedTuple):
    """Something that runs loads: what it is called, what it is, and how it is run."""

    name: str
    note: str
    run: Callable[[Load], Run]


@contextmanager
def started(
    choice: RuntimeChoice, config: Mapping[str, Any], shape: str, work: Path
) -> Iterator[MeasuredModel]:
    """A runtime in a process of its own, which ends when the context is left.

    Args:
        work: Folder for the model's files, written where it lacks them, and for what the runtime
            prints.

    Raises:
        EngineError: it could not be started, failed or died, now or in a run; the message is the
            reason.
    """
    version, name, log = choice.check_installed(), choice.text, work / f"{choice.name}.log"
    key = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
    job = {"adapter": str(choice.spec.adapter), "config": dict(config), "name": f"{shape}-{key}"}
    job |= {"work": str(work.resolve()), "threads": threads()}
    job |= {"format": choice.format, "cache": choice.cache}
    work.mkdir(parents=True, exist_ok=True)

    def run(load: Load) -> Run:
        from inference.bench.load import Run  # the engine, which the choice of a peer needs not

        with _named(name, log):
            peer.tell(load.model_dump())
            return Run(**peer.answer())

    with ExitStack() as stack:
        with _named(name, log):
            if choice.spec.has_files:
                with PeerProcess(choice.python, KIND, job | {"prepare": True}, log) as preparing:
                    preparing.answer()
            loading = PeerProcess(choice.python, KIND, job | {"prepare": False}, log)
            peer = stack.enter_context(loading)
            note = peer.answer()["note"]
        yield MeasuredModel(name, f"{name}: {choice.spec.package} {version}, {note}", run)


@contextmanager
def _named(name: str, log: Path) -> Iterator[None]:
    """Errors inside say whose they are."""
    try:
        yield
    except EngineError as error:
        raise EngineError(f"{name}: {error}. All that it printed is in {log}") from error
