"""Families older than Llama on a GPU, by transformers' code over our cache: the CPU's logits."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_gpu_families import is_near
from tests.older_families import OLDER, write_older

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", OLDER)
def test_logits_and_tokens_are_those_of_the_cpu(tmp_path, name):
    is_near(write_older(tmp_path, name), torch.float16, 0.02)
