"""llama.cpp through the C functions of llama-cpp-python; all sequences share one batch.

Its own settings stay as they are: weights are repacked for the processor, flash attention is chosen
by itself, and a micro-batch has 512 tokens. A quantized cache is given the flash attention that it
demands. The model file is written once with random weights in fp16, without a vocabulary, and
quantized by llama.cpp.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf  # pyright: ignore[reportMissingImports]
import llama_cpp as api  # pyright: ignore[reportMissingImports]
import numpy as np

SEED, DEVIATION = 0, 0.02
BATCH, MICRO_BATCH = 2048, 512  # tokens; llama.cpp's defaults
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15}  # llama_ftype
CACHE_TYPES = {"f16": (1, 2.0), "q8_0": (8, 34 / 32)}  # ggml_type, bytes an element


def prepare(job: Any) -> None:
    """Write the model file of the format, where it is not there."""
    plain, out = job.path("F16.gguf"), job.path(f"{job.format}.gguf")
    if not plain.exists() and not out.exists():
        half = plain.with_suffix(".part")
        write_model(half, job.config)
        half.rename(plain)
    if not out.exists():
        half = out.with_suffix(".part")
        params = api.llama_model_quantize_default_params()
        params.ftype, params.nthread = FILE_TYPES[job.format], job.threads
        code = api.llama_model_quantize(
            str(plain).encode(), str(half).encode(), ctypes.byref(params)
        )
        if code != 0:
            raise RuntimeError(f"llama_model_quantize to {job.format} gave {code}")
        half.rename(out)


def write_model(path: Path, config: dict[str, Any]) -> None:
    """Write a GGUF file of random fp16 weights, one tensor at a time."""
    if config["model_type"] != "llama":
        raise ValueError(f"found model_type {config['model_type']!r}; only llama is written here")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    dim = config.get("head_dim") or hidden // heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(FILE_TYPES["F16"])
    tensors = list(shapes(config, dim))
    for name, shape in tensors:
        kind = np.dtype(np.float16 if len(shape) > 1 else np.float32)
        writer.add_tensor_info(name, shape, kind, int(np.prod(shape)) * kind.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    numbers = np.random.default_rng(SEED)
    for _, shape in tensors:
        if len(shape) == 1:
            writer.write_tensor_data(np.ones(shape, np.float32))
        else:
            values = numbers.standard_normal(shape, np.float32) * np.float32(DEVIATION)
            writer.write_tensor_data(values.astype(np.float16))
    writer.close()


def shapes(config: dict[str, Any], dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes (rows first) of the tensors."""
    sizes = ("hidden_size", "intermediate_size", "vocab_size")
    hidden, inner, words = (config[size] for size in sizes)
    query = config["num_attention_heads"] * dim
    key = (config.get("num_key_value_heads") or config["num_attention_heads"]) * dim
    yield "token_embd.weight", (words, hidden)
    yield "output_norm.weight", (hidden,)
    if not config.get("tie_word_embeddings", False):
        yield "output.weight", (words, hidden)
    block = {
        "attn_norm": (hidden,), "attn_q": (query, hidden), "attn_k": (key, hidden),
        "attn_v": (key, hidden), "attn_output": (hidden, query), "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        yield from ((f"blk.{i}.{name}.weight", shape) for name, shape in block.items())


class Model:
    """A loaded model file, with a context of the size of the load that is run."""

    def __init__(self, job: Any) -> None:
        self._job, self._sizes, self._context = job, (0, 0), None
        path = job.path(f"{job.format}.gguf")
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(
            str(path).encode(), api.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self._batch = api.llama_batch_init(BATCH, 0, 1)
        cache = job.cache or "f16"
        self.kv_bytes_per_token = round(job.kv_elements * CACHE_TYPES[cache][1])
        self.weight_bytes = path.stat().st_size
        self.note = f"{job.format}, cache {cache}, {job.threads} threads"

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        """See `inference.bench.peers.run_loads`."""
        self._resize(len(prompts), len(prompts[0]) + new_tokens)
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        last = len(prompts[0]) - 1
        rows = [
            (token, position, sequence, position == last)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        times = [time.perf_counter()]
        for step in range(1, new_tokens + 1):
            starts = range(0, len(rows), BATCH)
            tokens = [t for i in starts for t in self._decode(rows[i : i + BATCH])]
            rows = [(token, last + step, sequence, True) for sequence, token in enumerate(tokens)]
            times.append(time.perf_counter())
        return times

    def _resize(self, sequences: int, tokens: int) -> None:
        """Make a context that holds so many sequences of so many tokens."""
        if self._sizes == (sequences, tokens):
            return
        if self._context is not None:
            api.llama_free(self._context)
        params = api.llama_context_default_params()
        params.n_ctx = sequences * -(-tokens // 256) * 256
        params.n_seq_max = sequences
        params.n_batch, params.n_ubatch = BATCH, MICRO_BATCH
        params.n_threads = params.n_threads_batch = self._job.threads
        kind, _ = CACHE_TYPES[self._job.cache or "f16"]
        params.type_k = params.type_v = kind
        if self._job.cache == "q8_0":
            params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {params.n_ctx} tokens")
        self._sizes = (sequences, tokens)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, sequence, wanted) rows; the best next token of those wanted."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        code = api.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode gave {code}")
        return [self._best(i) for i, row in enumerate(rows) if row[3]]

    def _best(self, row: int) -> int:
        logits = api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._job.config["vocab_size"],)).argmax())


load = Model
