"""Memory of loads, in a process of its own: `python -m ...load_memory {cpu,gpu} WARM_UP CHECKPOINT...`."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from formats.checkpoint.read import Checkpoint
from formats.memory import peak_rss_bytes, release_freed_memory, rss_bytes
from inference.cpu.backend import CpuBackend
from inference.models import read
from inference.models.decoder import Decoder

ROOT = Path(__file__).resolve().parents[3]
TOGETHER = 1 << 21  # bytes of experts that a GPU gets at once here


def peaks(device: str, *paths: Path | str) -> list[tuple[int, int]]:
    """Bytes held at the peak of a load beyond those before it, and bytes of the packed model.

    Args:
        device: cpu, or gpu with the CPU in its place.
        paths: Of checkpoints; what is imported, compiled or cached at first, the first one takes.
    """
    command = [sys.executable, "-m", "tests.inference.models.load_memory", device]
    made = {"MALLOC_MMAP_THRESHOLD_": "65536", "TRITON_INTERPRET": "1"}  # freed memory goes back
    done = subprocess.run(
        [*command, *map(str, paths)],
        env=os.environ | made,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    return [(int(held), int(packed)) for held, packed in rows]


def main(device: str, *paths: str) -> None:
    """Print a line for each checkpoint."""
    torch.set_num_threads(1)
    backend = CpuBackend()
    if device == "gpu":
        from inference.gpu.backend import TritonBackend

        read.TOGETHER = TOGETHER
        backend = TritonBackend(torch.device("cpu"), torch.bfloat16)
    for path in paths:
        checkpoint = Checkpoint.open(path)
        release_freed_memory()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is forgotten
        before = rss_bytes()
        model = Decoder(checkpoint, backend)
        print(peak_rss_bytes() - before, model.weight_bytes)
        del model


if __name__ == "__main__":
    main(*sys.argv[1:])
