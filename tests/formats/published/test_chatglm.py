"""ChatGLM2, ChatGLM3 and GLM-4-9B are read as the Glm that they are."""

import json
import shutil

import pytest

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from tests.families import but_one_in_ci
from tests.ptq.quantizing import edit_model
from tests.published import as_chatglm, check_published

THETA = {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5}


@pytest.fixture(scope="module")
def native(make_model):
    return make_model("glm", rope_parameters=THETA, tie_word_embeddings=False, attention_bias=True)


@pytest.fixture(scope="module")
def published(native, tmp_path_factory):
    return as_chatglm(native, tmp_path_factory.mktemp("chatglm") / "glm", rope_ratio=500)


@pytest.mark.parametrize("preset", but_one_in_ci("w4"))
def test_it_is_a_glm(native, published, tmp_path, preset):
    written = check_published(published, native, tmp_path, preset)
    config = json.loads((written / "config.json").read_text())
    assert config["model_type"] == "glm"
    assert config["rope_parameters"]["rope_theta"] == THETA["rope_theta"]


def test_a_ratio_of_two_meanings_asks_which(published, tmp_path):
    """ChatGLM2-6B-32K divides positions by it, ChatGLM3-6B-32K multiplies the base."""
    large = {"padded_vocab_size": 65024, "rope_ratio": 16}
    with pytest.raises(CheckpointError, match=r"rope_ratio 16 multiplies .* but divides"):
        Checkpoint.open(edit_model(published, tmp_path / "which", **large))
    linear = {"rope_type": "linear", "factor": 16.0, "rope_theta": 10000.0}
    given = edit_model(published, tmp_path / "said", **large, rope_parameters=linear)
    rotation = Checkpoint.open(given).config["rope_parameters"]
    assert rotation == {"partial_rotary_factor": 0.5, **linear}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rmsnorm": False}, "rmsnorm is False in a chatglm model"),
        ({"multi_query_attention": False}, "multi_query_attention is False"),
        ({"quantization_bit": 4}, "quantization_bit is 4"),
        ({"pre_seq_len": 128}, "pre_seq_len is 128"),
        ({"vision_config": {"hidden_size": 8}}, "vision_config is"),
        ({"seq_length": None}, "seq_length is missing"),
    ],
)
def test_what_the_native_class_does_not_compute_is_refused(published, tmp_path, settings, message):
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(edit_model(published, tmp_path / "other", **settings))


def test_the_first_generation_is_refused_by_name(published, tmp_path):
    folder = shutil.copytree(published, tmp_path / "first")
    first = {"model_type": "chatglm", "hidden_size": 64, "inner_hidden_size": 256}
    (folder / "config.json").write_text(json.dumps(first))
    with pytest.raises(CheckpointError, match="one of the first generation"):
        Checkpoint.open(folder)
