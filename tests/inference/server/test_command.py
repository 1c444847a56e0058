"""What `ptq serve` says before it serves: greetings, and refusals that need no model."""

import json
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from formats.command import run_command
from formats.errors import RequestError
from inference.server import command
from inference.server.command import greeting, listen, main, parser
from tests.inference.server.fake_engine import INFO
from tests.inference.server.http_client import settings


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is printed where the arguments are refused, with exit code 2."""
    try:
        code = run_command(main, arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    return capsys.readouterr().err


@pytest.fixture
def no_process(monkeypatch):
    """No engine is started where something is refused before."""

    def started(*_: Any) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(command, "EngineProcess", started)


@pytest.mark.usefixtures("no_process")
class TestRefusals:
    def test_a_port_that_is_taken(self, capsys, tiny_llama):
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            told = refusal(capsys, str(tiny_llama), "--port", str(port))
        assert f"--port {port}: Address already in use" in told
        assert "--port 0" in told

    def test_a_host_that_is_not_ours(self, capsys, tiny_llama):
        told = refusal(capsys, str(tiny_llama), "--host", "192.0.2.1", "--port", "0")
        assert "--host 192.0.2.1" in told

    def test_a_folder_that_is_not_there(self, capsys):
        assert "no such folder" in refusal(capsys, "not/there")

    def test_a_folder_of_something_else(self, capsys, tiny_llama, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "checkpoint").symlink_to(tiny_llama)
        told = refusal(capsys, str(tmp_path / "run"))
        assert f"did you mean {tmp_path / 'run' / 'checkpoint'}?" in told

    def test_missing_libraries(self, capsys, tiny_llama, monkeypatch):
        monkeypatch.setattr(command, "find_spec", lambda name: None)
        assert "pip install 'ptq[serve]'" in refusal(capsys, str(tiny_llama))

    @pytest.mark.parametrize("key", ["", " padded", "zwölf", "two\nlines"])
    def test_keys_that_no_header_can_hold(self, capsys, tiny_llama, key, monkeypatch):
        monkeypatch.setenv("PTQ_API_KEY", key)
        assert "the API key" in refusal(capsys, str(tiny_llama))

    def test_files_that_cannot_be_read(self, capsys, tiny_llama, tmp_path):
        (tmp_path / "latin").write_bytes(b"\xe4")
        for option in ("--api-key-file", "--chat-template"):
            for file in ("none", "latin"):
                path = str(tmp_path / file)
                assert f"{option} {path}" in refusal(capsys, str(tiny_llama), option, path)

    @pytest.mark.parametrize(
        "arguments",
        [
            *("--port 70000", "--port http", "--drain-seconds -1", "--kv-memory 1.5"),
            *("--max-queue 0", "--root-path llm", "--root-path /a/../b", "--root-path /v1"),
        ],
    )
    def test_values_that_are_out_of_range(self, capsys, arguments):
        assert "found" in refusal(capsys, "model", *arguments.split())


def test_a_key_comes_from_a_file_before_the_command_line_before_the_environment(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PTQ_API_KEY", "environment")
    (tmp_path / "key").write_text("file\n")
    ask = parser().parse_args
    assert command._key(ask(["model"])) == "environment"
    assert command._key(ask(["model", "--api-key", "line"])) == "line"
    told = ["model", "--api-key", "line", "--api-key-file", str(tmp_path / "key")]
    assert command._key(ask(told)) == "file"
    monkeypatch.delenv("PTQ_API_KEY")
    assert command._key(ask(["model"])) is None


def test_the_greeting_quotes_for_a_shell_and_shows_no_key():
    told = greeting(INFO, settings(model="it's"), "http://127.0.0.1:1", chat=False)
    assert f"a cache of {INFO.kv_blocks * INFO.block_size} tokens" in told
    line = next(line for line in told.splitlines() if "curl" in line)
    body = json.loads(shlex.split(line)[-1])
    asked = {"prompt": "def add(a, b):", "max_tokens": 32, "temperature": 0}
    assert body == {"model": "it's"} | asked
    secret = greeting(INFO, settings(api_key="s3cret"), "http://127.0.0.1:1", chat=True)
    assert "s3cret" not in secret
    assert "Authorization: Bearer $PTQ_API_KEY" in secret
    assert "/v1/chat/completions" in secret
    on_gpu = greeting(
        replace(INFO, device="cuda:0", quantization="a8w8c8"), settings(), "x", chat=False
    )
    assert "(a8w8c8) on cuda:0" in on_gpu


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:"),
        ("0.0.0.0", "http://127.0.0.1:"),
        ("::1", "http://[::1]:"),
    ],
)
def test_the_address_is_one_to_call(host, address):
    try:
        listener = listen(host, 0)
    except RequestError:
        pytest.skip(f"this machine has no {host}")
    with listener:
        assert command._address(host, listener) == f"{address}{listener.getsockname()[1]}"


def test_a_damaged_checkpoint_is_told_and_leaves_no_process(tiny_llama, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(tiny_llama).iterdir():
        data = file.read_bytes()
        (folder / file.name).write_bytes(data[:5000] if file.suffix == ".safetensors" else data)
    done = subprocess.run(
        [sys.executable, "-m", "ptq", "serve", str(folder), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert "safetensors" in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
