"""What an error costs by the Kronecker factors of the Fisher matrix."""

from __future__ import annotations

import torch

from calibrate.gradients import FisherFactors


def test_kl_is_the_quadratic_form_of_the_kronecker_product() -> None:
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(20, size, generator=generator) for size in (5, 3))
    a, b = x.T @ x, g.T @ g
    error = torch.randn(3, 5, generator=generator)
    flat = error.flatten().double()
    expected = 0.5 * flat @ torch.kron(b.double(), a.double()) @ flat
    torch.testing.assert_close(FisherFactors(a, b[None]).kl(error), expected)


def test_blocks_of_outputs_are_charged_apart() -> None:
    generator = torch.Generator().manual_seed(1)
    a, blocks = torch.eye(4), torch.randn(2, 2, 2, generator=generator)
    error = torch.randn(3, 4, generator=generator)  # the second block is filled up
    whole = torch.block_diag(*blocks)[:3, :3]
    expected = FisherFactors(a, whole[None]).kl(error)
    torch.testing.assert_close(FisherFactors(a, blocks).kl(error), expected)


def test_factors_of_whole_sequences_tell_the_cost_where_they_are_known():
    generator = torch.Generator().manual_seed(2)
    error, token = torch.randn(3, 4, generator=generator), (torch.eye(4), torch.eye(3)[None])
    sequence = (3 * torch.eye(4), 2 * torch.eye(3)[None])
    expected = 0.5 * 6 * error.double().square().sum()
    torch.testing.assert_close(FisherFactors(*token, sequences=sequence).kl(error), expected)
