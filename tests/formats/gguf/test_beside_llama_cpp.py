"""Files beside llama.cpp itself, where llama-cpp-python is installed: logits and tokens.

llama.cpp rounds the inputs of quantized layers to int8. Its logits are those of the engine on a copy
of the file whose matrices the package `gguf` has made floats of, and nearly on the file itself.
"""

import ctypes
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats import scheme as schemes
from formats.gguf.file import GgufFile
from formats.gguf.unpack import unpack
from formats.tokenizer import load_tokenizer
from inference.engine import Engine
from ptq.convert.convert import convert
from tests.conftest import write_quantized
from tests.families import divergence
from tests.formats.gguf.test_gguf import quantized_file

llama_cpp = pytest.importorskip("llama_cpp")
ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "recipes" / "tiny-python"
SPECS = {
    "Q8_0": {"dtype": "int8"},
    "Q4_0": {"dtype": "int4"},
    "Q4_1": {"dtype": "int4", "symmetric": False},
    "Q4_K": {"dtype": "int4", "symmetric": False, "zero_points": "float", "two_level": True},
}
FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 14}  # llama_ftype
FLOATS, INPUTS = 1e-4, 0.01  # nats: KL beside floats, and beside inputs in int8
TOKENS, BLOCKS = 128, 2
PIECES = """def  return lambda x: import\tnumpy 0 17 3.5e-7 == \n \n\n    # it's we'll don't "a" \r\n
 é ß Ω ж 中文 日本 한국 עברית हिन्दी 😀 👩‍💻 🇫🇷 \u200d \u00a0 \u0301 \x00 \x07 <|endoftext|> ___ {}[]() ;; \\n"""


def opened(path: Path) -> llama_cpp.Llama:
    """A file in llama.cpp, with a cache of fp32; on one thread, as others wait by spinning."""
    return llama_cpp.Llama(
        str(path), n_ctx=TOKENS, n_batch=TOKENS, n_threads=1, n_threads_batch=1, logits_all=True,
        type_k=0, type_v=0, verbose=False,
    )  # fmt: skip


def logits_there(path: Path, ids: list[int]) -> torch.Tensor:
    model = opened(path)
    model.eval(ids)
    return torch.from_numpy(model.scores[: len(ids)].copy())


def compare(file: Path, folder: Path, ids: list[int]) -> None:
    unpack(file, folder / "unpacked")
    found = Engine.from_pretrained(folder / "unpacked").score(ids)
    floats = quantized_file(file, folder / "floats.gguf", {"": "F32"})
    assert divergence(found, logits_there(floats, ids)) <= FLOATS
    assert divergence(found, logits_there(file, ids)) <= INPUTS


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The first blocks of the default model."""
    folder = shutil.copytree(MODEL, tmp_path_factory.mktemp("model") / "model")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": BLOCKS}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    own = ("model.embed", "model.norm", *(f"model.layers.{i}." for i in range(BLOCKS)))
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith(own)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def ids() -> list[int]:
    text = (ROOT / "formats" / "gguf" / "file.py").read_text()
    return load_tokenizer(MODEL)(text)["input_ids"][:TOKENS]


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory) -> Path:
    """A file of floats."""
    path = tmp_path_factory.mktemp("plain") / "floats.gguf"
    convert(model, path, "gguf")
    return path


def ours(kind: str, model: Path, plain: Path, folder: Path) -> Path:
    """Rounded and written here."""
    write_quantized(model, folder / "checkpoint", kind)
    convert(folder / "checkpoint", folder / "m.gguf", "gguf")
    return folder / "m.gguf"


def theirs(kind: str, model: Path, plain: Path, folder: Path) -> Path:
    """Quantized by llama.cpp."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.pure = FILE_TYPES[kind], kind == "Q4_K"  # which is mixed with Q5_K
    names = (str(path).encode() for path in (plain, folder / "m.gguf"))
    assert llama_cpp.llama_model_quantize(*names, ctypes.byref(params)) == 0
    return folder / "m.gguf"


def test_logits_of_floats(plain, ids, tmp_path):
    compare(plain, tmp_path, ids)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("made", [ours, theirs])
def test_logits_of_blocks(made, kind, model, plain, ids, tmp_path, monkeypatch):
    spec = schemes.WeightSpec(granularity="group", group_size=32, **SPECS[kind])
    monkeypatch.setitem(schemes.PRESETS, kind, schemes.Scheme(weights=spec))
    file = made(kind, model, plain, tmp_path)
    kinds = [stored.kind for stored in GgufFile(file).tensors.values()]
    assert kinds.count(kind) >= BLOCKS * 7
    compare(file, tmp_path, ids)


def strings(count: int) -> list[str]:
    draw, pieces = random.Random(0), PIECES.split(" ")
    made = []
    for _ in range(count):
        own = [draw.choice(pieces) for _ in range(draw.randrange(1, 12))]
        made.append("".join(piece + draw.choice(["", "", " ", "  "]) for piece in own))
    return made


def test_tokens(plain, tmp_path):
    unpack(plain, tmp_path / "folder")
    here, there = load_tokenizer(tmp_path / "folder"), opened(plain)
    for text in strings(500):
        wanted = there.tokenize(text.encode(), add_bos=False, special=True)
        assert here(text, add_special_tokens=False)["input_ids"] == wanted, repr(text)
