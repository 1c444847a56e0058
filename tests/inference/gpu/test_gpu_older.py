"""Biases by distance reach the GPU's kernels, which are interpreted here."""

from tests.inference.gpu.test_gpu import engine_of, prompt
from tests.kernels.triton_lab import interpreted
from tests.older_families import write_older


@interpreted
def test_logits_with_alibi_are_those_of_the_cpu(tmp_path):
    path = str(write_older(tmp_path, "falcon_alibi", num_hidden_layers=1))
    wanted = engine_of(path, triton=False).score(prompt(6))
    engine = engine_of(path, max_batched_tokens=4)
    assert (engine.score(prompt(6)) - wanted).norm() / wanted.norm() < 0.03
