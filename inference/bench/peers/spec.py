"""What is known of a peer: a package of others that is measured beside ours.

A peer runs in an interpreter of an environment that has it (`inference.bench.peers.process`), by an
adapter, a file of its own that imports nothing of this project. `ptq bench --peer` measures
runtimes (`inference.bench.peers.runtimes`), a recipe's report tools that quantize (`ptq.peers`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from inference.bench.peers.interpreter import installed


@dataclass(frozen=True)
class PeerSpec:
    """A package that is measured beside ours.

    Attributes:
        package: The distribution whose version is told.
        needs: Further distributions that its interpreter must have.
        adapter: File that runs it.
    """

    package: str
    needs: tuple[str, ...]
    adapter: Path

    @property
    def distributions(self) -> Iterable[str]:
        """All that its interpreter must have."""
        return (*self.needs, self.package)

    def version(self, python: str) -> str | None:
        """The version of its package that an interpreter has, if any.

        Raises:
            EngineError: it cannot be started, or is no Python.
        """
        return installed(python, [self.package])[self.package]

    def missing(self, python: str) -> list[str]:
        """Distributions that an interpreter lacks; errors as of `version`."""
        versions = installed(python, self.distributions)
        return [name for name, version in versions.items() if version is None]
