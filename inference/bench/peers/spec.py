"""What is known of a peer: a package of others that is measured beside ours.

A peer runs in an interpreter of an environment that has it (`inference.bench.peers.process`), by an
adapter, a file of its own that imports nothing of this project. `ptq bench --peer` measures
runtimes (`inference.bench.peers.runtimes`), a recipe's report tools that quantize (`ptq.peers`).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from formats.errors import EngineError

PROBE_SECONDS = 60.0
PROBE = """
import sys
sys.path.pop(0)  # where we were started: no packages of that interpreter
import json
from importlib import metadata

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


@dataclass(frozen=True)
class PeerSpec:
    """A package that is measured beside ours.

    Attributes:
        package: The distribution whose version is reported.
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


def installed(python: str, distributions: Iterable[str]) -> dict[str, str | None]:
    """Versions of distributions as an interpreter sees them, None for those that it lacks.

    Raises:
        EngineError: it cannot be started, or is no Python.
    """
    command = [python, "-c", PROBE, *distributions]
    options = {"capture_output": True, "text": True, "timeout": PROBE_SECONDS, "check": True}
    try:
        done = subprocess.run(command, env=clean_environment({}), **options)
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EngineError(f"{python} cannot be used as a Python interpreter ({error})") from error


def clean_environment(settings: dict[str, str]) -> dict[str, str]:
    """Ours without what would lead another interpreter to our modules, and settings of its own."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | settings
