"""The same prompts to our server and to vLLM's on one checkpoint, greedy; what differs.

    python -m tests.inference.server.vllm.same_texts CHECKPOINT /envs/vllm/bin/python

vLLM runs on the device that its build is for; its matrices and attention are float32 where that is
the CPU. Its own rounding differs from ours, so that a text may part from ours where two tokens are
nearly as likely.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import httpx

ROOT = Path(__file__).parents[4]
PROMPTS = (
    "def add(a, b):",
    "class Node:",
    "import os\n",
    "for i in range(",
    "def test_",
    "if __name__ ==",
    "with open(path",
    "try:\n    import",
    "return self.",
    "raise ValueError(",
    "while True:\n",
    "@property\n",
)
EXACT = ("--dtype", "float32", "--enforce-eager")
SECONDS = 300.0  # in which a server has to be ready


class Text(NamedTuple):
    """A continuation: its tokens, and for each place the log probabilities of the likeliest."""

    tokens: list[str]
    likeliest: list[dict[str, float]]


class Pair(NamedTuple):
    """What both made of a prompt."""

    prompt: str
    ours: Text
    theirs: Text

    @property
    def equal(self) -> bool:
        """Whether both texts are the same."""
        return self.ours.tokens == self.theirs.tokens

    @property
    def common(self) -> int:
        """Tokens until they part."""
        same = [a == b for a, b in zip(self.ours.tokens, self.theirs.tokens, strict=False)]
        return next((i for i, equal in enumerate(same) if not equal), len(same))

    @property
    def gap(self) -> float:
        """Nats by which our server holds its own token likelier where they part; 0 if never."""
        if self.equal:
            return 0.0
        known = self.ours.likeliest[self.common]
        return max(known.values()) - known.get(self.theirs.tokens[self.common], float("-inf"))


def compare(checkpoint: Path, python: str, tokens: int = 24) -> list[Pair]:
    """Each prompt continued by both servers, one after the other."""
    with served(checkpoint) as address:
        ours = [complete(address, prompt, tokens) for prompt in PROMPTS]
    words = ("--engine", f"vllm={python}", "--max-model-len", "512", "--", *EXACT)
    with served(checkpoint, *words) as address:
        theirs = [complete(address, prompt, tokens) for prompt in PROMPTS]
    return [Pair(*three) for three in zip(PROMPTS, ours, theirs, strict=True)]


def complete(address: str, prompt: str, tokens: int) -> Text:
    """A greedy continuation."""
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 5}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]["logprobs"]
    return Text(found["tokens"], found["top_logprobs"])


@contextmanager
def served(checkpoint: Path, *words: str) -> Iterator[str]:
    """The address of `ptq serve` with these arguments, while it runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = [str(checkpoint), "--port", str(port), "--served-model-name", "m"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ptq", "serve", *common, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            wait(f"http://127.0.0.1:{port}", process, output)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def wait(address: str, process: subprocess.Popen[bytes], output) -> None:
    """Wait until a server answers."""
    until = time.monotonic() + SECONDS
    while True:
        try:
            if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > until:
            output.seek(0)
            raise AssertionError(f"no server: {output.read()[-3000:]}")
        time.sleep(0.5)


def main(words: Sequence[str]) -> int:
    """Print a line for each prompt; 0 where all texts are the same."""
    pairs = compare(Path(words[0]), words[1])
    for pair in pairs:
        told = f"part after {pair.common} tokens, ours likelier by {pair.gap:.3f} nats"
        print(f"{pair.prompt!r}: {'the same' if pair.equal else told}")
    equal = sum(pair.equal for pair in pairs)
    print(f"{equal} of {len(pairs)} texts are the same")
    return int(equal < len(pairs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
