"""Memory of a GPU, and what is said where it is too small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from formats.errors import EngineError
from formats.memory import available_bytes

OF_WEIGHTS = "quantize the model further, or take a GPU with more memory"


OF_CACHE = (
    "lower the number of requests or their length (max_batch_size, max_model_len, kv_blocks), or "
    "take a scheme with a quantized cache, such as a8w8c8"
)


OF_STEPS = "lower max_batched_tokens, or max_batch_size, max_model_len or kv_blocks"


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that nobody holds, what this process has freed included.

    Of a CPU, which stands for a GPU where Triton interprets, what the system has left.
    """
    if device.type != "cuda":
        return available_bytes()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def ran_out(error: Exception) -> bool:
    """Whether memory ran out: that of torch's allocator, or the driver's, as for a CUDA graph."""
    return isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error)


def too_small(what: str, device: torch.device, free: int, needed: int, remedy: str) -> EngineError:
    """What is raised where memory runs out.

    Args:
        what: What it ran out for.
        free: Bytes that it had.
        needed: Bytes that are needed at least; 0 where that is not known.
        remedy: What to change.
    """
    wants = f"needs {needed / 1e9:.2f} GB" if needed else "found no more"
    return EngineError(
        f"{device}: memory is too small: {what} {wants}, {free / 1e9:.2f} GB are free; {remedy}"
    )


@contextmanager
def memory_for(what: str, device: torch.device, needed: int, remedy: str) -> Iterator[None]:
    """Tell where a GPU's memory runs out in the block; arguments as in `too_small`.

    Raises:
        EngineError: it did.
    """
    free = free_bytes(device)
    try:
        yield
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise too_small(what, device, free, needed, remedy) from error
