"""OpenVINO: a random model exported by optimum-intel, run by the runtime's own request.

Weights are compressed by the exporter: int4 symmetric in groups of 128 with an int8 head, or int8
per channel. The plugin's own choices stay as they are: an 8-bit cache and inputs quantized on the
fly, where the processor gains from them. Logits are computed for the last token alone, as in
OpenVINO's own pipelines.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from typing import Any

import numpy as np
import openvino  # pyright: ignore[reportMissingImports]
from openvino import opset13 as ops  # pyright: ignore[reportMissingImports]

EXPORT = ("export", "openvino", "--task", "text-generation-with-past", "--library", "transformers")
INT4 = ("--weight-format", "int4", "--group-size", "128", "--ratio", "1.0", "--sym")
XML = "openvino_model.xml"
CACHE_BYTES = {"u8": 1, "f16": 2, "f32": 4}  # of an element, without what u8 has of scales


def prepare(job: Any) -> None:
    """Export the model of the format, where it is not there."""
    out, source = job.path(f"{job.format}.openvino"), job.path("bf16")
    if out.exists():
        return
    if not source.exists():
        half = source.with_suffix(".part")
        job.random_model("bfloat16").save_pretrained(half)
        half.rename(source)
    half = out.with_suffix(".part")
    shutil.rmtree(half, ignore_errors=True)
    how = INT4 if job.format == "int4" else ("--weight-format", job.format)
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", *EXPORT]
    command += ["--model", str(source), *how, str(half)]
    subprocess.run(command, check=True)
    half.rename(out)


class Model:
    """An exported model, compiled for the processor."""

    def __init__(self, job: Any) -> None:
        path = job.path(f"{job.format}.openvino") / XML
        core = openvino.Core()
        model = keep_last_logits(core.read_model(path))
        settings = {"INFERENCE_NUM_THREADS": job.threads, "PERFORMANCE_HINT": "LATENCY"}
        if job.cache is not None:
            settings["KV_CACHE_PRECISION"] = job.cache
        compiled = core.compile_model(model, "CPU", settings)
        self._request = compiled.create_infer_request()
        self._inputs = {port.any_name for port in compiled.inputs}
        found = compiled.get_property("KV_CACHE_PRECISION").get_type_name()
        group = compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE")
        self.kv_bytes_per_token = job.kv_elements * CACHE_BYTES[found]
        self.weight_bytes = path.with_suffix(".bin").stat().st_size
        dynamic = f"dynamic quantization in groups of {group}"
        self.note = f"{job.format}, cache {found}, {dynamic}, {job.threads} threads"

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        """See `inference.bench.peers.run_loads`."""
        ids, batch = np.array(prompts, np.int64), len(prompts)
        self._request.reset_state()
        start, times = 0, [time.perf_counter()]
        for _ in range(new_tokens):
            end = start + ids.shape[1]
            inputs = {
                "input_ids": ids,
                "attention_mask": np.ones((batch, end), np.int64),
                "position_ids": np.tile(np.arange(start, end, dtype=np.int64), (batch, 1)),
                "beam_idx": np.arange(batch, dtype=np.int32),
            }
            self._request.infer({name: inputs[name] for name in self._inputs})
            logits = self._request.get_output_tensor(0).data  # [batch, 1, vocabulary]
            ids, start = logits[:, -1].argmax(-1)[:, None], end
            times.append(time.perf_counter())
        return times


def keep_last_logits(model: Any) -> Any:
    """Cut the head's input to the last token: of a prompt, no other logits are wanted."""
    node = model.get_results()[0].input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    hidden = node.input_value(0)  # [batch, tokens, hidden]
    one = np.array([1])
    last = ops.slice(hidden, np.array([-1]), np.array([np.iinfo(np.int64).max]), one, one)
    node.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()
    return model


load = Model
