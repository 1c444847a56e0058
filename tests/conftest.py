"""Shared fixtures: tiny random models with a real tokenizer, written as local directories."""

import gc
import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # threads of several workers would wait for each other
    gc.disable()  # until all is collected

from array import array
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from formats.namespace import join_kernels

join_kernels()

torch.set_num_threads(min(4, torch.get_num_threads()))


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--native-library`: run on these compiled CPU kernels, such as a build with sanitizers."""
    parser.addoption("--native-library", type=Path, help="compiled CPU kernels to test")


def pytest_configure(config: pytest.Config) -> None:
    """Put the given library in the place of the one that would be found."""
    from kernels.cpu import native

    path = config.getoption("--native-library", default=None)
    if path is not None:
        opened = native.open_library(path)
        native.library = lambda: opened


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave what takes minutes to the CI, which begins with it: workers then end together."""
    slow = {item.path for item in items if item.get_closest_marker("ci")}
    items.sort(key=lambda item: item.path not in slow)
    if os.environ.get("CI") != "true":
        skip = pytest.mark.skip(reason="takes minutes: runs where CI=true is set")
        for item in items:
            if item.get_closest_marker("ci"):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collection of garbage looks at it again."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Skip the folders of what runs on Triton where that is not installed."""
    if {"triton", "gpu"}.intersection(module_path.relative_to(Path(__file__).parent).parts):
        pytest.importorskip("triton", reason="Triton is not installed (it is in the `test` extra)")


@pytest.fixture(scope="session", autouse=True)
def unsynced():
    """Nothing waits for the disk: what `os.fsync` is for, the loss of power, no test tries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses the same descriptors
        yield


@pytest.fixture(scope="session", autouse=True)
def tokenized_once():
    """Equal tokenizers see a long text once: each run on the standard library reads all of it."""
    from calibrate import windows

    plain, kinds = windows.text_tokens, WeakKeyDictionary[Any, bytes]()
    made: dict[tuple[bytes, int, str], array[int]] = {}

    def once(tokenizer: Any, text: str) -> list[int]:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or len(text) < LONG_TEXT:
            return plain(tokenizer, text)
        if tokenizer not in kinds:
            kinds[tokenizer] = sha256(backend.to_str().encode()).digest()
        key = kinds[tokenizer], len(tokenizer), text
        if key not in made:
            made[key] = array("i", plain(tokenizer, text))
        return made[key].tolist()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "text_tokens", once)
        yield


@pytest.fixture
def unpictured(monkeypatch) -> None:
    """Reports and certificates without pictures, a second each, which a test is not about."""
    monkeypatch.setattr("ptq.report.report.draw_plots", lambda data: {})
    monkeypatch.setattr("ptq.certify.page.drawn", lambda sections: {})


@pytest.fixture
def with_threads():
    """Sets torch's number of threads; the former one comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


LONG_TEXT = 20_000  # characters
CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "class Node:\n    def __init__(self, value):\n        self.value = value\n",
    "import os\n\nfor name in os.listdir('.'):\n    print(name, 1 + 2)\n",
]


SIZES = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}  # of a tiny model


def write_tokenizer(folder: Path, vocab_size: int = 384) -> None:
    """Train a byte-level BPE tokenizer on a few lines and save it in the transformers layout."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    ).save_pretrained(folder)


def write_model(
    folder: Path, family: str = "llama", *, layers: int = 2, seed: int = 0, **overrides
):
    """Write a tiny random causal LM of a Llama-like family in bf16; returns its directory.

    Defaults: hidden 128, 4 query and 2 KV heads of 32, intermediate 256, vocabulary 384, tied.
    """
    from transformers import AutoConfig

    from formats.modeling.config import make_known

    make_known(family)
    values = SIZES | {"num_hidden_layers": layers, "tie_word_embeddings": True} | overrides
    if family == "mistral":
        values.setdefault("sliding_window", None)
    return write_random(folder, AutoConfig.for_model(family, **values), seed)


def write_random(folder: Path, config, seed: int = 0) -> Path:
    """Write a random model of a configuration in bf16, and a tokenizer of 384 tokens."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms away from 1 and biases away from 0
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3.0)  # logits with clear winners
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


class TinyModels:
    """Writes tiny model directories; equal arguments share one, in whichever process they are."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, family: str = "llama", **overrides) -> Path:
        from formats.modeling.config import make_known

        make_known(family)  # here too, where another process wrote the model
        key = sha256(str(sorted(overrides.items())).encode()).hexdigest()
        folder = self._root / family / key[:12] / "model"
        if not folder.exists():
            write_model(folder.with_name("draft"), family, **overrides).rename(folder)
        return folder


@pytest.fixture(scope="session")
def make_model(tmp_path_factory) -> TinyModels:
    """Factory of tiny model directories, which tests in another process may call as well."""
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny_llama(make_model) -> Path:
    """Directory of the default tiny Llama."""
    return make_model("llama")


def write_quantized(source: Path, out: Path, preset: str = "a8w8c8", **writer) -> Path:
    """Quantize a model directory by plain rounding with made-up activation and cache scales."""
    from formats.checkpoint.read import Checkpoint
    from formats.checkpoint.write import CheckpointWriter
    from formats.families.block_layers import is_projection
    from formats.families.registry import find_family
    from formats.families.sizes import cached_of
    from formats.scale_table import ScaleEntry, ScaleTable
    from formats.scheme import PRESETS
    from formats.stored.weights import scale_in_table, storage_format
    from inference.bench.random_model import with_keys_that_fit
    from ptq.methods.common.rounding import round_weight

    model = Checkpoint.open(source)
    scheme = with_keys_that_fit(PRESETS[preset], model.config)
    rows: list[ScaleEntry] = []

    def row(role: str, scale: torch.Tensor, tensor: str) -> None:
        rows.append(
            ScaleEntry.of(
                tensor,
                role,  # pyright: ignore[reportArgumentType]
                scale,
                dtype="int8",
                granularity={"weight": "per_channel", "input": "per_tensor"}.get(role, "per_head"),
                statistic="absmax",
                absmax=scale.max().item() * 127,
                tokens=0 if role == "weight" else 100,
                sqnr_db=40.0,
            )
        )

    options = {"config": model.config, "scheme": scheme, "aux_files": model.auxiliary_files}
    with CheckpointWriter(out, **(options | writer)) as file:
        for name in model.names():
            module = name.removesuffix(".weight")
            if scheme.weights is None or not is_projection(module):
                file.add(name, model.tensor(name))
                continue
            packed = storage_format(scheme) == "pack-quantized"
            dtype = model.dtype(name)
            stored = round_weight(
                model.tensor(name).float(), scheme.weights, dtype if packed else torch.float32
            )
            static = scheme.activations is not None and not scheme.activations.dynamic
            input_scale = torch.tensor([0.05]) if static else None
            file.add_linear(module, stored, dtype, input_scale)
            shown = scale_in_table(scheme.weights, stored)
            row("weight", shown, f"{module}.weight_scale")
            if input_scale is not None:
                row("input", input_scale, f"{module}.input_scale")
        for layer in range(model.config["num_hidden_layers"] if scheme.kv_cache else 0):
            attention = f"model.layers.{layer}.self_attn"
            own = cached_of(find_family(model.config), model.config)
            k, v = torch.linspace(0.03, 0.04, own.heads), torch.linspace(0.02, 0.03, own.heads)
            if own.latent:
                k, v = torch.tensor([0.04]), torch.linspace(0.02, 0.03, own.v)[None]
            if scheme.kv_cache.center_keys:
                offset = torch.linspace(-0.5, 0.5, own.heads * own.k).view(own.heads, own.k)
                file.set_beside({f"{attention}.k_offset": offset})
            if scheme.kv_cache.compensate_keys:
                seen = torch.arange(1.0, own.k + 1).diag() + 1
                file.set_beside({f"{attention}.q_moments": seen.repeat(own.heads, 1, 1)})
            if scheme.kv_cache.dynamic:
                continue
            file.set_kv_scales(attention, k, v)
            row("k_cache", k, f"{attention}.k_scale")
            row("v_cache", v, f"{attention}.v_scale")
        return file.finish(ScaleTable(entries=tuple(rows)))


class QuantizedModels:
    """Writes quantized copies of model directories; of float models the original is enough."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, source: Path, preset: str | None = "a8w8c8") -> Path:
        if preset in (None, "float"):
            return source
        out = self._root / sha256(str(source).encode()).hexdigest()[:12] / preset / "checkpoint"
        return out if out.exists() else write_quantized(source, out, preset)


@pytest.fixture(scope="session")
def make_quantized(tmp_path_factory) -> QuantizedModels:
    """Factory of quantized copies of model directories."""
    return QuantizedModels(tmp_path_factory.mktemp("quantized"))
