"""transformers, eager: random weights, its default attention and its default, growing cache."""

from __future__ import annotations

import time
from typing import Any

import torch


class Model:
    """A model of the shape."""

    def __init__(self, job: Any) -> None:
        torch.set_num_threads(job.threads)
        self._model = job.random_model(job.format).eval()
        self.kv_bytes_per_token = job.kv_elements * self._model.dtype.itemsize
        self.weight_bytes = sum(parameter.nbytes for parameter in self._model.parameters())
        attention = self._model.config._attn_implementation
        self.note = f"torch {torch.__version__}, eager, {attention}, {job.threads} threads"

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        """See `inference.bench.peers.run_loads`."""
        ids, cache = torch.tensor(prompts), None
        times = [time.perf_counter()]
        for _ in range(new_tokens):
            out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            times.append(time.perf_counter())
        return times


load = Model
