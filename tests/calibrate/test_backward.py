"""What the blocks' gradients are: those of the whole model, by autograd; what an error costs."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from calibrate.backward import KeptInputs, backward, fisher_root, signs
from calibrate.gradients import (
    OUTPUT,
    BlockGradients,
    FisherFactors,
    block_size,
    gradient_bytes,
    in_blocks,
)
from tests.calibrate.test_stream import open_stream

LENGTHS = (20, 33, 41)


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 384, (n,), generator=generator) for n in LENGTHS]


def run_backward(folder, size=10**6, inputs=None) -> dict[str, BlockGradients]:
    stream, found = open_stream(folder), dict[str, BlockGradients]()
    keep = {"inputs": inputs or KeptInputs(), "found": found.__setitem__}
    backward(stream, sequences(), size=size, **keep)
    return found


def whole_model(folder) -> dict[str, list[torch.Tensor]]:
    """Gradients of each sample's loss at the linear layers' outputs, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.requires_grad_(False)
    seen: dict[str, list[torch.Tensor]] = {}
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Linear):

            def hook(_, __, out, name=name):
                out.register_hook(lambda g: seen.setdefault(name, []).append(g[0]))

            part.register_forward_hook(hook)
    for ids in sequences():
        embedded = model.get_input_embeddings()(ids[None]).requires_grad_()
        logits = model(inputs_embeds=embedded).logits[0]
        drawn = fisher_root(logits.detach().softmax(-1), signs(ids, logits.shape[1]))
        logits.backward(drawn)
    return seen


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen3", {"tie_word_embeddings": False}),
        ("gemma2", {"final_logit_softcapping": 5.0, "sliding_window": 16}),
    ],
)
def test_gradients_are_those_of_the_whole_model(make_model, family, options):
    folder = make_model(family, **options)
    found, expected = run_backward(folder), whole_model(folder)
    for block, gradients in found.items():
        layers = [name for name, role in gradients.of if role == OUTPUT]
        assert len(layers) == (1 if block == "lm_head" else 7)
        for name in layers:
            assert name.startswith(block)
            seen, all_tokens = gradients.output(name), torch.cat(expected[name])
            weights = torch.cat(seen.weights)
            assert [len(w) for w in seen.weights] == list(LENGTHS)
            torch.testing.assert_close(weights, all_tokens.square().sum(1), rtol=1e-3, atol=1e-9)
            wanted = all_tokens.T @ all_tokens / all_tokens.square().sum()
            size = seen.outputs.shape[1]
            for i, part in enumerate(seen.outputs):
                place = slice(i * size, (i + 1) * size)
                torch.testing.assert_close(part, wanted[place, place], rtol=1e-3, atol=1e-6)
            assert seen.outputs.diagonal(dim1=1, dim2=2).sum().item() == pytest.approx(1, rel=1e-5)


def blocks(found: dict[str, BlockGradients]) -> dict[str, BlockGradients]:
    return {name: gradients for name, gradients in found.items() if name != "lm_head"}


def test_gradients_of_v_are_those_of_its_projection(tiny_llama):
    """And so are those of K, but for the turn: of each head and token alike in length."""
    for block, gradients in blocks(run_backward(tiny_llama)).items():
        attention = f"{block}.self_attn"
        for role, layer in (("k_cache", "k_proj"), ("v_cache", "v_proj")):
            heads = gradients.of[attention, role]
            rows = gradients.output(f"{attention}.{layer}")
            assert heads.outputs.shape == (2, 32, 32)
            assert [w.shape for w in heads.weights] == [(n, 2) for n in LENGTHS]
            for of_heads, of_rows in zip(heads.weights, rows.weights, strict=True):
                torch.testing.assert_close(of_heads.sum(1), of_rows, rtol=1e-4, atol=1e-9)
        share = torch.cat(gradients.of[attention, "v_cache"].weights).sum(0)
        own = gradients.of[attention, "v_cache"].outputs * (share / share.sum()).view(-1, 1, 1)
        whole = gradients.output(f"{attention}.v_proj").outputs[0]
        torch.testing.assert_close(own, torch.stack([whole[:32, :32], whole[32:, 32:]]))


def test_blocks_of_outputs_lie_on_the_diagonal(tiny_llama):
    whole, cut = run_backward(tiny_llama), run_backward(tiny_llama, size=48)
    for block, gradients in blocks(cut).items():
        for (name, role), seen in gradients.of.items():
            if role != OUTPUT:
                continue
            g, width = whole[block].of[name, role].outputs[0], seen.outputs.shape[1]
            assert width == 48
            for i, part in enumerate(seen.outputs):
                wanted = g[48 * i : 48 * (i + 1), 48 * i : 48 * (i + 1)]
                torch.testing.assert_close(part[: len(wanted), : len(wanted)], wanted)
                assert not part[len(wanted) :].any()


def test_inputs_kept_in_files_give_nearly_the_same_and_are_removed(tiny_llama, tmp_path):
    held, filed = run_backward(tiny_llama), run_backward(tiny_llama, inputs=KeptInputs(tmp_path))
    assert not list(tmp_path.iterdir())
    for block, gradients in held.items():
        for key, seen in gradients.of.items():
            other = torch.cat(filed[block].of[key].weights)
            torch.testing.assert_close(other, torch.cat(seen.weights), rtol=0.2, atol=1e-3)


def test_gradients_do_not_depend_on_the_other_samples(tiny_llama, monkeypatch):
    together = run_backward(tiny_llama)
    alone = sequences()[1:2]
    monkeypatch.setattr(f"{__name__}.sequences", lambda: alone)
    for block, gradients in run_backward(tiny_llama).items():
        for key, seen in gradients.of.items():
            torch.testing.assert_close(seen.weights[0], together[block].of[key].weights[1])


def test_saved_gradients_are_the_same(tiny_llama):
    for gradients in run_backward(tiny_llama).values():
        restored = BlockGradients.from_state(gradients.state())
        assert restored.of.keys() == gradients.of.keys()
        for key, seen in gradients.of.items():
            assert torch.equal(restored.of[key].outputs, seen.outputs)
            assert all(map(torch.equal, restored.of[key].weights, seen.weights))
            pair, kept = restored.of[key].sequences, seen.sequences
            assert (pair is None) == (kept is None)
            if pair is not None and kept is not None:
                torch.testing.assert_close(pair[0], kept[0], rtol=2**-8, atol=0)
                assert torch.equal(pair[1], kept[1])


def test_drawn_gradients_have_the_fisher_matrix_of_the_logits():
    p = torch.tensor([0.1, 0.0, 0.55, 0.3, 0.05, 0, 0, 0, 0]).expand(40000, 9)
    drawn = fisher_root(p.clone(), signs(torch.arange(40000), 9))
    fisher = torch.diag(p[0]) - p[0].outer(p[0])
    torch.testing.assert_close(drawn.T @ drawn / len(drawn), fisher, atol=0.01, rtol=0)
    torch.testing.assert_close(drawn.mean(0), torch.zeros(9), atol=0.01, rtol=0)


def test_signs_of_a_sample_are_its_own():
    one, other = torch.arange(50), torch.arange(1, 51)
    assert torch.equal(signs(one, 1000), signs(one, 1000))
    assert not torch.equal(signs(one, 1000), signs(other, 1000))
    assert len(signs(one, 1000).unique(dim=0)) == 50


def test_blocks_of_outputs_are_as_large_as_the_bytes_allow():
    widths = [96] * 4 + [1024, 14336]
    assert block_size(widths, 10**9) == 14336
    assert block_size(widths, 10**8) == 1024
    assert block_size(widths, 1) == 256
    assert gradient_bytes([100, 1000], 256) == 4 * (100**2 + 4 * 256**2)
    assert in_blocks(torch.ones(5, 100), 48).shape == (5, 3, 48)


def test_layers_that_make_k_and_v_have_factors_of_whole_sequences(tiny_llama):
    expected, inputs = whole_model(tiny_llama), {}
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    for name, part in model.named_modules():
        if name.endswith("k_proj"):
            part.register_forward_hook(
                lambda _, args, __, name=name: inputs.setdefault(name, []).append(args[0][0])
            )
    with torch.no_grad():
        for ids in sequences():
            model(ids[None])
    found = run_backward(tiny_llama)
    for name, xs in inputs.items():
        of_block = found[name.removesuffix(".self_attn.k_proj")]
        ds = [g.T @ x for g, x in zip(expected[name], xs, strict=True)]
        pair = of_block.output(name).sequences
        assert pair is not None
        a = sum(d.T @ d for d in ds) / sum(LENGTHS)
        g = sum(d @ d.T for d in ds) / sum(d.square().sum() for d in ds)
        torch.testing.assert_close(pair[0], a, rtol=1e-3, atol=1e-5 * a.abs().max().item())
        torch.testing.assert_close(pair[1][0], g, rtol=1e-3, atol=1e-5)
        others = (n for n, role in of_block.of if role == OUTPUT and n[-6:-5] not in "kv")
        assert all(of_block.output(other).sequences is None for other in others)


def test_kl_is_the_quadratic_form_of_the_kronecker_product():
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(20, size, generator=generator) for size in (5, 3))
    a, b = x.T @ x, g.T @ g
    error = torch.randn(3, 5, generator=generator)
    flat = error.flatten().double()
    expected = 0.5 * flat @ torch.kron(b.double(), a.double()) @ flat
    torch.testing.assert_close(FisherFactors(a, b[None]).kl(error), expected)


def test_blocks_of_outputs_are_charged_apart():
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
