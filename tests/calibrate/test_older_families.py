"""Blocks of families older than Llama run in calibration as transformers runs them."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from calibrate.stream import BlockStream
from formats.checkpoint.read import Checkpoint
from formats.modeling.layers import structure_of
from ptq.methods.common.float_model import config_of
from tests.families import distance
from tests.older_families import OLDER, write_older
from tests.ptq.quantizing import random_tokens


@pytest.mark.parametrize("name", OLDER)
def test_blocks_are_those_of_transformers(tmp_path, name):
    checkpoint = Checkpoint.open(write_older(tmp_path, name))
    ids, structure = random_tokens().sequences()[1], structure_of(checkpoint.config)
    stream = BlockStream(config_of(checkpoint), checkpoint.tensor)
    stream.start([ids])
    seen = []
    for index in range(len(stream.blocks)):
        block = stream.load(index)
        block.run(0, on_kv=lambda k, v: seen.append((tuple(k.shape), tuple(v.shape))))
        stream.advance(block)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    norm, site = model.get_submodule(structure.norm), structure.blocks[0].attention
    with torch.no_grad():
        found = model.get_output_embeddings()(norm(stream.inputs[0]))
        assert distance(found, model(ids[None]).logits[0]) < 1e-4
    shape = (len(ids), site.kv_heads)
    assert seen == [((*shape, site.key_size), (*shape, site.value_size))] * 2
