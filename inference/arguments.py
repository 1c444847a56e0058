"""The arguments that commands share which complete text: which engine, and how it decodes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.command import count, device
from formats.errors import RequestError, suggestion
from formats.hub import model_argument
from formats.namespace import later
from inference.beam_search import BeamParams
from inference.config import EngineConfig, SpeculateConfig
from inference.proposers import draft_methods
from inference.requests.request import SamplingParams

if TYPE_CHECKING:
    from inference.engine import Engine
with later():
    from formats.adapters import settings as adapter_settings
    from inference import engine as engines


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The checkpoint and where it runs; `open_engine` reads them."""
    parser.add_argument(
        "checkpoint",
        type=model_argument,
        help="folder of a quantized or float model, a .gguf file, or organization/model of the "
        "Hugging Face hub",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a model on the hub")
    parser.add_argument(
        "--device", type=device, default="cpu", help="cpu (the default), cuda or cuda:N"
    )
    parser.add_argument(
        "--max-model-len",
        type=_length,
        metavar="N",
        help="most tokens of prompt and completion; default: what the model allows, up to 4096",
    )
    parser.add_argument(
        "--transformers-code",
        action="store_true",
        help="run the model by transformers' own code, as models are run that are not declared "
        "here; slower",
    )
    add_invariant_argument(parser)
    add_parallel_argument(parser)
    add_speculate_arguments(parser)


def add_content_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Whether messages may hold control tokens."""
    parser.add_argument(
        "--special-tokens-in-content",
        action="store_true",
        help="make control tokens of those that messages spell, such as <|im_end|>; without it "
        "what is said remains text",
    )


class _ByName(argparse.Action):
    """Gathers NAME=FOLDER in a mapping, which has each name once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        (name, folder), known = values, getattr(namespace, self.dest)
        if name in known:
            reason = f"{name} is the name of {known[name]} already; give each adapter its own"
            raise argparse.ArgumentError(self, reason)
        setattr(namespace, self.dest, {**known, name: folder})


def add_adapter_argument(parser: argparse.ArgumentParser, use: str) -> None:
    """Which adapters are loaded; `read_adapters` reads them.

    Args:
        parser: Of the command.
        use: When the command runs with which of them.
    """
    parser.add_argument(
        "--adapter",
        type=_adapter,
        action=_ByName,
        default={},
        metavar="NAME=FOLDER",
        help=f"load an adapter of PEFT (LoRA, prefix tuning) under a name; repeatable. {use}",
    )


def _adapter(text: str) -> tuple[str, Path]:
    """The name, and the folder."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; NAME=FOLDER is needed, such as sql=adapters/sql"
        )
    return name, Path(folder)


def read_adapters(arguments: argparse.Namespace) -> dict[str, Path]:
    """The folders of the adapters that the arguments ask for, looked at before a model is loaded.

    Raises:
        CheckpointError: there is no adapter in one.
    """
    folders: dict[str, Path] = {}
    for name, path in arguments.adapter.items():
        folders[name] = adapter_settings.adapter_folder(path)
        adapter_settings.read_settings(folders[name])
    return folders


def _only_adapter(arguments: argparse.Namespace) -> str | None:
    """The adapter that all requests run with which name none: the one that there is."""
    return next(iter(arguments.adapter)) if len(arguments.adapter) == 1 else None


def add_parallel_argument(parser: argparse.ArgumentParser) -> None:
    """Over how many processes a model is cut."""
    parser.add_argument(
        "--tensor-parallel",
        type=count,
        default=1,
        metavar="N",
        help="cut the model and its cache among N processes of this machine, with a GPU each where "
        "--device is cuda; this command starts and ends them. Default 1",
    )


def add_invariant_argument(parser: argparse.ArgumentParser) -> None:
    """Whether bits may depend on what runs beside a request."""
    parser.add_argument(
        "--invariant",
        action="store_true",
        help="on a GPU, give a request the same tokens and log probabilities, bit for bit, "
        "whatever runs beside it; slower, above all for prompts. A CPU always does",
    )


def add_speculate_arguments(parser: argparse.ArgumentParser) -> None:
    """Where drafts come from, and how many; `speculate_config` reads them."""
    group = parser.add_argument_group("speculative decoding, which changes no token")
    group.add_argument(
        "--speculate",
        type=_speculate,
        metavar="METHOD",
        help="draft the next tokens by ngram (what followed the last ones before in the request), "
        "suffix (in all that was served), draft=PATH (what a smaller model says), eagle=PATH "
        "(what an EAGLE-3 head of the model says), or mtp (what the model's own multi-token "
        "prediction layer says; mtp=PATH: that of another checkpoint). With --tensor-parallel "
        "ngram or suffix. Beams have no drafts",
    )
    group.add_argument(
        "--depth",
        type=_depth,
        metavar="N",
        help="drafts of a request in a step, 1 to 64; default auto: as many as pay, none where "
        "none do",
    )


def _speculate(text: str) -> tuple[str, str | None]:
    """The method, and the path of one that has one."""
    method, _, path = text.partition("=")
    own = draft_methods().get(method)
    if own is None:
        hint = suggestion(method, tuple(draft_methods()))
        raise argparse.ArgumentTypeError(
            f"found {text!r}; {hint} (draft is draft=PATH, eagle is eagle=PATH)"
        )
    takes_path = bool(path) if own.takes_path else own.needs is not None
    if takes_path != bool(path) or ("=" in text and not path):
        form = method if own.needs is None else f"{method}=PATH, {own.needs}"
        raise argparse.ArgumentTypeError(f"found {text!r}; give {form}")
    return method, path or None


def _depth(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed are auto and 1 to 64")
    return int(text)


def speculate_config(arguments: argparse.Namespace) -> SpeculateConfig | None:
    """The drafts that the arguments ask for; None without.

    Raises:
        RequestError: a depth is there, and nothing that drafts.
    """
    if arguments.speculate is None:
        if arguments.depth is not None:
            raise RequestError(
                "--depth is how many tokens --speculate drafts; give --speculate, too", "depth"
            )
        return None
    method, path = arguments.speculate
    depth = None if arguments.depth == "auto" else arguments.depth
    return SpeculateConfig(method=method, path=path, depth=depth)


def _length(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"found {text!r}; a whole number from 2 on is needed")
    return int(text)


def open_engine(
    folder: Path,
    arguments: argparse.Namespace,
    batch_size: int,
    adapters: Mapping[str, Path] | None = None,
) -> Engine:
    """The engine that the arguments ask for, of the model in a folder, with adapters by name.

    Raises:
        CheckpointError: the checkpoint or an adapter is damaged, or of a kind that is not run here.
        EngineError: the device is not one that is run on, or its memory is too small.
        RequestError: an adapter's name is not allowed.
    """
    config = EngineConfig(
        max_batch_size=batch_size,
        max_model_len=arguments.max_model_len,
        transformers_code=arguments.transformers_code,
        invariant=arguments.invariant,
        speculate=speculate_config(arguments),
        tensor_parallel=arguments.tensor_parallel,
    )
    return engines.Engine.from_pretrained(
        folder, config=config, device=arguments.device, adapters=adapters
    )


def add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """How text is decoded, of at most so many tokens; `sampling_params` reads them."""
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"most tokens to generate; default {max_tokens}",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default 0: the likeliest token"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="default 0: all tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default 1: all")
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="default 1: none"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the random numbers")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="repeatable")


def add_beam_arguments(parser: argparse.ArgumentParser) -> None:
    """How text is searched in the place of sampling; `beam_params` reads them."""
    parser.add_argument(
        "--beam-width", type=count, metavar="K", help="search with K beams instead of sampling"
    )
    parser.add_argument(
        "--length-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="of beams: above 0 favours long texts, below 0 short ones; default 1",
    )
    parser.add_argument(
        "--early-stopping",
        choices=("true", "false", "never"),
        default="false",
        help="when beams end, as in transformers; default false",
    )


def beam_params(arguments: argparse.Namespace) -> BeamParams | None:
    """How the arguments ask to search; None where they ask to sample.

    Raises:
        RequestError: a value is not allowed.
    """
    if arguments.beam_width is None:
        return None
    early = arguments.early_stopping
    return BeamParams(
        beam_width=arguments.beam_width,
        max_tokens=arguments.max_tokens,
        length_penalty=arguments.length_penalty,
        early_stopping="never" if early == "never" else early == "true",
        adapter=_only_adapter(arguments),
    )


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """How the arguments ask to decode.

    Raises:
        RequestError: a value is not allowed.
    """
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
        adapter=_only_adapter(arguments),
    )
