"""`/openapi.json` says what the routes take and answer, and a fuzzer that reads it finds no fault."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from pathlib import Path

import pytest

from tests.inference.server.http_client import ask

ROOT = Path(__file__).parents[3]


def test_every_route_names_its_body_and_every_status_that_can_come():
    document = ask("GET", "/openapi.json").json()
    schemas = document["components"]["schemas"]
    for name in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)):
        assert name in schemas
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            expected = {"200", "400", "401", "404", "405", "500", "503"}
            if method == "post":
                expected |= {"408", "413", "415", "429"}
                [content] = operation["requestBody"]["content"].values()
                body = schemas[content["schema"]["$ref"].rsplit("/", 1)[1]]
                assert body["additionalProperties"] is False
            assert set(operation["responses"]) == expected, path
            assert operation["description"]


@pytest.mark.ci  # fetches the fuzzer
def test_a_fuzzer_finds_no_fault(tmp_path):
    """No 5xx, no status that is not described, nothing wrong that is taken, no hang."""
    venv.create(tmp_path / "venv", with_pip=False)
    bin_ = tmp_path / "venv" / "bin"
    install = [sys.executable, "-m", "pip", "--python", bin_ / "python", "install", "-q"]
    subprocess.run([*install, "--no-compile", "schemathesis>=4.32"], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.inference.server.fake_server", str(port)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _wait(f"{url}/health")
        command = [bin_ / "schemathesis", "run", f"{url}/openapi.json", "--max-examples", "50"]
        command += ["--mode", "all", "--phases", "coverage,fuzzing", "--request-timeout", "20"]
        # What a schema cannot say, such as how long a prompt may be, is refused with a 400.
        command += ["--exclude-checks", "positive_data_acceptance", "--seed", "1"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout
    finally:
        server.send_signal(signal.SIGINT)
        told, _ = server.communicate(timeout=20)
    assert "in flight: 0" in told


def _wait(url: str) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(url)
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"{url} does not answer")
