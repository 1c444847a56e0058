"""An interpreter of another environment: what it has, and the environment it is started with."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable

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
