"""What blocks hand to later ones (K and V) and get of the tokens beside hidden states."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from calibrate.block import DecoderBlock
from calibrate.stream import BlockStream
from tests.calibrate.test_backward_families import IDS, at_first_block, run
from tests.calibrate.test_stream import open_stream
from tests.families import distance
from tests.gemma4 import write_tiny


@pytest.fixture(scope="module", params=["shared", "gemma3n"])
def folder(request, tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp(request.param) / "float", request.param)


def run_blocks(folder) -> tuple[BlockStream, list[DecoderBlock], list[list[torch.Tensor]]]:
    """The stream after all blocks, these with their weights, and the rows before each."""
    stream = open_stream(folder, IDS)
    blocks, before = [], []
    for index in range(len(stream.blocks)):
        before.append(list(stream.inputs))
        block = stream.load(index)
        outputs = block.outputs()
        blocks.append(block)
        stream.inputs[:] = outputs
    return stream, blocks, before


def test_what_the_head_reads_is_what_it_reads_in_transformers(folder):
    stream, *_ = run_blocks(folder)
    stream.finish()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen = []
    model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    for ids, found in zip(IDS, stream.inputs, strict=True):
        with torch.no_grad():
            model(ids[None])
        assert distance(found, seen.pop()) < 1e-4


def test_rows_hold_keys_and_values_from_who_makes_them_to_the_last_reader(folder):
    """Blocks 2 and 3 read those of blocks 0 and 1."""
    _, blocks, before = run_blocks(folder)
    sizes = [sum(own.sizes) for own in blocks[1].handed.rows.after]
    widths = [rows[0].shape[1] - before[0][0].shape[1] for rows in before]
    assert widths == [0, sizes[0], sum(sizes), sizes[1]]
    assert [block.attention is None for block in blocks] == [False, False, True, True]


def test_gradients_flow_back_through_them(tmp_path):
    folder = write_tiny(tmp_path / "float", "shared")
    gradients, _, _ = run(folder)
    for one, other in zip(gradients, at_first_block(folder), strict=True):
        assert distance(one, other) < 1e-4
