"""`ptq chat`: a conversation with a model that has a chat template, in the terminal or a pipe.

    ptq chat CHECKPOINT [--system "Answer in one sentence."]
    echo "What is 2 + 2?" | ptq chat CHECKPOINT

Each line is a message; the answer comes as it is generated. What was said before is part of every
prompt. Answers go to standard output, all else to standard error.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from formats.chat_template import has_chat_template
from formats.command import CommandParser, run_command
from formats.errors import RequestError, typed
from formats.gguf.locate import locate_model
from formats.namespace import later
from inference.arguments import (
    add_adapter_argument,
    add_content_argument,
    add_engine_arguments,
    add_sampling_arguments,
    open_engine,
    read_adapters,
    sampling_params,
)
from inference.prompts import PromptFormat
from inference.requests.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from inference.engine import Engine
with later():
    from formats import tokenizer as tokenizers
    from formats.checkpoint import read as checkpoints

HELP = """\
/reset          forget the conversation
/system TEXT    the system message from here on; /system alone takes it away
/exit           end, as Ctrl-D does; Ctrl-C stops an answer"""
COMMAND = re.compile(r"(/[a-z]+)(?:\s+(.*))?", re.DOTALL)  # paths such as /etc/hosts are text


def main(argv: Sequence[str] | None = None) -> int:
    """Talk until the input ends; 0, or 1 where a message out of a pipe got no answer."""
    arguments = (own := parser()).parse_args(argv)
    if len(arguments.adapter) > 1:
        own.error("a chat runs with one --adapter; give one")
    params = sampling_params(arguments)
    folder = locate_model(arguments.checkpoint, arguments.revision)
    prompts = _prompts(folder, arguments)
    engine = open_engine(folder, arguments, 1, read_adapters(arguments))
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    conversation = Conversation(engine, prompts, params, interactive=interactive)
    if interactive:
        with suppress(ImportError):  # not every Python has it; lines are then edited less well
            import readline  # noqa: F401
        _tell(f"{arguments.checkpoint}: {engine.config.max_model_len} tokens of context. /help")
    unanswered = 0
    for line in _lines(interactive):
        try:
            if not conversation.take(line):
                break
        except RequestError as error:
            unanswered += 1
            _tell(f"error: {error}")
    return 1 if unanswered and not interactive else 0


def _prompts(folder: Path, arguments: argparse.Namespace) -> PromptFormat:
    """The model's chat template, with the system message; read before the weights are."""
    checkpoint = checkpoints.Checkpoint.open(folder)
    tokenizer = tokenizers.load_tokenizer(checkpoint.path)
    if not has_chat_template(tokenizer):
        raise RequestError(
            f"{arguments.checkpoint}: the model's tokenizer has no chat template, so that it "
            "cannot be talked with. It completes text: "
            f"{typed('predict', arguments.checkpoint, '--prompt', 'TEXT')}"
        )
    return PromptFormat.of(
        tokenizer,
        system=arguments.system,
        special_tokens_in_content=arguments.special_tokens_in_content,
    )


def _lines(interactive: bool) -> Iterator[str]:
    """Lines that hold something, without white space around them, until the input ends."""
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            _tell("\n(/exit or Ctrl-D ends)")
            continue
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is no UTF-8 ({error})") from error
        if line:
            yield line


class Conversation:
    """What was said, and how it goes on.

    A message that gets no answer is not part of it: the next one may be asked as if it had not
    been. Of an answer that was stopped, what there is is part of it.

    Args:
        engine: Answers.
        prompts: Its model's chat template, and the system message.
        params: How answers are decoded.
        interactive: Ctrl-C stops an answer; otherwise it ends the program.

    Attributes:
        messages: What was said, but for the system message.
    """

    def __init__(
        self, engine: Engine, prompts: PromptFormat, params: SamplingParams, *, interactive: bool
    ) -> None:
        self._engine, self._prompts, self._params = engine, prompts, params
        self._interactive = interactive
        self.messages: list[dict[str, str]] = []

    def take(self, line: str) -> bool:
        """Do what a line says, or answer it; False where it ends the conversation.

        Raises:
            RequestError: there is no answer; says why.
        """
        command = COMMAND.fullmatch(line)
        if command is None:
            self._ask(line)
            return True
        name, text = command[1], command[2]
        if name == "/reset":
            self.messages.clear()
            _tell("(the conversation is forgotten)")
        elif name == "/system":
            self._prompts = self._prompts.with_system(text)
            _tell("(the system message is set)" if text else "(there is no system message)")
        elif name == "/help":
            _tell(HELP)
        elif name != "/exit":
            raise RequestError(f"no command {name}. There are:\n{HELP}")
        return name != "/exit"

    def _ask(self, question: str) -> None:
        """Print the answer to a message as it comes, and keep both."""
        messages = [*self.messages, {"role": "user", "content": question}]
        tokens = self._prompts.tokens(messages)
        self._require_room(len(tokens))
        pieces, output = [], None
        with _interruptible(self._interactive) as stopped:
            stream = self._engine.stream(tokens, self._params)
            for output in stream:
                pieces.append(output.delta)
                print(output.delta, end="", flush=True)
                if stopped.is_set():
                    stream.close()  # ends the request
                    break
        print(flush=True)
        assert output is not None
        if output.finish_reason == "error":
            raise RequestError(f"the answer failed: {output.error}")
        answer = "".join(pieces)
        self._tell_end(output, answer)
        if answer:
            self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _require_room(self, tokens: int) -> None:
        length = self._engine.config.max_model_len or 0
        if tokens >= length:
            most = self._engine.model.config.max_positions
            more = f", --max-model-len up to {most} gives more room" if most > length else ""
            raise RequestError(
                f"the conversation has {tokens} tokens, which leaves no room for an answer in a "
                f"context of {length}. Ask for less, or begin anew with /reset{more}"
            )

    def _tell_end(self, output: RequestOutput, answer: str) -> None:
        """Say what the answer itself does not show."""
        kept = "" if answer else "; the message is forgotten"
        if not output.finished:
            _tell(f"(stopped{kept})")
        elif output.finish_reason == "length" and len(output.token_ids) < self._params.max_tokens:
            length = self._engine.config.max_model_len
            _tell(f"(cut: the context of {length} tokens is full; /reset begins anew{kept})")
        elif output.finish_reason == "length":
            _tell(f"(cut at --max-tokens {self._params.max_tokens}{kept})")
        elif not answer:
            _tell(f"(an empty answer{kept})")


@contextmanager
def _interruptible(interactive: bool) -> Iterator[Event]:
    """In a terminal, note Ctrl-C instead of being torn out of a step; a second one ends it all."""
    stopped = Event()

    def stop(*_: object) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = signal.signal(signal.SIGINT, stop) if interactive else None
    try:
        yield stopped
    finally:
        if interactive:
            signal.signal(signal.SIGINT, before)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq chat`."""
    made = CommandParser(
        prog="ptq chat",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Talk with a model that has a chat template. Each line, from the terminal or a "
        "pipe, is a message.",
        epilog=f"In a conversation:\n{HELP}",
    )
    add_engine_arguments(made)
    add_adapter_argument(made, "The chat runs with it, so that there is one at most")
    made.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    add_content_argument(made)
    add_sampling_arguments(made, max_tokens=1024)
    return made


if __name__ == "__main__":
    raise SystemExit(run_command(main))
