"""What runs in a peer's own interpreter: quantizes a model with it and sends back its logits.

    python worker.py JOB DESCRIPTOR

It does the job of `JOB/job.json` and writes frames to the open file descriptor: the length of a
frame in 8 bytes, little-endian, then its content. The first frame is JSON, the record of the
quantization or `{"error": ...}`. Each of the others is a safetensors file with the `logits`, fp32
[tokens, vocabulary], of one evaluation sequence, in order. A pipe holds little, so no more than one
sequence is ever on its way.

Nothing of this project is imported here, as the peer's environment need not have it: torch,
transformers, safetensors and the peer's package are enough. The job names an adapter, a file with
one function `quantize(job: Job) -> model`, which loads the model, quantizes it within
`job.timed()`, and gives it back.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO


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


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.is_file():  # ru_maxrss may be that of the process that started this one
        line = next(row for row in status.read_text().splitlines() if row.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def load_adapter(path: str) -> ModuleType:
    """The adapter's module, under a name that shadows no package."""
    spec = importlib.util.spec_from_file_location("peer_adapter", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def main(arguments: list[str]) -> int:
    """The command; an error of the job is its first frame, its trace on standard error."""
    descriptor = int(arguments[1])
    os.set_inheritable(descriptor, False)
    with os.fdopen(descriptor, "wb") as pipe:
        try:
            run(Path(arguments[0]), pipe)
        except Exception as error:  # whatever a package raises is this process's answer
            traceback.print_exc()
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            send(pipe, json.dumps({"error": reason}).encode())
            return 1
    return 0


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its files are no packages
    raise SystemExit(main(sys.argv[1:]))
