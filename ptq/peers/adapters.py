"""How each tool quantizes a model: a function each, run in an interpreter that has the tool.

A function loads the model of a `QuantizeJob` (`ptq.peers.quantize_job`), quantizes it within
`job.timed()`, and gives it back; it imports what it needs, as an interpreter has one of the tools
alone. Settings are the packages' defaults but for what the name of the peer says. Int4 is
symmetric, in groups of 128, and models are measured in memory with the weights dequantized.

bitsandbytes    through transformers: weights are quantized while they are loaded, without data.
                LLM.int8() (Dettmers et al., arXiv 2208.07339): int8 rows of weights against int8
                tokens, channels of outliers aside in float; NF4 (Dettmers et al., arXiv
                2305.14314): 4-bit quantiles of the normal distribution in blocks of 64 weights
gptqmodel       GPTQ (Frantar et al., arXiv 2210.17323). Its kernels for CPUs compute in 16 bits: to
                judge it, too, on what it stored, its checkpoint is read back in fp16 (its scales
                are), and the linear layers are replaced by what it makes of them in fp32
neural_compressor   weight-only round to nearest
llm_compressor  round to nearest, GPTQ, AWQ and SmoothQuant by its own `oneshot`; `lm_head` stays in
                float; inputs are quantized and dequantized, too, as the package simulates them
auto_round      AutoRound (Cheng et al., arXiv 2309.05516): roundings by signed gradient descent;
                without iterations it is its own way to round to nearest. With average `bits` its
                AutoScheme chooses between int4 and int8 for every layer by itself, which the layers
                of a fused one need not share
"""

# pyright: reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CHOICES = "W4A16,W8A16"  # of AutoScheme: both symmetric, in groups of 128
MARGIN = 8  # tokens


def bitsandbytes(job: Any) -> Any:
    """Load the model with `options["bits"]`, 8 or 4."""
    from transformers import BitsAndBytesConfig

    if job.options["bits"] == 8:
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    with job.timed():
        return job.load(quantization_config=config, device_map="cpu")


def gptqmodel(job: Any) -> Any:
    """Solve the linear layers, and put what was saved into the original model."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.nn_modules.qlinear import BaseQuantLinear

    config = QuantizeConfig(bits=4, group_size=128, sym=True)
    solver = GPTQModel.load(job.model, config, device="cpu", dtype=torch.float32)
    with job.timed():
        solver.quantize(_rows(job), batch_size=1)
    solver.save(str(job.scratch))
    options = {"device": "cpu", "backend": BACKEND.TORCH, "dtype": torch.float16}
    quantized, model = GPTQModel.load(str(job.scratch), **options).model, job.load()
    for name, layer in quantized.named_modules():
        if isinstance(layer, BaseQuantLinear):
            weight = layer.dequantize_weight().T  # [out, in]
            model.get_submodule(name).weight.data.copy_(weight)
    return model


def _rows(job: Any) -> list[dict[str, Any]]:
    """The calibration tokens, a batch of one each."""
    batches = [ids[None] for ids in job.calibration]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in batches]


def neural_compressor(job: Any) -> Any:
    """Round the linear layers of the loaded model."""
    from neural_compressor.torch.quantization import RTNConfig, convert, prepare

    model = job.load()
    config = RTNConfig(bits=4, use_sym=True, group_size=128, use_layer_wise=False)
    with job.timed():
        return convert(prepare(model, config))


def llm_compressor(job: Any) -> Any:
    """Quantize with the modifiers that `options` ask for."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.accelerator.is_available():
        # AWQ pins memory for an accelerator whether there is one or not; no figure depends on it
        IntermediatesCache.pin_memory = lambda self, *_: None
    model, calibration = job.load(), [ids.tolist() for ids in job.calibration]
    rows = {"input_ids": calibration, "attention_mask": [[1] * len(ids) for ids in calibration]}
    with job.timed():
        oneshot(
            model=model,
            tokenizer=job.tokenizer(),
            dataset=Dataset.from_dict(rows),
            recipe=modifiers(**job.options),
            num_calibration_samples=len(calibration),
            max_seq_length=max(map(len, calibration)),
            shuffle_calibration_samples=False,
        )
    return model


def modifiers(
    rounding: str, scheme: str, before: str | None = None, group: int | None = None
) -> list[Any]:
    """What prepares, where `before` names it, and what rounds, of llm-compressor; int4 in groups
    of `group` inputs where the package's own 128 do not divide the model's.
    """
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    def integers(bits: int, strategy: str, **more: Any) -> Any:
        settings: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True}
        return QuantizationArgs(strategy=strategy, **settings, **more)

    first = {
        None: list,
        "awq": lambda: [AWQModifier()],
        "smoothquant": lambda: [SmoothQuantModifier(smoothing_strength=0.8)],
    }[before]
    last = {"rtn": QuantizationModifier, "gptq": GPTQModifier}[rounding]
    if scheme == "static":
        own = {"weights": integers(8, "channel"), "input_activations": integers(8, "tensor")}
    elif group is not None:
        own = {"weights": integers(4, "group", group_size=group)}
    else:
        return [*first(), last(targets=["Linear"], scheme=scheme, ignore=["lm_head"])]
    layers = QuantizationScheme(targets=["Linear"], **own)
    return [*first(), last(config_groups={"group_0": layers}, ignore=["lm_head"])]


def auto_round(job: Any) -> Any:
    """Solve the loaded model in `options["iterations"]`, to average `options["bits"]` if given."""
    from auto_round import AutoRound

    mixed = _mixed(job) if "bits" in job.options else None
    solver = AutoRound(
        job.load(),
        tokenizer=job.tokenizer(),
        scheme="W4A16" if mixed is None else mixed,
        dataset=_rows(job) if mixed is None else mixed.dataset,
        iters=job.options["iterations"],
        seqlen=min(map(len, job.calibration)) if mixed is None else mixed.seqlen,
        nsamples=len(job.calibration),
        device_map="cpu",
        enable_torch_compile=False,
    )
    with job.timed():
        solved, chosen = solver.quantize()
    bits = {name: layer["bits"] for name, layer in chosen.items() if "bits" in layer}
    print(json.dumps(bits), flush=True)  # into the peer's log
    return solved.float()


def _mixed(job: Any) -> Any:
    """What AutoScheme is asked, which takes no tokens: their text is in a file.

    A text that is cut into tokens again may come out a little shorter, and is then left out.
    """
    from auto_round import AutoScheme

    path, tokenizer = Path(job.scratch) / "calibration.jsonl", job.tokenizer()
    texts = [json.dumps({"text": tokenizer.decode(ids)}) for ids in job.calibration]
    path.write_text("\n".join(texts) + "\n")
    return AutoScheme(
        avg_bits=job.options["bits"],
        options=CHOICES,
        dataset=str(path),
        nsamples=len(texts),
        seqlen=min(map(len, job.calibration)) - MARGIN,
        device_map="cpu",
        enable_torch_compile=False,
    )
