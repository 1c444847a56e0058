"""Linear recurrences, convolutions and gated norms of layers with a state, against their twins."""

import pytest
import torch
import torch.nn.functional as F

import kernels.reference
from kernels.op_inputs import Gate
from kernels.triton import reference
from kernels.triton.convolution import causal_convolution
from kernels.triton.norms import gated_norm
from kernels.triton.recurrence import TimeSteps, linear_recurrence
from tests.kernels.triton_lab import building_for, compiled, interpreted


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def recurrence_inputs(tokens, rows, columns, by_channel, dtype, heads=4, groups=2, batch=3):
    sizes = (batch, tokens, heads, *((rows,) if by_channel else ()))
    both = drawn(batch, tokens, groups, 2 * rows, dtype=dtype)  # rows of one tensor, as when split
    return {
        "q": both[..., :rows],
        "k": both[..., rows:],
        "v": drawn(batch, tokens, heads, columns, dtype=dtype, seed=2),
        "decay": -F.softplus(drawn(*sizes, seed=3)),
        "beta": drawn(batch, tokens, heads, seed=4).sigmoid().to(dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize(
    ("rows", "columns", "by_channel", "how"),
    [
        (16, 32, False, {"delta": True, "norm": True, "scale": 0.25}),
        (20, 9, True, {"delta": True, "norm": True}),
        (24, 40, False, {"delta": False, "transposed": True, "skip": torch.arange(4.0)}),
    ],
)
@interpreted
def test_a_recurrence_is_its_twin(rows, columns, by_channel, how, tokens, dtype):
    """Also token by token, and in rows of a pool of states."""
    near = 1e-5 if dtype == torch.float32 else 1e-2
    given = recurrence_inputs(tokens, rows, columns, by_channel, dtype)
    state = drawn(3, 4, *((columns, rows) if "transposed" in how else (rows, columns)), seed=5)
    wanted, after = reference.linear_recurrence(**given, state=state, **how)
    once, one_by_one = state.clone(), state.clone()
    found = linear_recurrence(**given, state=once, **how)
    torch.testing.assert_close(found.double(), wanted, rtol=near, atol=near)
    torch.testing.assert_close(once.double(), after, rtol=near, atol=near)
    for t in range(tokens):
        own = {name: x[:, t : t + 1] for name, x in given.items()}
        linear_recurrence(**own, state=one_by_one, **how)
    torch.testing.assert_close(one_by_one, once, rtol=1e-4, atol=1e-5)
    pool, places = drawn(5, *state.shape[1:], seed=6), torch.tensor([-1, 0, 3])
    before = pool.clone()
    wanted, after = reference.linear_recurrence(**given, state=pool[places], **how)
    found = linear_recurrence(**given, state=pool, places=places, **how)
    torch.testing.assert_close(found.double(), wanted, rtol=near, atol=near)
    torch.testing.assert_close(pool[places].double(), after, rtol=near, atol=near)
    assert torch.equal(pool[[1, 2]], before[[1, 2]])


@pytest.mark.parametrize("tokens", [1, 19])
@interpreted
def test_decay_and_beta_follow_from_time_steps(tokens):
    given = recurrence_inputs(tokens, 16, 8, False, torch.float32)
    own, rate, bias = 9 * given["beta"], -torch.arange(1.0, 5.0), drawn(4, seed=7)
    state = drawn(3, 4, 16, 8, seed=5)
    for steps, beta in (
        (TimeSteps(rate, bias, high=3.0), F.softplus(own + bias).clamp(max=3.0)),
        (TimeSteps(rate, softplus=False), own),
    ):
        both = given | {"beta": beta, "decay": rate * beta}
        wanted, after = reference.linear_recurrence(**both, state=state, delta=False)
        both, found = given | {"beta": own, "decay": None}, state.clone()
        y = linear_recurrence(**both, state=found, delta=False, steps=steps)
        torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(found.double(), after, rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match="either decay is given"):
        linear_recurrence(**given, state=state, delta=False, steps=steps)


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("taps", [2, 4])
@interpreted
def test_a_convolution_is_that_of_torch(taps, silu):
    """At once, and token by token after a state."""
    batch, channels, tokens, kept = 2, 130, 19, 4
    x, weight, bias = drawn(batch, channels, tokens), drawn(channels, taps), drawn(channels)
    wanted = F.conv1d(F.pad(x, (taps - 1, 0)), weight[:, None], bias, groups=channels)
    wanted = F.silu(wanted) if silu else wanted
    for own in (x, x.mT.contiguous().mT):
        found = causal_convolution(own, weight, bias, silu=silu)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    state = torch.zeros(batch, channels, kept)
    for t in range(tokens):
        found = causal_convolution(x[..., t : t + 1], weight, bias, silu=silu, state=state)
        torch.testing.assert_close(found, wanted[..., t : t + 1], rtol=1e-5, atol=1e-5)
    assert torch.equal(state, x[..., -kept:])
    pool = torch.zeros(3, channels, kept)
    causal_convolution(x[..., :1], weight, bias, silu=silu, state=pool, places=torch.tensor([2, 1]))
    assert torch.equal(pool[..., -1], F.pad(x[..., 0].flip(0), (0, 0, 1, 0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [24, 1536])
@interpreted
def test_gated_norms_are_their_twins(size, dtype):
    both, weight = torch.randn(5, 2 * size).to(dtype), torch.rand(size)
    x, gate = both.chunk(2, dim=1)  # rows are parts of longer ones
    for form in (Gate(), Gate(silu=False), Gate(first=True), Gate(first=True, groups=4)):
        found = gated_norm(x, gate, weight, 1e-5, form)
        wanted = kernels.reference.gated_norm(x, gate, weight, 1e-5, form)
        assert found.is_contiguous()
        torch.testing.assert_close(found, wanted)
        assert torch.equal(gated_norm(x[None], gate[None], weight, 1e-5, form), found[None])
    with pytest.raises(ValueError, match="H a multiple of 5"):
        gated_norm(x, gate, weight, 1e-5, Gate(groups=5))


@interpreted
def test_what_does_not_fit_is_refused():
    given = recurrence_inputs(2, 16, 8, False, torch.float32)
    with pytest.raises(ValueError, match=r"needed is a contiguous \(3, 4, 16, 8\)"):
        linear_recurrence(**given, state=torch.zeros(3, 4, 8, 16), delta=True)
    with pytest.raises(ValueError, match="needed are \\[B, T, G, R\\]"):
        linear_recurrence(**given | {"k": given["q"][:, :1]}, state=torch.zeros(1), delta=True)
    with pytest.raises(ValueError, match="a contiguous \\[B, C, 3 or more\\]"):
        causal_convolution(
            drawn(1, 8, 2), drawn(8, 4), None, silu=False, state=torch.zeros(1, 8, 4)
        )


@compiled
def test_states_stay_in_registers():
    given = recurrence_inputs(64, 128, 128, False, torch.bfloat16, heads=32, groups=16, batch=1)
    state = torch.zeros(1, 32, 128, 128)
    for tokens in (1, 64):
        own = {name: x[:, :tokens] for name, x in given.items()}
        with building_for(90) as built:
            linear_recurrence(**own, state=state, delta=True, norm=True)
        assert not built[0].spills(40)  # which is faster than more warps
        assert (tokens == 1) != bool(built[0].count(r"mma\.sync\S*tf32")), "products of chunks"
