"""A process that compiles constraints, each in a child of its own.

xgrammar is native code that reads what strangers write: a schema may take all memory, minutes, or
the process with it. So the engine sends each to this process, which has nothing to lose, and this
one forks for it a child with bounds of time and memory. The child also tries the result: it draws
tokens as an output would. What the engine gets is known to have worked.

    engine -> TokenizerInfo as JSON, Bounds; then (number, kind, text) for each constraint
    helper -> (number, compiled grammar as JSON or None, why it was refused or None)

It ends when the engine does: its connection does then.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from inference.requests.characters import CLASS, in_order

TRIED = 48  # tokens that a child draws
MOST_WHITESPACE = 32  # characters of it in a row: else a model may write blanks without end
OF_BOUNDED = r"(([^\"\\\r\n]))"  # a character of a string of bounded length, as xgrammar has it
OF_OTHERS = r"[^\0-\x1f\"\\\r\n"  # in names beside others a letter of these follows
CHARACTER = r"[^\0-\x1f\"\\\ud800-\udfff"  # halves of a surrogate pair are no UTF-8
OR_ESCAPED = rf'(({CHARACTER}]) | ("\\" [\"\\/bfnrt]))'
IN_A_TEXT = re.compile(r"(\\x[0-9a-f]{2})(?=[0-9a-fA-F])|\\.")
IN_RULES = re.compile(rf'("(?:\\.|[^"\\])*")|{CLASS}')
MOST_AT_ONCE = 4  # children
PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ")  # where in xgrammar a message comes from


@dataclass(frozen=True)
class Bounds:
    """What a constraint may take.

    Attributes:
        seconds: Until it is compiled and tried.
        nbytes: Memory of the child, beyond what it starts with.
        compiled: Bytes of the result.
        step: Seconds for the mask of one token.
    """

    seconds: float = 10.0
    nbytes: int = 2 << 30
    compiled: int = 64 << 20
    step: float = 0.25


Answer = tuple[int, str | None, str | None]


@dataclass
class Child:
    """A constraint that is being compiled: its number, its process, and when that is ended."""

    number: int
    pid: int
    deadline: float


@dataclass
class Helper:
    """Compiles what comes through a connection until it ends."""

    connection: Connection
    waiting: deque[tuple[int, str, str]] = field(default_factory=deque)
    children: dict[Connection, Child] = field(default_factory=dict)

    def run(self) -> None:
        """Serve until the connection ends."""
        import xgrammar  # seconds, once

        tokenizer, self.bounds = self.connection.recv()
        self.tokenizer = xgrammar.TokenizerInfo.deserialize_json(tokenizer)
        try:
            while True:
                self._turn()
        except (EOFError, ConnectionError):
            for child in self.children.values():
                os.kill(child.pid, signal.SIGKILL)

    def _turn(self) -> None:
        """Wait until something happens, and see to it."""
        left = [child.deadline - time.monotonic() for child in self.children.values()]
        for ready in wait([self.connection, *self.children], max(0.0, min(left)) if left else None):
            assert isinstance(ready, Connection)
            if ready is self.connection:
                self.waiting.append(self.connection.recv())
            else:
                self._collect(ready)
        now = time.monotonic()
        for pipe in [pipe for pipe, child in self.children.items() if child.deadline <= now]:
            os.kill(self.children[pipe].pid, signal.SIGKILL)
            self._end(pipe, None, f"it takes more than {self.bounds.seconds:g} s to compile")
        while self.waiting and len(self.children) < MOST_AT_ONCE:
            self._start(*self.waiting.popleft())

    def _start(self, number: int, kind: str, text: str) -> None:
        reads, writes = os.pipe()
        ours, theirs = Connection(reads, writable=False), Connection(writes, readable=False)
        pid = os.fork()
        if pid == 0:
            self.connection.close()
            ours.close()
            child_main(self.tokenizer, self.bounds, kind, text, theirs)
        theirs.close()
        self.children[ours] = Child(number, pid, time.monotonic() + self.bounds.seconds)

    def _collect(self, pipe: Connection) -> None:
        try:
            self._end(pipe, *pipe.recv())
        except EOFError:  # it crashed
            self._end(pipe, None, "xgrammar cannot compile it: it ended without an answer")

    def _end(self, pipe: Connection, compiled: str | None, refusal: str | None) -> None:
        child = self.children.pop(pipe)
        pipe.close()
        os.waitpid(child.pid, 0)
        self.connection.send((child.number, compiled, refusal))


def child_main(tokenizer: Any, bounds: Bounds, kind: str, text: str, pipe: Connection) -> None:
    """Compile a constraint, send the result, and end the process."""
    try:
        os.nice(5)  # the engine's steps come first
        limit_memory(bounds.nbytes)
        with tempfile.TemporaryFile() as said:
            os.dup2(said.fileno(), 2)
            compiled, refusal = None, None
            try:
                compiled = compile_one(tokenizer, bounds, kind, text)
            except Exception as error:  # of any kind: it is all native code, and this its process
                refusal = plain(str(error) or type(error).__name__)
                if "bad_alloc" in refusal or isinstance(error, MemoryError):
                    refusal = f"it takes more than {bounds.nbytes >> 20} MB to compile"
            said.seek(0)
            warnings = plain(said.read(4000).decode(errors="replace"))
        if compiled is not None and warnings:  # something of it would be ignored
            compiled, refusal = None, f"leave out what would not be kept: {warnings}"
        pipe.send((compiled, refusal))
    finally:
        os._exit(0)


def compile_one(tokenizer: Any, bounds: Bounds, kind: str, text: str) -> str:
    """Compile and try a constraint.

    Raises:
        Exception: it cannot be compiled, whatever xgrammar says, or does not work.
    """
    import xgrammar

    threads = max(1, min(8, (os.cpu_count() or 1) // 2))
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=threads, cache_enabled=False)
    compiled = compiler.compile_grammar(grammar_of(kind, text))
    try_out(compiled, tokenizer, bounds)
    result = compiled.serialize_json()
    if len(result) > bounds.compiled:
        size, most = len(result) >> 20, bounds.compiled >> 20
        raise ValueError(f"compiled it takes {size} MB; at most {most} are taken")
    return result


def grammar_of(kind: str, text: str) -> Any:
    """The grammar of a constraint, with strings as JSON has them.

    xgrammar 0.2 allows halves of surrogate pairs in strings, and in those whose length is bounded
    control characters, but no escapes. Before it compiles a grammar it writes it and reads it
    again, `\xdf` and `e` as U+0DFE: the two are parted here, see `inference.requests.characters`.

    Raises:
        Exception: xgrammar does not take it.
    """
    from xgrammar import Grammar

    if kind == "regex":
        grammar = Grammar.from_regex(text)
    elif kind == "grammar":
        grammar = Grammar.from_ebnf(text)
    elif kind == "structural_tag":
        grammar = Grammar.from_structural_tag(text)
    else:
        schema = text or '{"type":"object"}'
        grammar = Grammar.from_json_schema(schema, max_whitespace_cnt=MOST_WHITESPACE)
    rules = str(grammar)
    mended = IN_RULES.sub(_parted, rules)
    if kind not in ("regex", "grammar"):
        mended = mended.replace(OF_BOUNDED, OR_ESCAPED).replace(OF_OTHERS, CHARACTER)
    return grammar if mended == rules else Grammar.from_ebnf(mended)


def _parted(found: re.Match[str]) -> str:
    """A text, or a class, of a grammar as xgrammar writes it, which it reads as it was meant."""
    text = found[1]
    if text is None:
        return in_order(found)
    return IN_A_TEXT.sub(lambda each: f'{each[1]}" "' if each[1] else each[0], text)


def try_out(compiled: Any, tokenizer: Any, bounds: Bounds) -> None:
    """Draw tokens under a compiled grammar, each of those that may come as likely as the others.

    Raises:
        ValueError: no token may come, or it takes too long to say which.
    """
    import numpy as np
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled)
    mask = np.zeros((1, -(-tokenizer.vocab_size // 32)), dtype=np.int32)
    generator = np.random.default_rng(0)
    for made in range(TRIED):
        start = time.monotonic()
        matcher.fill_next_token_bitmask(mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        if len(allowed) == 0:
            where = "no text matches it" if made == 0 else "some of its texts cannot be completed"
            raise ValueError(f"{where} with the tokens of this model")
        matcher.accept_token(int(generator.choice(allowed)))
        if time.monotonic() - start > bounds.step:
            raise ValueError("it takes too long to say which tokens may come")
        if matcher.is_terminated():
            return


def limit_memory(nbytes: int) -> None:
    """Bound the memory that this process may take beyond what it has."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as pages:
            held = int(pages.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + nbytes, held + nbytes))
    except (ImportError, OSError, ValueError):
        return  # no Linux; time is bounded still


def plain(message: str) -> str:
    """What xgrammar says, each line once, without its places in source files, shortened."""
    lines = (PLACE.sub("", line).removeprefix("Warning: ") for line in message.splitlines())
    return " ".join(" ".join(dict.fromkeys(lines)).split())[:300]


def main() -> None:
    """Serve the connection whose file descriptor the command line gives."""
    Helper(Connection(int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
