"""Every causal LM of the installed transformers through its own code in our engine, by hand.

    python -m tests.sweep_families                  # all of them: five minutes on two cores
    python -m tests.sweep_families gpt2 gemma2      # these, with the trace of what fails

A tiny random model of each type is written. Its logits in our engine must be transformers' (fp32,
relative difference below 1e-4), so must greedy tokens after a prompt in chunks; quantized with w4
and with a8w8c8, the engine must be as far from the float model as the same numbers are in
transformers' own code. Each type runs in a process of its own, within a time limit. What is no
decoder is left out with the reason, and does not count; what keeps a recurrent state counts.
"""

import argparse
import multiprocessing
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.family import LatentAttention
from formats.families.registry import find_family
from formats.namespace import join_kernels
from ptq.methods.rtn import RTNSpec
from ptq.pipeline.driver import quantize_tokens
from tests.conftest import write_random
from tests.families import check_engine, check_rounding, transformers_logits
from tests.ptq.quantizing import make_plan, random_tokens
from tests.tiny_models import tiny_config

STEPS = ("logits", "w4", "a8w8c8")
LIMIT = 120  # seconds of a type
ROUTED = 2  # tokens of 40 that a random router may send elsewhere after a rounding: of mixtures


@dataclass(frozen=True)
class Outcome:
    """What came of a type.

    Attributes:
        model_type: The type.
        passed: The steps that it passed, in their order.
        left_out: Why it does not count; None where it does.
        failed: What went wrong in the next step; None where nothing did.
    """

    model_type: str
    passed: tuple[str, ...] = ()
    left_out: str | None = None
    failed: str | None = None


def why_left_out(model_type: str) -> str | None:
    """Why a type is no decoder of text, as its classes say."""
    kind = CONFIG_MAPPING[model_type]
    others = kind.sub_configs.keys() - {"attn_config", "ffn_config"}  # parts of one model
    if others:
        return f"holds several models: {', '.join(sorted(others))}"
    return None


def through_interface(model_type: str) -> bool:
    """Whether a type's classes say that attention goes through transformers' interface."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return (found[0] if isinstance(found, tuple) else found)._supports_attention_backend


def why_no_decoder(config: PreTrainedConfig, folder: Path) -> str | None:
    """Why a tiny model does not count: it reads later tokens, or mixes tokens elsewhere."""
    if "indexed_attention" in (getattr(config, "layer_types", None) or ()):
        return "keeps an index of tokens beside K and V"
    ids = torch.arange(1, 25)
    changed = torch.cat((ids[:-1], torch.tensor([300])))
    same = transformers_logits(folder, ids)[:-1], transformers_logits(folder, changed)[:-1]
    return None if torch.allclose(*same, atol=1e-4) else "reads later tokens: an encoder"


def run_steps(model_type: str, folder: Path, passed: list[str]) -> str | None:
    """Try one type; says why it is left out, if it is.

    Args:
        model_type: The type.
        folder: Where its models may be written.
        passed: Gets the steps that it passed.

    Raises:
        Exception: whatever goes wrong in the first step that it does not pass.
    """
    reason = why_left_out(model_type)
    if reason is not None:
        return reason
    try:
        config = tiny_config(model_type)
        model = write_random(folder / "float", config)
        ids = random_tokens().sequences()[1].clamp(min=1)
        wanted = transformers_logits(model, ids)
    except Exception as error:
        return f"no tiny configuration: {_line(error)}"
    reason = why_no_decoder(config, model)
    if reason is not None:
        return reason
    try:
        check_engine(model, ids, transformers_code=True)
    except CheckpointError as refused:
        if through_interface(model_type):
            raise
        return f"refused: {_line(refused)}"
    passed.append(STEPS[0])
    family = find_family(config.to_dict())
    latent = family is not None and isinstance(family.attention, LatentAttention)
    apart = ROUTED if any("expert" in key for key in config.to_dict()) else 0
    for preset in STEPS[1:]:
        plan = make_plan(model, folder / preset, preset, methods=(RTNSpec(),))
        result = quantize_tokens(plan, random_tokens(), progress=False)
        made = Checkpoint.open(result.checkpoint)  # latents in the cache are the fast path's alone
        code = not latent
        check_rounding(made, ids, wanted, 1.0, near=0.5, apart=apart, transformers_code=code)
        passed.append(preset)
    return None


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def try_type(model_type: str, *, shown: bool = False) -> Outcome:
    """`run_steps` in a folder of its own, whatever comes of it."""
    passed: list[str] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            left_out = run_steps(model_type, Path(folder), passed)
    except Exception as error:
        if shown:
            traceback.print_exc()
        return Outcome(model_type, tuple(passed), failed=_line(error))
    return Outcome(model_type, tuple(passed), left_out=left_out)


def _send(pipe: Connection, model_type: str, shown: bool) -> None:
    torch.set_num_threads(1)  # else threads that load weights race for the pool that fork left
    pipe.send(try_type(model_type, shown=shown))


def try_apart(model_type: str, *, shown: bool) -> Outcome:
    """`try_type` in a process of its own, for at most `LIMIT` seconds."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")  # transformers has been imported
    process = context.Process(target=_send, args=(sender, model_type, shown))
    process.start()
    sender.close()
    try:
        if receiver.poll(LIMIT):
            return receiver.recv()
        return Outcome(model_type, failed=f"took more than {LIMIT} s")
    except EOFError:
        return Outcome(model_type, failed="its process died")
    finally:
        process.kill()
        process.join()


def main(argv: Sequence[str] | None = None) -> int:
    """Try all types, or those that are given; 1 where less than nine of ten pass."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sweep_families",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    wanted = parser.parse_args(argv).types
    join_kernels()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    good, counted = 0, 0
    for model_type in wanted or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        found = try_apart(model_type, shown=bool(wanted))
        counted += found.left_out is None
        good += found.passed == STEPS
        told = found.left_out and f"left out: {found.left_out}"
        told = told or (found.failed and f"FAILED {found.failed}") or "passed"
        print(f"{model_type:24s} {' '.join(found.passed):18s} {told}", flush=True)
    print(f"{good} of {counted} types passed every step: {100 * good / max(counted, 1):.0f}%")
    return 0 if good >= 0.9 * counted else 1


if __name__ == "__main__":
    sys.exit(main())
