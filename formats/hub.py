"""Where a model is that is given by a folder or a name.

A name is a local folder's, one of the models that come with the project, or else
`organization/model` on the Hugging Face hub. What comes from there goes through huggingface_hub:
its cache, its progress, its settings (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). Weights in
safetensors, JSON files, the tokenizer's files and licences are taken; code is not.

What else people give as a model, other runtimes' files and pickled weights, is refused by its kind.
"""

from __future__ import annotations

import json
import logging
import os
import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from formats.errors import CheckpointError, typed
from formats.namespace import ROOT, later
from formats.published import needs_code

with later():
    import huggingface_hub as hub
    from huggingface_hub import constants as hub_constants
    from huggingface_hub import errors as hub_errors

SHIPPED = ("tiny-python",)  # models beside the recipes, in a checkout as in site-packages
WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "LICEN*"]
UNWANTED = [
    "[!q]*/*",  # other layouts and programs lie in folders; `quant/` is ours
    "consolidated*",  # the same weights once more, in the layout of Mistral and Meta
]
OTHERS = {".gguf": "GGUF", ".ggml": "GGML", ".onnx": "ONNX"}
PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
PATIENCE = 10.0  # seconds that the hub has to answer its first request
log = logging.getLogger("ptq.formats")


def find_model(name: str | Path, folder: Path = Path()) -> Path | None:
    """The local folder or .gguf file that a path, from `folder` on, or a shipped name is."""
    path = folder / os.path.expanduser(name)
    if path.is_dir() or (path.suffix.lower() == ".gguf" and path.is_file()):
        return path
    shipped = ROOT / "recipes" / name
    return shipped if str(name) in SHIPPED and shipped.is_dir() else None


def is_hub_id(name: str | Path) -> bool:
    """Whether a name could be that of a model on the hub: `organization/model`."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(name), re.ASCII) is not None


def model_argument(text: str) -> Path:
    """A model on a command line, for `type=` of its argument.

    Whoever types `./organization/model` means a folder; its Path alone is that of a name on the
    hub, so that one which does not exist becomes absolute.
    """
    path = Path(text)
    return path.absolute() if is_hub_id(path) and not (is_hub_id(text) or path.exists()) else path


def model_folder(name: str | Path, revision: str | None = None, kind: str = "a model") -> Path:
    """The folder of a model; one of the hub is downloaded into huggingface_hub's cache.

    Args:
        name: A folder, a shipped model's name, or `organization/model`. A folder wins where no
            revision is given.
        revision: Branch, tag or commit on the hub; default its main branch.
        kind: What an error calls it.

    Raises:
        CheckpointError: there is no such folder or model, it cannot be had, holds no safetensors or
            needs code of its own, or a revision is given for a folder.
    """
    found = find_model(name)
    if found is not None and revision is None:
        return found
    if found is not None and not is_hub_id(name):
        raise CheckpointError(
            f"{name} is a local folder, which has no revision {revision!r}; leave the revision out"
        )
    if not is_hub_id(name) or Path(name).is_file():
        form = "file" if Path(name).suffix.lower() == ".gguf" else "folder"
        raise CheckpointError(
            f"{name}: no such {form}; {near_folder(name)}give the {form} of {kind}, or its name on "
            "the Hugging Face hub, organization/name"
        )
    return _download(str(name), revision)


def near_folder(path: str | Path) -> str:
    """`did you mean ...? ` where a folder of a close name is where a path should lead."""
    above = Path(path).parent
    inside = above.iterdir() if above.is_dir() else ()
    names = [p.name for p in inside if p.is_dir() and not p.name.startswith(".")]
    close = get_close_matches(Path(path).name, names, n=1)
    return f"did you mean {str(above / close[0])!r}? " if close else ""


def hide_progress() -> None:
    """Let downloads of this process show no bars; before the first of them."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


@cache
def _download(name: str, revision: str | None) -> Path:
    """The snapshot of a hub's model in the cache, whose name is its commit.

    A commit that is there is not asked for again: it never changes. Where the hub does not answer,
    or refuses, the newest snapshot that is there serves, with a warning.
    """

    def snapshot(*, local: bool) -> Path:
        options = {"allow_patterns": WANTED, "ignore_patterns": UNWANTED, "local_files_only": local}
        return Path(hub.snapshot_download(name, revision=revision, **options))

    def kept() -> Path | None:
        try:
            folder = snapshot(local=True)
        except hub_errors.LocalEntryNotFoundError:
            return None
        return folder if _is_whole(folder) else None

    if re.fullmatch("[0-9a-f]{40}", revision or "") and (folder := kept()) is not None:
        return folder
    try:
        _check(name, hub.HfApi().model_info(name, revision=revision, timeout=PATIENCE))
        return snapshot(local=False)
    except (_http_error(), OSError, ValueError) as error:
        reason = error
    if (folder := kept()) is None:
        raise CheckpointError(_refusal(name, revision, reason)) from reason
    if not isinstance(reason, hub_errors.OfflineModeIsEnabled):
        log.warning("%s: %s; going on with the copy in the cache, %s", name, _why(reason), folder)
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot has its weights: others load a tokenizer or a configuration alone."""
    weights = {file.name for file in folder.glob("*.safetensors")}
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        return weights >= set(index["weight_map"].values())
    except FileNotFoundError:
        configs = ("config.json", "adapter_config.json")
        return bool(weights) and any((folder / name).is_file() for name in configs)
    except (ValueError, KeyError, TypeError, AttributeError):
        return True  # damaged, which its reader tells


def _http_error() -> type[Exception]:
    """What the client raises that huggingface_hub stands on, whichever that is."""
    return hub_errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]


def _check(name: str, info: hub.ModelInfo) -> None:
    """Refuse a model that could not be read, before its weights are downloaded.

    Raises:
        CheckpointError: it holds no safetensors, or needs code of its own.
    """
    files = [file.rfilename for file in info.siblings or ()]
    if not any(file.endswith(".safetensors") and "/" not in file for file in files):
        raise CheckpointError(
            f"{name} on the hub holds no safetensors, only {', '.join(files[:8]) or 'nothing'}; "
            "look there for the same model in the transformers layout"
        )
    if needs_code(info.config or {}):
        raise CheckpointError(
            f"{name} on the hub needs code of its own (auto_map, trust_remote_code), which is "
            "never run. Look for a conversion to an architecture that transformers knows"
        )


def _refusal(name: str, revision: str | None, error: Exception) -> str:
    """Why a model cannot be had, and how to get it otherwise."""
    at = f" --revision {revision}" if revision else ""
    return (
        f"{name}: no such folder here; {near_folder(name)}it cannot be had from the hub either: "
        f"{_why(error)}. Where it can be had, run\n"
        f"  hf download {name}{at} --local-dir {name.split('/')[1]}\n"
        "and give that folder"
    )


def _why(error: Exception) -> str:
    """What the hub, or the way to it, said."""
    page = hub_constants.ENDPOINT
    if isinstance(error, hub_errors.GatedRepoError):
        return f"it is gated; ask for access on its page at {page}, then `hf auth login`"
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        return f"{page} has none of that name that you may see (`hf auth login` if it is private)"
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return f"{page} has no such revision of it; give one of its branches, tags or commits"
    if isinstance(error, hub_errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and it is not in the cache"
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"{page} cannot be reached or used ({reason[:200]})"


def locate_folder(name: str | Path, revision: str | None) -> Path:
    """`model_folder`, but a file of another kind is refused as what it is.

    Raises:
        CheckpointError: there is no such folder or model, or it cannot be had.
    """
    if Path(name).exists() and not Path(name).is_dir():
        refuse_other_kinds(Path(name))
    return model_folder(name, revision)


def refuse_other_kinds(path: Path) -> None:
    """Say what a path holds that is no folder of a model in safetensors, if that is known.

    Raises:
        CheckpointError: it is another runtime's format, pickled weights, or a file.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        kind = OTHERS.get(file.suffix.lower())
        if kind == "GGUF":
            raise CheckpointError(
                f"{path}: found a GGUF file ({file.name}) where a folder is needed. Commands take "
                "the file itself; a folder of it is made by "
                f"{typed('convert', file, 'FOLDER', '--to', 'compressed_tensors')}"
            )
        if kind is not None:
            raise CheckpointError(
                f"{path}: found {kind} ({file.name}), another runtime's format, which is not read "
                "here. Give the folder of the original model: config.json, tokenizer.json and "
                "weights in safetensors"
            )
    pickles = [file.name for file in files if file.suffix.lower() in PICKLES]
    if pickles:
        raise CheckpointError(
            f"{path}: found only pickled weights ({', '.join(pickles[:3])}), which can run any "
            "code when they are read and are refused. Save the model with "
            "save_pretrained(..., safe_serialization=True) where you trust it"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path}: found a file; give the folder of the model it belongs to")
