"""The kind of job of a runtime: loads a model of a shape, and runs loads on it.

What runs in the peer's own interpreter; see `inference.bench.peers.child`. With `prepare` the job
is to write the files of the model, where they are not there, and the answer is `{}`: in a process
of its own, so that its memory is not the model's. Else the model is loaded, and the first answer is
`{"note": ...}`. Each question is then a load, `batch`, `prompt_tokens` and `new_tokens`, answered
by the fields of `inference.bench.load.Run`.

An adapter has `load(job) -> model`, and `prepare(job)` where there are files to write. A model has
`note`, `weight_bytes`, `kv_bytes_per_token` and `run(prompts, new_tokens)`, which decodes all
prompts together, greedily, and gives the times (`time.perf_counter`) before the first and after
each token of all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from peer_child import peak_rss_bytes  # pyright: ignore[reportMissingImports]

SEED = 0


class Job(SimpleNamespace):
    """What an adapter is given.

    Attributes:
        config: config.json of the shape.
        name: Of the shape, unlike that of any other; files are named after it.
        cache: Type of the cache, None for the default.
        threads: Threads that it may use.
        prepare: Whether only files are to be written.
    """

    def path(self, *parts: str) -> Path:
        """Path of a file of this shape, its name made of parts."""
        return Path(self.work) / "-".join([self.name, *parts])

    @property
    def kv_elements(self) -> int:
        """Elements of K and V of one token in all layers."""
        config, heads = self.config, self.config["num_attention_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // heads
        return 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * dim

    def random_model(self, dtype: str) -> Any:
        """The shape in transformers, with random weights of a type of torch, by its name."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        shape = AutoConfig.for_model(**self.config)
        return AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, dtype))


def run_load(model: Any, vocabulary: int, load: dict[str, int]) -> dict[str, Any]:
    """Run a load once; gives the fields of a `Run`."""
    batch, new = load["batch"], load["new_tokens"]
    numbers = random.Random(SEED)
    places = range(load["prompt_tokens"])
    prompts = [[numbers.randrange(vocabulary) for _ in places] for _ in range(batch)]
    times = model.run(prompts, new)
    if len(times) != new + 1:
        raise ValueError(f"{new} tokens were asked for, {len(times) - 1} came")
    steps = [b - a for a, b in pairwise(times)]
    return {
        "prefill_s": steps[0],
        "decode_s": times[-1] - times[1],
        "decode_tokens": batch * (new - 1),
        "first_token_s": steps[:1] * batch,
        "per_token_s": steps[1:] * batch,
        "peak_memory_bytes": peak_rss_bytes(),
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "weight_bytes": model.weight_bytes,
    }


def do(
    job: dict[str, Any],
    adapter: ModuleType,
    questions: Iterator[dict[str, int]],
    send: Callable[[dict[str, Any]], None],
) -> None:
    """Write the files of a model, or load it and run what is asked."""
    described = Job(**job)
    if described.prepare:
        adapter.prepare(described)
        send({})
        return
    model = adapter.load(described)
    send({"note": model.note})
    for load in questions:
        send(run_load(model, described.config["vocab_size"], load))
