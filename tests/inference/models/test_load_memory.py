"""How much more than the packed model is held while it is loaded."""

import json
from pathlib import Path

import pytest

from inference.bench.random_model import random_checkpoint
from inference.bench.shapes import SHAPES
from kernels.cpu import native
from ptq.convert.convert import convert
from tests.inference.models.load_memory import peaks

HIDDEN, INNER = 1024, 4096
SLACK = 3 << 20  # scales, the allocator's own

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peaks from /proc"),
    pytest.mark.skipif(native.library() is None, reason="no compiled kernels"),
]


def write(folder: Path, scheme: str, **sizes: int) -> str:
    """A random checkpoint of one block, whose gate and up projections are by far the largest."""
    config = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 64}
    shape = folder / "shape"
    shape.mkdir(exist_ok=True)
    config |= {"max_position_embeddings": 128} | sizes
    (shape / "config.json").write_text(json.dumps(SHAPES["llama-1.1b"] | config))
    return str(random_checkpoint(folder, str(shape), scheme))


@pytest.fixture(scope="module")
def loads(tmp_path_factory) -> dict[str, tuple[int, int]]:
    """Bytes held at the peak of a load beyond those before it, and bytes of the packed model."""
    folder = tmp_path_factory.mktemp("loads")
    paths = {scheme: write(folder, scheme) for scheme in ("a8w4", "a8w8")}
    paths["words"] = write(folder, "a8w4", vocab_size=6000)  # 12 MB, and the head as much
    paths["gptq"] = str(folder / "gptq")
    convert(write(folder, "w4"), paths["gptq"], "gptq")
    small = write(folder, "a8w4", intermediate_size=256)
    rows = peaks("cpu", small, *paths.values())
    return dict(zip(paths, rows, strict=True))


@pytest.mark.parametrize("scheme", ["a8w4", "a8w8"])
def test_no_more_than_the_integers_of_one_layer_is_held_beside_the_packed_ones(loads, scheme):
    held, packed = loads[scheme]
    integers = 2 * INNER * HIDDEN  # of gate and up, side by side
    assert packed < held < packed + integers + SLACK, (held / 1e6, packed / 1e6)


def test_a_foreign_layer_is_unpacked_when_it_is_read(loads):
    held, packed = loads["gptq"]
    integers = 2 * INNER * HIDDEN  # of gate and up: each by itself, then side by side
    assert packed < held < packed + 1.5 * integers + SLACK, (held / 1e6, packed / 1e6)


def test_what_packing_takes_is_gone_before_the_embedding_comes(loads):
    held, packed = loads["words"]
    assert packed * 0.98 < held < packed + SLACK, (held / 1e6, packed / 1e6)
