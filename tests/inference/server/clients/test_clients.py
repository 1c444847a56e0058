"""Client libraries before a real server, each in an environment of its own.

Their versions clash with one another's (OpenAI 3 and what others need of it), and with ours. An
environment is made where the packages can be had, which takes a minute, so that this is for the CI.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inference.server.real_server import RealServer

HERE = Path(__file__).parent
KEY = "sk-of-the-tests"
CLIENTS = {  # packages, in the steps in which pip finds versions that go together
    "openai_client.py": [["pytest", "openai>=3,<4"]],
    "other_clients.py": [["pytest", "langchain-openai>=1", "litellm>=1.80"], ["mcp"]],
}


@pytest.fixture(scope="module")
def addresses(make_model, chat_template) -> Iterator[dict[str, str]]:
    """A server with a key, and one that is busy with a single request."""
    model = make_model(max_position_embeddings=2048)
    options = ("--served-model-name", "tiny", "--chat-template", str(chat_template))
    with (
        RealServer(model, *options, "--api-key", KEY) as server,
        RealServer(model, *options, "--max-batch-size", "1", "--max-queue", "1") as busy,
    ):
        yield {"PTQ_URL": server.address, "PTQ_KEY": KEY, "PTQ_BUSY_URL": busy.address}


@pytest.mark.ci
@pytest.mark.parametrize("script", CLIENTS)
def test_clients_are_served(script, addresses, tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env" / "bin" / "python")
    for packages in CLIENTS[script]:
        install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile"]
        subprocess.run([*install, *packages], check=True)
    run = [python, "-m", "pytest", "-q", "--noconftest", "-c", os.devnull, "-p", "no:cacheprovider"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(
        [*run, "--rootdir", str(HERE), str(HERE / script)],
        env=environment | addresses,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
