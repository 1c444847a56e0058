"""The chat command: through a pipe, in a terminal, its commands, and what gets no answer."""

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from formats.command import run_command
from inference import chat
from inference.config import EngineConfig
from inference.engine import Engine
from inference.prompts import PromptFormat
from inference.requests.request import RequestOutput, SamplingParams
from tests.interrupts import take_interrupts

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.content == 'refused' %}{{ raise_exception('not this') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHORT = ["--max-tokens", "5"]


@pytest.fixture(scope="module")
def model(make_model, tmp_path_factory) -> Path:
    """A model with a template and without an end token: its answers are as long as they may be."""
    original = make_model("llama", max_position_embeddings=8192)
    folder = shutil.copytree(original, tmp_path_factory.mktemp("chat") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("config", "generation_config", "tokenizer_config"):
        path = folder / f"{name}.json"
        values = json.loads(path.read_text())
        ends = {"eos_token", "eos_token_id"}
        path.write_text(json.dumps({k: v for k, v in values.items() if k not in ends}))
    return folder


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    return Engine.from_pretrained(model, config=EngineConfig(max_batch_size=1))


def answer(engine: Engine, prompt: str, tokens: int = 5) -> str:
    return engine.generate([prompt], SamplingParams(max_tokens=tokens))[0].text


def say(monkeypatch, model: Path, text: str, *options: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return run_command(chat.main, [str(model), *SHORT, *options])


def conversation(engine: Engine, tokens: int = 5, **options: bool) -> chat.Conversation:
    prompts, params = PromptFormat.of(engine.tokenizer), SamplingParams(max_tokens=tokens)
    return chat.Conversation(engine, prompts, params, **({"interactive": False} | options))


def test_lines_of_a_pipe_are_answered_with_what_was_said_before(model, engine, monkeypatch, capsys):
    first = answer(engine, "<user>hi<assistant>")
    second = answer(engine, f"<user>hi<assistant>{first}<user>and?<assistant>")
    assert say(monkeypatch, model, "hi\n\n  and?  \n") == 0
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_control_tokens_in_what_is_said_are_text_unless_asked_for(
    model, engine, monkeypatch, capsys
):
    said, text = "hi<|endoftext|>there", "<user>hi<|endoftext|>there<assistant>"
    spelled = engine.tokenizer(text, split_special_tokens=True)["input_ids"]
    params = SamplingParams(max_tokens=5)
    expected = engine.generate([spelled, text], params)
    assert expected[0].text != expected[1].text
    for options, output in zip(([], ["--special-tokens-in-content"]), expected, strict=True):
        assert say(monkeypatch, model, said, *options) == 0
        assert capsys.readouterr().out == f"{output.text}\n"


def test_commands(model, engine, monkeypatch, capsys):
    plain = answer(engine, "<user>hi<assistant>")
    with_system = answer(engine, "<system>be kind<user>hi<assistant>")
    lines = ["hi", "/reset", "/system be kind", "hi", "/reset", "/system", "hi", "/help", "/exit"]
    assert say(monkeypatch, model, "\n".join([*lines, "never read"])) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{plain}\n{with_system}\n{plain}\n"
    assert captured.err.count("(the conversation is forgotten)") == 2
    assert "/system TEXT" in captured.err
    assert say(monkeypatch, model, "hi", "--system", "be kind") == 0
    assert capsys.readouterr().out == f"{with_system}\n"


def test_what_gets_no_answer_leaves_the_conversation_as_it_was(model, engine, monkeypatch, capsys):
    paths = ("/etc/hosts", "/etc/hosts is a file", "/a/b", "/a/b/c d", "/Etc")
    asked = next(path for path in paths if answer(engine, f"<user>{path}<assistant>"))
    first = answer(engine, f"<user>{asked}<assistant>")
    second = answer(engine, f"<user>{asked}<assistant>{first}<user>hi<assistant>")
    lines = [asked, "/nope", "refused", "/system refused", "\ud800", "x " * 600, "hi"]
    assert say(monkeypatch, model, "\n".join(lines), "--max-model-len", "512") == 1
    captured = capsys.readouterr()
    assert captured.out == f"{first}\n{second}\n"
    assert "error: no command /nope. There are:\n/reset" in captured.err
    assert captured.err.count("cannot render it (not this)") == 2
    assert "half a surrogate pair" in captured.err
    assert re.search(r"error: the conversation has \d+ tokens, .* context of 512", captured.err)


def test_a_full_context_is_told_with_what_to_do(model, engine, monkeypatch, capsys):
    prompt = "<user>hi<assistant>"
    length = len(engine.tokenizer(prompt)["input_ids"]) + 2
    options = ["--max-model-len", str(length), "--max-tokens", "50"]
    assert say(monkeypatch, model, "hi\nhi\n/reset\nhi\n", *options) == 1
    captured = capsys.readouterr()
    assert captured.out == f"{answer(engine, prompt, 2)}\n" * 2
    assert captured.err.count(f"(cut: the context of {length} tokens is full; /reset") == 2
    assert f"a context of {length}. Ask for less, or begin anew with /reset" in captured.err
    assert "--max-model-len up to 8192" in captured.err


def test_an_interrupt_stops_an_answer_and_keeps_the_session(engine, monkeypatch, capsys):
    talk, stream = conversation(engine, 50, interactive=True), engine.stream

    def interrupted(prompt: list[int], params: SamplingParams):
        for i, output in enumerate(stream(prompt, params)):
            if i == 3:
                signal.raise_signal(signal.SIGINT)
            yield output

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(engine, "stream", interrupted)
    assert talk.take("hi")
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is before
    assert not engine.has_unfinished
    engine.check_integrity()
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]
    said = talk.messages[1]["content"]
    captured = capsys.readouterr()
    assert captured.out == said + "\n"
    assert captured.err == "(stopped)\n"
    assert talk.take("and?")
    assert len(talk.messages) == 4


def test_an_answer_that_fails_is_told(engine, monkeypatch):
    talk = conversation(engine)
    failed = RequestOutput("x", [1], finish_reason="error", error="NaN")
    monkeypatch.setattr(engine, "stream", lambda *_: iter([failed]))
    with pytest.raises(chat.RequestError, match="the answer failed: NaN"):
        talk.take("hi")
    assert talk.messages == []


def test_a_model_without_a_template_is_told_before_it_is_loaded(tiny_llama, monkeypatch, capsys):
    monkeypatch.setattr(chat, "open_engine", lambda *_, **__: pytest.fail("was loaded"))
    assert say(monkeypatch, tiny_llama, "hi") == 2
    error = capsys.readouterr().err
    assert "has no chat template" in error
    assert f"`ptq predict {tiny_llama} --prompt TEXT`" in error


def _own_terminal() -> None:
    """Make standard input the terminal that this child is controlled from."""
    take_interrupts()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A chat in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "ptq", "chat", *arguments]
        self._child = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=os.environ | {"TERM": "dumb", "PYTHONPATH": str(ROOT)},
            preexec_fn=_own_terminal,
        )
        os.close(theirs)

    def expect(self, text: str, again: str = "") -> str:
        """What is shown up to a text; fails where it does not come.

        Keys `again` are typed every second until it does.
        """
        shown, end = "", time.monotonic() + 120
        while text not in shown:
            if select.select([self._ours], [], [], 1)[0]:
                shown += os.read(self._ours, 1).decode(errors="replace")
            else:
                assert time.monotonic() < end, f"no {text!r} in {shown!r}"
                self.type(again)
        return shown

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self) -> int:
        code = self._child.wait(timeout=60)
        os.close(self._ours)
        return code


def test_in_a_terminal(model, engine):
    """Lines are edited, Ctrl-C at the prompt and in an answer keep the session, Ctrl-D ends it."""
    terminal = Terminal(str(model), "--max-tokens", "4000")
    assert "4096 tokens of context" in terminal.expect("> ")
    terminal.expect("(/exit or Ctrl-D ends)", again="\x03")  # readline may miss the first one
    terminal.expect("> ")
    terminal.type("/rexset\x02\x02\x02\x7f\r")  # left three times, backspace: /reset
    terminal.expect("(the conversation is forgotten)")
    terminal.expect("> ")
    terminal.type("hi\r")
    terminal.expect("hi\r\n")
    terminal.expect(answer(engine, "<user>hi<assistant>", 9).rstrip()[:5])
    terminal.type("\x03")
    assert "(stopped)" in terminal.expect("\r\n> ")
    terminal.type("/help\r")
    terminal.expect("as Ctrl-D does")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
