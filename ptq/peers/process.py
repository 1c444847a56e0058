"""A peer at work in a process of its own, under its own interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import load
from torch import Tensor

from formats.errors import EngineError
from formats.scheme import Strict
from inference.bench.peers.interpreter import kill_group, start, why_it_ended
from ptq.peers.specs import PeerSpec

WORKER = Path(__file__).resolve().parent / "worker.py"


class Quantized(Strict):
    """What a worker tells of a quantization: wall time, and the largest memory of its process."""

    seconds: float
    peak_rss_bytes: int


def interpreter(spec: PeerSpec) -> str:
    """The Python that runs a peer."""
    return sys.executable if spec.python is None else str(spec.python.absolute())


class PeerProcess:
    """Starts a worker on a job, and gives what it sends; a context manager and a `Scorer`.

    Args:
        spec: The peer.
        job: Folder with the job; see `ptq.peers.worker`.
        log: File that receives what the process prints.
        cpu_only: Hide GPUs from it.

    Raises:
        EngineError: from all methods, where it could not be started, failed, died, or was stopped
            as its time was over; the message is the reason.
    """

    def __init__(self, spec: PeerSpec, job: Path, log: Path, *, cpu_only: bool) -> None:
        self._spec, self._job, self._log = spec, job, log
        settings = {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }
        self._settings = settings | ({"CUDA_VISIBLE_DEVICES": ""} if cpu_only else {})
        self._late = False

    def __enter__(self) -> PeerProcess:
        read, write = os.pipe()
        self._pipe = os.fdopen(read, "rb")
        python, job = interpreter(self._spec), self._job.resolve()
        try:
            with self._log.open("wb") as log:
                self._process = start(
                    python,
                    WORKER,
                    [str(job), str(write)],
                    self._settings,
                    cwd=job,  # some packages leave files where they are started
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(write,),
                )
        except OSError as error:
            self._pipe.close()
            raise EngineError(f"{python} cannot be started ({error.strerror})") from error
        finally:
            os.close(write)
        self._timer = threading.Timer(self._spec.timeout, self._stop)
        self._timer.daemon = True
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        kill_group(self._process)
        self._process.wait()
        self._pipe.close()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def quantized(self) -> Quantized:
        """Wait for the end of the quantization."""
        record = json.loads(self._frame())
        if "error" in record:
            raise EngineError(record["error"])
        return Quantized.model_validate(record)

    def score(self, ids: Tensor) -> Tensor:
        """Logits fp32 [T, vocabulary] of the next evaluation sequence [T]."""
        frame = self._frame()
        if frame.startswith(b'{"error"'):
            raise EngineError(json.loads(frame)["error"])
        logits = load(frame)["logits"]
        if len(logits) != len(ids) or not torch.isfinite(logits).all():
            raise EngineError(
                f"its logits {list(logits.shape)} of {len(ids)} tokens are not finite, or too few"
            )
        return logits

    def _frame(self) -> bytes:
        length = int.from_bytes(header := self._pipe.read(8), "little")
        frame = self._pipe.read(length)
        if len(header) < 8 or len(frame) < length:
            raise EngineError(self._why_it_ended())
        return frame

    def _why_it_ended(self) -> str:
        code = self._process.wait()
        if self._late:
            return f"stopped after its {self._spec.timeout:g} s; a larger `timeout` gives it longer"
        return why_it_ended(code, self._log)

    def _stop(self) -> None:
        self._late = True
        kill_group(self._process)
