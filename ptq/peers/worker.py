"""What runs in a peer's own interpreter: quantizes a model with it and sends back its logits.

    python child.py worker.py JOB DESCRIPTOR

It does the job of `JOB/job.json` and writes frames to the open file descriptor: the length of a
frame in 8 bytes, little-endian, then its content. The first frame is JSON, the record of the
quantization or `{"error": ...}`. Each of the others is a safetensors file with the `logits`, fp32
[tokens, vocabulary], of one evaluation sequence, in order. A pipe holds little, so no more than one
sequence is ever on its way.

Its environment needs torch, transformers, safetensors and the peer's package. The job names an
adapter, a file with one function `quantize(job: Job) -> model`, which loads the model, quantizes it
within `job.timed()`, and gives it back.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from peer_child import (  # pyright: ignore[reportMissingImports]
    load_adapter,
    peak_rss_bytes,
    reason_of,
)


class Job:
    """What an adapter is given.

    Attributes:
        model: Folder of the model.
        options: The adapter's own, from the catalogue of peers.
        calibration: Token ids, int64 [tokens] each, without padding.
        scratch: A folder for files, removed by the parent.
    """

    def __init__(self, folder: Path, description: dict[str, Any], tokens: dict[str, Any]) -> None:
        """Of a job's folder, its description and its tokens."""
        self.model: str = description["model"]
        self.options: dict[str, Any] = description["options"]
        self.calibration = sequences(tokens, "calibration")
        self.scratch = folder / "scratch"
        self.seconds: float | None = None
        self.peak_rss_bytes = 0

    def load(self, **options: Any) -> Any:
        """The model in fp32, ready for inference; options as of transformers."""
        import torch
        from transformers import AutoModelForCausalLM

        options = {"dtype": torch.float32, "local_files_only": True} | options
        return AutoModelForCausalLM.from_pretrained(self.model, **options).eval()

    def tokenizer(self) -> Any:
        """The model's tokenizer, for those packages that want one beside the tokens."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model, local_files_only=True)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Take the time and the memory of the quantization."""
        start = time.perf_counter()
        yield
        self.seconds = time.perf_counter() - start
        self.peak_rss_bytes = peak_rss_bytes()


def sequences(tokens: dict[str, Any], split: str) -> list[Any]:
    """Sequences of a split without their padding: int64 [tokens] each."""
    pairs = zip(tokens[split], tokens[f"{split}_mask"], strict=True)
    return [ids[mask] for ids, mask in pairs]


def run(folder: Path, pipe: BinaryIO) -> None:
    """Do a job: quantize, tell of it, and send the logits."""
    description = json.loads((folder / "job.json").read_bytes())
    adapter = load_adapter(description["adapter"])
    import torch
    from safetensors.torch import load_file, save

    torch.set_num_threads(description["threads"])
    tokens = load_file(folder / "tokens.safetensors")
    job = Job(folder, description, tokens)
    model = adapter.quantize(job)
    torch.set_num_threads(description["threads"])  # packages set it as well
    record = {"seconds": job.seconds, "peak_rss_bytes": job.peak_rss_bytes}
    send(pipe, json.dumps(record).encode())
    with torch.no_grad():
        for ids in sequences(tokens, "evaluation"):
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            send(pipe, save({"logits": logits.float().cpu().contiguous()}))


def send(pipe: BinaryIO, frame: bytes) -> None:
    """Write one frame."""
    pipe.write(len(frame).to_bytes(8, "little"))
    pipe.write(frame)
    pipe.flush()


def main(arguments: list[str], _: object) -> int:
    """What `peer_child` runs; an error of the job is its first frame."""
    descriptor = int(arguments[1])
    os.set_inheritable(descriptor, False)
    with os.fdopen(descriptor, "wb") as pipe:
        try:
            run(Path(arguments[0]), pipe)
        except Exception as error:  # whatever a package raises is this process's answer
            send(pipe, json.dumps({"error": reason_of(error)}).encode())
            return 1
    return 0
