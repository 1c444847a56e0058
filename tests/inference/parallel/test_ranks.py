"""An engine on several ranks gives what it gives on one: ranks here are threads, which is cheap."""

import pytest
import torch

from formats.checkpoint.part import Span
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, EngineError
from inference.beam_search import BeamParams, beam_search
from inference.config import SpeculateConfig
from inference.models.kv_cache import CacheShape, LayerCache
from inference.models.model import KVHeads
from inference.parallel.part import cut_cache
from inference.requests.request import SamplingParams
from ptq.convert.convert import convert
from tests.experts import MOE
from tests.families import in_turn
from tests.inference.engines import engine_of
from tests.inference.parallel.thread_ranks import engine_on, thread_engine
from tests.ptq.convert.foreign_folders import turn_inputs
from tests.ptq.quantizing import quantize_head

PROMPTS = [[5, 9, 200, 31, 7, 77], [11, 4, 90], [5, 9, 200, 31, 8]]
TEXT = list(range(3, 60))
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
EXACT = {"a8w8c8", "a8w8_dynamic"}  # every sum that crosses ranks is one of integers
ROUNDED = {"float", "w4", "a8w4", "fp8_channel", "fp8_c8", "mxfp4"}
SUMS, INPUTS = 2e-5, 0.05  # what another order of sums changes in logits, and an input's rounding


def outcome(path, ranks, **sizes):
    with engine_on(path, ranks, **sizes) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        engine.check_integrity()
        return [output.token_ids for output in outputs], engine.score(TEXT)


def compare(path, ranks=2, *, exact=False, bound=SUMS, **sizes):
    """Tokens are equal; logits too where sums are of integers, else nearly."""
    (tokens, logits), (wanted, expected) = outcome(path, ranks, **sizes), outcome(path, 1, **sizes)
    assert tokens == wanted
    assert expected.abs().max() > 1
    assert (logits - expected).abs().max() <= (0 if exact else bound)


MODELS = [  # family, its own sizes, scheme and ranks
    *((family, {}, "a8w8c8", 2) for family in ("qwen2", "qwen3", "gemma2")),
    *((family, {}, "a8w8c8", 2) for family in ("granite", "phi3", "glm4")),
    ("qwen2", {}, "a8w8c8", 4),
    ("llama", {"intermediate_size": 4608, "layers": 1}, "a8w8c8", 2),
    ("llama", {"vocab_size": 387}, "float", 4),
    *((family, MOE[family], "float", 2) for family in ("mixtral", "qwen2_moe")),
    *(
        pytest.param("llama", {"tie_word_embeddings": False}, *case.values, marks=case.marks)
        for case in in_turn(sorted(EXACT | ROUNDED), [2, 4])
    ),
]


@pytest.mark.parametrize(("family", "sizes", "scheme", "ranks"), MODELS)
def test_models(family, sizes, scheme, ranks, make_model, make_quantized):
    """Biases of q, k and v, norms of heads, bounds, merged layers, heads that turn in parts; most
    have a head that is the embedding, too. More inputs than an fp32 sum of int8 products holds
    exactly; a vocabulary that does not divide; mixtures of experts. With four ranks two have a head
    of K and V together, and w4's groups of 128 cross cuts."""
    path = make_quantized(make_model(family, **sizes), scheme)
    bound = INPUTS if scheme.startswith(("a8", "fp8")) else SUMS
    compare(path, ranks, exact=scheme in EXACT, bound=bound)


def test_a_quantized_head_that_is_the_embedding(tiny_llama, tmp_path):
    path = quantize_head(tiny_llama, tmp_path / "out", "a8w8_dynamic", "a8w8_dynamic").path
    assert Checkpoint.open(path).shares_head
    compare(path, exact=True)


def test_inputs_in_another_order(tiny_llama, make_quantized, tmp_path):
    """Layers whose groups are no neighbouring inputs read the inputs of all ranks."""
    convert(make_quantized(tiny_llama, "w4"), tmp_path / "gptq", "gptq")
    path = turn_inputs(tmp_path / "gptq", tmp_path / "turned")
    assert Checkpoint.open(path).reorders_inputs("model.layers.0.mlp.down_proj")
    compare(path, exact=True)


def test_preemption_chunks_prefix_and_aborts(tiny_llama, make_quantized):
    """What is decided on the first rank reaches the cache of all: blocks are too few for all
    requests, prompts come in chunks, one is aborted amid its tokens, one is found in the cache."""
    path = make_quantized(tiny_llama, "a8w8c8")
    prompts = [[7 + i, *range(20, 90 + i)] for i in range(3)]
    params = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=2)
    found = {}
    for ranks in (1, 2):
        sizes = {"kv_blocks": 5, "max_model_len": 192, "max_batched_tokens": 48}
        sizes |= {"max_batch_size": 4}
        with engine_on(path, ranks, **sizes) as engine:
            doomed = engine.add_request(prompts[0], params)
            for _ in range(4):
                engine.step()
            assert engine.abort(doomed) is not None
            outputs = engine.generate(prompts, params)
            outputs += engine.generate([prompts[2]], params)
            stats = engine.stats()
            assert stats.preemptions
            assert stats.hit_tokens
            engine.check_integrity()
            found[ranks] = [(o.token_ids, o.logprobs) for o in outputs]
    assert found[1] == found[2]


def test_a_request_is_the_same_in_any_company(make_model):
    """Sums of floats over four ranks, too, whatever the number of rows."""
    alone = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3)
    with engine_on(make_model("llama", tie_word_embeddings=False), 4) as engine:
        wanted = [engine.generate([prompt], alone)[0].logprobs for prompt in PROMPTS]
        assert [o.logprobs for o in engine.generate(PROMPTS, alone)] == wanted


def test_beams_drafts_and_sampled_tokens(tiny_llama, make_quantized):
    path, found = make_quantized(tiny_llama, "a8w8c8"), {}
    sampled = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=3)
    repeated = [*range(30, 40)] * 3
    for ranks in (1, 2):
        with engine_on(path, ranks, speculate=SpeculateConfig(method="ngram", depth=3)) as engine:
            outputs = engine.generate([*PROMPTS, repeated], sampled)
            outputs += engine.generate([repeated], GREEDY)
            beams = beam_search(engine, PROMPTS[:1], BeamParams(beam_width=3, max_tokens=8))[0]
            assert engine.speculation is not None
            found[ranks] = [o.token_ids for o in outputs], [(b.token_ids, b.score) for b in beams]
    assert found[1] == found[2]


@pytest.mark.parametrize(
    ("family", "overrides", "ranks", "told"),
    [
        ("llama", {}, 3, "4 heads of q and 2 of K and V, .* among 3 ranks. Allowed are 1, 2, 4"),
        ("olmo2", {}, 2, "norms q and k over all of their heads"),
        ("llama", {"vocab_size": 384, "intermediate_size": 3}, 4, "3 outputs: too few"),
    ],
)
def test_what_is_not_cut_is_refused_by_name(family, overrides, ranks, told, make_model):
    with pytest.raises(CheckpointError, match=told):
        thread_engine(make_model(family, **overrides), ranks)


def test_blocks_of_outputs_that_cross_a_cut(tiny_llama, make_quantized):
    path = make_quantized(tiny_llama, "fp8_block")
    told = r"q_proj has scales for every 128 outputs, and a rank's heads are 64 of them"
    with pytest.raises(CheckpointError, match=told):
        thread_engine(path, 2)


def test_other_code_is_refused(tiny_llama):
    with pytest.raises(EngineError, match="transformers' own code is not cut among ranks"):
        engine_of(tiny_llama, tensor_parallel=2, transformers_code=True)


def test_a_rank_holds_its_part_alone(make_model, make_quantized):
    path = make_quantized(make_model("llama", tie_word_embeddings=False), "a8w8c8")
    with engine_on(path, 1) as one, engine_on(path, 2) as two:
        held = two.model.weight_bytes / one.model.weight_bytes
        assert 0.45 < held < 0.55
        assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token


def test_what_keys_are_moved_by_is_cut_with_their_heads():
    offset, feedback = torch.randn(4, 8), torch.randn(4, 8, 8)
    layer = LayerCache(KVHeads(4, 8, 8), turn=8, offset=offset, feedback=feedback)
    (own,) = cut_cache(CacheShape(1, [layer, LayerCache(KVHeads(4, 8, 8))]), Span(1, 3)).layers[:1]
    assert own.heads.count == 2
    assert torch.equal(own.offset, offset[1:3])
    assert torch.equal(own.feedback, feedback[1:3])
