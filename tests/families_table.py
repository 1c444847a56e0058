"""The table of families in `formats/families/README.md`, measured on tiny models.

python -m tests.families_table        # writes the table again
"""

import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.registry import BY_TYPE, COLUMNS, DOCUMENT, with_table
from formats.namespace import join_kernels
from inference.config import EngineConfig
from inference.cpu.loop import fuse
from inference.engine import Engine
from inference.models.config import ModelConfig
from ptq.methods.rtn import RTNSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.pipeline.driver import quantize_tokens
from tests.conftest import write_model, write_random
from tests.experts import MOE
from tests.families import distance, transformers_logits
from tests.ptq.quantizing import make_plan, random_tokens
from tests.tiny_families import TINY
from tests.tiny_models import tiny_config

INPUTS = {
    "attention_input": "q, k, v",
    "attention_output": "o",
    "mlp_input": "gate, up",
    "mlp_output": "down",
}
# Of vLLM 0.33.0's model_executor/models/registry.py: _TEXT_GENERATION_MODELS of those that are
# declared here, and _TRANSFORMERS_SUPPORTED_MODELS.
VLLM = {
    "own": "DeepseekV2ForCausalLM DeepseekV3ForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM "
    "GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM GptOssForCausalLM GraniteForCausalLM "
    "LlamaForCausalLM MiMoForCausalLM Ministral3ForCausalLM MistralForCausalLM MixtralForCausalLM "
    "Phi3ForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM",
    "transformers": "ArceeForCausalLM CwmForCausalLM FlexOlmoForCausalLM GlmForCausalLM "
    "GPTBigCodeForCausalLM GPTNeoXForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM "
    "Jais2ForCausalLM Kolibri1ForCausalLM MellumForCausalLM NanbeigeForCausalLM OlmoForCausalLM "
    "Olmo2ForCausalLM Olmo3ForCausalLM PhiForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM "
    "Starcoder2ForCausalLM VaultGemmaForCausalLM",
}
OWN_NAMES = {"mimo": "MiMoForCausalLM"}  # of classes that transformers has not
OTHERS = {
    "family": "any other",
    "smoothing": "what a check finds",
    "CPU": "transformers",
    "GPU": "transformers",
    "cache": "K, V",
    "transformers": "all",
    "vLLM": "as it lists it",
}


def write_tiny(kind: str, folder: Path) -> Path:
    """A tiny model of a declared type."""
    if kind in TINY | MOE or BY_TYPE[kind].alike:
        return write_model(folder / "float", kind, **(TINY | MOE).get(kind, {}))
    return write_random(folder / "float", tiny_config(kind))


def measured_row(kind: str, model: Path, folder: Path) -> dict[str, str]:
    """What a tiny model shows, by column of the table, but for what transformers opens."""
    config = ModelConfig.of(Checkpoint.open(model).config)
    engine = Engine.from_pretrained(model, config=EngineConfig(max_model_len=64))
    groups = make_plan(model, folder / "smoothed", methods=(SmoothQuantSpec(), RTNSpec())).smoothing
    found = {group.kind for group in groups}
    return {
        "family": kind,
        "smoothing": "; ".join(text for group, text in INPUTS.items() if group in found),
        "CPU": "op by op" if fuse(engine.model, engine.pools) is None else "fused",
        "GPU": "fused" if runs_on_gpus(config) else "transformers",
        "cache": "K, V" if config.latent is None else "latent",
        "vLLM": listed_by_vllm(kind),
    }


def runs_on_gpus(config: ModelConfig) -> bool:
    """Whether the GPU's own kernels take a decoder."""
    from inference.gpu.backend import TritonBackend

    try:
        TritonBackend(torch.device("cpu"), torch.float16).check(config)
    except CheckpointError:
        return False
    return True


def opened(model: Path, folder: Path) -> str:
    """Which quantized checkpoints transformers opens, to our engine's logits."""
    ids, good = random_tokens().sequences()[1], []
    if Checkpoint.open(model).config["model_type"] in OWN_NAMES:
        return "none"
    for preset in ("w4", "a8w8"):
        plan = make_plan(model, folder / preset, preset, methods=(RTNSpec(),))
        path = quantize_tokens(plan, random_tokens(), progress=False).checkpoint
        ours = Engine.from_pretrained(path, config=EngineConfig(max_model_len=64)).score(ids)
        try:
            good.append(distance(transformers_logits(path, ids), ours) < 0.1)
        except RuntimeError:  # a tensor has no place in its model
            good.append(False)
    return {(True, True): "all", (True, False): "weights", (False, False): "none"}[tuple(good)]


def listed_by_vllm(kind: str) -> str:
    """How vLLM lists a type's architecture."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) or OWN_NAMES[kind]
    return next((how for how, names in VLLM.items() if name in names.split()), "no")


def main() -> None:
    """Write the table again."""
    join_kernels()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    for kind in sorted(BY_TYPE):
        with tempfile.TemporaryDirectory() as folder:
            model = write_tiny(kind, Path(folder))
            found = measured_row(kind, model, Path(folder))
            rows.append(found | {"transformers": opened(model, Path(folder))})
            print(*(rows[-1][column] for column in COLUMNS), sep=" | ", flush=True)
    DOCUMENT.write_text(with_table([*rows, OTHERS]), encoding="utf-8")


if __name__ == "__main__":
    main()
