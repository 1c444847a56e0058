"""The kind of job of a tool that quantizes: quantizes a model and sends back its logits.

What runs in the peer's own interpreter; see `inference.bench.peers.child`. The first answer is the
record of the quantization, its seconds and the largest memory. Each of the others is a safetensors
file with the `logits`, fp32 [tokens, vocabulary], of one evaluation sequence, in order. A pipe
holds little, so no more than one sequence is ever on its way.

Its environment needs torch, transformers, safetensors and the peer's package. An adapter has a
function of a `QuantizeJob`, which the job names: it loads the model, quantizes it within
`job.timed()`, and gives it back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from peer_child import peak_rss_bytes  # pyright: ignore[reportMissingImports]


class QuantizeJob:
    """What an adapter is given.

    Attributes:
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


def do(
    job: dict[str, Any],
    adapter: ModuleType,
    questions: object,
    send: Callable[[dict[str, Any] | bytes], None],
) -> None:
    """Quantize, tell of it, and send the logits; nothing more is asked."""
    import torch
    from safetensors.torch import load_file, save

    folder = Path(job["folder"])
    torch.set_num_threads(job["threads"])
    tokens = load_file(folder / "tokens.safetensors")
    described = QuantizeJob(folder, job, tokens)
    model = getattr(adapter, job["function"])(described)
    torch.set_num_threads(job["threads"])  # packages set it as well
    send({"seconds": described.seconds, "peak_rss_bytes": described.peak_rss_bytes})
    with torch.no_grad():
        for ids in sequences(tokens, "evaluation"):
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            send(save({"logits": logits.float().cpu().contiguous()}))
