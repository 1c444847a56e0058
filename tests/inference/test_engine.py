"""Requests: the same answer in any company, and no block of the cache ever lost."""

import gc
import json
import os
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from formats.errors import CheckpointError, EngineError, RequestError
from inference.engine import Engine
from inference.requests.request import SamplingParams
from tests.inference.engines import engine_of, tokens_of
from tests.inference.speculate.requests import TEXTS as PROMPTS


def prompts(count: int) -> list[str]:
    return [PROMPTS[i % len(PROMPTS)] + "#" * i for i in range(count)]


@pytest.fixture(params=["float", "a8w8c8", "a8w8_dynamic"])
def folder(request, tiny_llama, make_quantized):
    return make_quantized(tiny_llama, request.param)


def test_greedy_output_does_not_depend_on_the_batch(folder):
    texts = prompts(16)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    runs = {}
    for size in (1, 3, 16):
        runner = engine_of(folder, max_batch_size=size)
        runs[size] = [o.token_ids for o in runner.generate(texts, params)]
        runner.check_integrity()
    backwards = engine_of(folder).generate(texts[::-1], params)[::-1]
    streamed = [list(engine_of(folder).stream(text, params))[-1].token_ids for text in texts[:4]]
    small = engine_of(folder, max_batched_tokens=5).generate(texts, params)
    assert runs[1] == runs[3] == runs[16] == [o.token_ids for o in backwards]
    assert runs[1] == [o.token_ids for o in small]
    assert runs[1][:4] == streamed
    assert len({tuple(tokens) for tokens in runs[1]}) > 4


def test_each_end_token_of_generation_config_ends_an_output(tiny_llama, tmp_path):
    """Chat models name several: one for the text, one for the turn."""
    made = list(
        engine_of(tiny_llama).generate(["class Node:\n"], SamplingParams(max_tokens=9))[0].token_ids
    )
    ends = sorted({made[-1], made[2]})
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    generation = {"eos_token_id": [0, *ends]}
    (model / "generation_config.json").write_text(json.dumps(generation))
    output = engine_of(model).generate(["class Node:\n"], SamplingParams(max_tokens=9))[0]
    first = min(made.index(token) for token in ends)
    assert list(output.token_ids) == made[: first + 1]
    assert output.finish_reason == "stop"
    assert output.text == engine_of(model).tokenizer.decode(made[:first])


def test_a_stream_is_the_text_in_pieces_and_closing_it_frees_the_cache(tiny_llama):
    runner = engine_of(tiny_llama)
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.5, seed=3)
    whole = runner.generate([PROMPTS[0]], params)[0]
    pieces = list(runner.stream(PROMPTS[0], params))
    assert "".join(piece.delta for piece in pieces) == pieces[-1].text == whole.text
    assert whole.text == runner.tokenizer.decode(whole.token_ids, skip_special_tokens=True)
    assert [len(piece.token_ids) for piece in pieces] == list(range(1, 41))
    stream = runner.stream(PROMPTS[0], params)
    next(stream)
    assert runner.stats().used == 1
    stream.close()
    assert runner.stats().used == 0
    runner.check_integrity()


def test_what_others_gain_while_one_streams_is_not_lost(tiny_llama):
    runner = engine_of(tiny_llama)
    other = runner.add_request(PROMPTS[1], SamplingParams(max_tokens=5, ignore_eos=True))
    list(runner.stream(PROMPTS[0], SamplingParams(max_tokens=20, ignore_eos=True)))
    (output,) = [o for o in runner.step() if o.request_id == other]
    assert len(output.token_ids) == 5
    assert output.finished
    assert output.delta == output.text == runner.tokenizer.decode(output.token_ids)
    assert not runner.has_unfinished


def test_what_is_interrupted_holds_no_cache(tiny_llama, monkeypatch):
    runner = engine_of(tiny_llama)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    wanted = runner.generate(prompts(2), params)
    step, count = runner.loop.step, iter(range(9))

    def interrupted():
        if next(count) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(runner.loop, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.generate(prompts(2), params)
    monkeypatch.undo()
    assert not runner.has_unfinished
    assert runner.stats().used == 0
    again = runner.generate(prompts(2), params)
    assert [out.token_ids for out in again] == [out.token_ids for out in wanted]


def test_end_tokens(tiny_llama):
    runner = engine_of(tiny_llama)
    free = runner.generate([PROMPTS[0]], SamplingParams(max_tokens=30, ignore_eos=True))[0]
    token = free.token_ids[7]
    first = free.token_ids.index(token)
    params = SamplingParams(max_tokens=30, stop_token_ids=(token, 5), ignore_eos=True)
    ended = runner.generate([PROMPTS[0]], params)[0]
    assert ended.finish_reason == "stop"
    assert ended.token_ids == free.token_ids[: first + 1]
    longer = params.model_copy(update={"min_tokens": first + 4})
    later = runner.generate([PROMPTS[0]], longer)[0]
    assert len(later.token_ids) >= first + 4
    assert token not in later.token_ids[: first + 3]
    assert free.finish_reason == "length"


def test_a_stop_text_across_tokens_is_found_and_never_shown(tiny_llama):
    runner = engine_of(tiny_llama)
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=1)
    free = runner.generate([PROMPTS[0]], params)[0]
    starts = [len(runner.tokenizer.decode(free.token_ids[:n])) for n in range(10, 40)]
    cut = next(s for s in starts if "\ufffd" not in free.text[s - 2 : s + 2])
    stop = free.text[cut - 2 : cut + 2]
    stopping = params.model_copy(update={"stop": (stop, "never occurs")})
    pieces = list(runner.stream(PROMPTS[0], stopping))
    assert pieces[-1].finish_reason == "stop"
    assert pieces[-1].text == free.text[: free.text.find(stop)]
    assert "".join(piece.delta for piece in pieces) == pieces[-1].text


def test_logprobs_are_those_of_the_model(tiny_llama):
    runner = engine_of(tiny_llama, max_batched_tokens=4)  # prompt log probabilities over chunks
    params = SamplingParams(
        max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=2, temperature=2.0, seed=0
    )
    output = runner.generate([PROMPTS[0]], params)[0]
    ids = tokens_of(output)
    table = torch.log_softmax(engine_of(tiny_llama).score(ids), dim=-1)
    assert output.logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    rows = [*output.prompt_logprobs[1:], *output.logprobs]
    for position, row in enumerate(rows):
        assert row is not None
        count = 2 if position < len(output.prompt_token_ids) - 1 else 3
        best = table[position].topk(count).indices.tolist()
        assert list(row)[:count] == best
        assert set(row) == {*best, ids[position + 1]}
        for token, value in row.items():
            assert value == pytest.approx(table[position, token].item(), abs=1e-5)


def test_bias_and_min_p_are_a_requests_own(tiny_llama):
    """Log probabilities stay the model's; others in the batch keep their tokens."""
    runner = engine_of(tiny_llama)
    plain = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=0)
    biased = plain.model_copy(update={"logit_bias": ((7, 100.0),)})
    sharp = SamplingParams(max_tokens=4, ignore_eos=True, temperature=5.0, min_p=1.0, seed=1)
    before = runner.generate([PROMPTS[0]], plain)[0].token_ids
    outputs = runner.generate([PROMPTS[0]] * 3, [plain, biased, sharp])
    assert [o.token_ids for o in outputs] == [before, [7, 7, 7, 7], before]
    table = torch.log_softmax(runner.score([*outputs[1].prompt_token_ids, 7]), dim=-1)
    assert outputs[1].logprobs[0][7] == pytest.approx(table[-2, 7].item(), abs=1e-5)
    with pytest.raises(RequestError, match="not in the vocabulary of 384") as caught:
        runner.add_request("a", SamplingParams(logit_bias={384: 1}))
    assert caught.value.param == "logit_bias"


def test_a_seed_gives_the_same_tokens_in_any_company(tiny_llama):
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, top_p=0.9, seed=7)
    runner = engine_of(tiny_llama)
    alone = runner.generate([PROMPTS[0]], params)[0].token_ids
    crowd = runner.generate([*prompts(6), PROMPTS[0]], params)[-1].token_ids
    other = runner.generate([PROMPTS[0]], params.model_copy(update={"seed": 8}))[0].token_ids
    assert alone == crowd
    assert alone != other


def test_the_length_of_a_request_is_limited(tiny_llama):
    runner = engine_of(tiny_llama, max_model_len=64)
    output = runner.generate([[5] * 60], SamplingParams(max_tokens=50, ignore_eos=True))[0]
    assert (len(output.token_ids), output.finish_reason) == (4, "length")
    room = (
        "64 tokens leave no room in max_model_len 64; shorten it, or raise max_model_len up to 512$"
    )
    with pytest.raises(RequestError, match=room):
        runner.add_request([5] * 64)
    with pytest.raises(RequestError, match="no room in max_model_len 512; shorten it$"):
        engine_of(tiny_llama).add_request([5] * 512)


def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_read(tiny_llama, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_llama / name, tmp_path)
    with pytest.raises(CheckpointError, match="tokenizer cannot be loaded; put .* tokenizer.json"):
        engine_of(tmp_path)


@pytest.fixture
def damaged(tiny_llama, tmp_path) -> Path:
    """A copy of a model whose files may be changed."""
    return shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "TokenizersBackend", "Qwen2Tokenizer"])
def test_settings_without_a_vocabulary_are_no_tokenizer(damaged, kind):
    """transformers makes an empty one of them, to which every prompt is empty."""
    (damaged / "tokenizer.json").unlink()
    (damaged / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    with pytest.raises(CheckpointError, match="there is none: no tokenizer.json"):
        engine_of(damaged)


NONE_GENERATED = ("", "{", "[]", '{"eos_token_id": {}}', '{"eos_token_id": ["a"]}')
NO_TOKENIZER = ("{}", "{", '{"model": 3}', '{"model": {"type": "BPE"}}')


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        *(("tokenizer.json", text, "tokenizer cannot be loaded") for text in NO_TOKENIZER),
        *(("generation_config.json", text, "generation_config.json") for text in NONE_GENERATED),
    ],
)
def test_a_damaged_file_is_refused(damaged, file, text, words):
    (damaged / file).write_text(text)
    with pytest.raises(CheckpointError, match=words):
        engine_of(damaged)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_attention_heads", None, "num_attention_heads is missing"),
        ("num_attention_heads", -4, "num_attention_heads is -4: Input should be greater than 0"),
        (
            "num_attention_heads",
            8,
            r"o_proj.weight has shape \[128, 128\]; by config.json it is \[128, 256\]",
        ),
        ("num_key_value_heads", "two", "num_key_value_heads is 'two'"),
        ("head_dim", -128, "head_dim is -128"),
        ("hidden_size", 64, "embed_tokens.weight has shape"),
        ("vocab_size", 2**31 - 1, "embed_tokens.weight has shape"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan"),
        ("rope_parameters", {"rope_type": "llama3"}, "refuses it|no rotary embedding"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": None}, "rope_theta is missing"),
        ("layer_types", ["none", "such"], "transformers refuses it"),
        ("initializer_range", "x", "transformers refuses it"),
        ("eos_token_id", {"a": 1}, "eos_token_id"),
        ("model_type", "bert", "bert"),
        ("hidden_act", "relu", "relu"),
        ("tie_word_embeddings", False, "lm_head.weight is missing"),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "dynamic"),
    ],
)
def test_a_value_of_config_json_that_is_none_or_not_run_here(damaged, key, value, words):
    config = json.loads((damaged / "config.json").read_text())
    changed = {k: v for k, v in (config | {key: value}).items() if v is not None}
    (damaged / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=words):
        engine_of(damaged)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1e-10, "repetition_penalty": 1e-10},
        {"temperature": 1e-10, "repetition_penalty": 1e10},
        {"temperature": 1e10, "top_p": 1e-10, "top_k": 2**31 - 1},
        {"frequency_penalty": 2, "temperature": 1e-10, "min_tokens": 3},
    ],
)
def test_extreme_parameters_break_no_step(tiny_llama, values):
    runner = engine_of(tiny_llama)
    params = SamplingParams(max_tokens=3, seed=0, ignore_eos=not values.get("min_tokens"), **values)
    assert len(runner.generate(["x"], params)[0].token_ids) == 3


def test_end_tokens_that_the_model_does_not_know(tiny_llama, monkeypatch):
    """They would be looked for among the logits, and end the requests of all others as well."""
    runner = engine_of(tiny_llama)
    for token in (384, -1):
        with pytest.raises(RequestError, match="not in the vocabulary of 384") as caught:
            runner.add_request("a", SamplingParams(stop_token_ids=(token,)))
        assert caught.value.param == "stop_token_ids"
    monkeypatch.setattr("inference.engine.end_tokens", lambda *_: frozenset({0, 500}))
    params = SamplingParams(max_tokens=3, min_tokens=3)
    assert len(engine_of(tiny_llama).generate(["a"], params)[0].token_ids) == 3


def test_prompts_that_are_not_allowed(tiny_llama):
    runner = engine_of(tiny_llama)
    for prompt in ("", [], [384], [-1], "\ud800"):
        with pytest.raises(RequestError) as caught:
            runner.add_request(prompt)
        assert caught.value.param == "prompt"
    runner.add_request("a", request_id="x")
    with pytest.raises(RequestError, match="'x' is running"):
        runner.add_request("b", request_id="x")
    with pytest.raises(RequestError):
        runner.generate(["fine", ""])
    assert len(runner._requests) == 1  # nothing of the refused batch is left
    assert runner.abort("unknown") is None


def test_a_prompt_is_text_or_token_ids(tiny_llama):
    runner, params = engine_of(tiny_llama), SamplingParams(max_tokens=4)
    (wanted,) = runner.generate(["class Node:"], params)
    ids = runner.tokenizer("class Node:")["input_ids"]
    for prompts in ("class Node:", [ids], [tuple(ids)], [torch.tensor(ids)]):
        (output,) = runner.generate(prompts, params)
        assert output.token_ids == wanted.token_ids
    (output,) = runner.generate((text for text in ["class Node:"]), params)
    assert output.token_ids == wanted.token_ids
    for prompts in (ids, [{"role": "user", "content": "hi"}], [None], [b"class"]):
        with pytest.raises(
            RequestError, match="prompt: found .*; needed is text, or a list of token"
        ):
            runner.generate(prompts, params)
    with pytest.raises(RequestError, match=r"prompt: token \[.* is not in the vocabulary"):
        runner.generate(torch.tensor([[ids]]), params)


def test_parameters_are_sampling_params(tiny_llama):
    runner = engine_of(tiny_llama)
    for params in ({"max_tokens": 4}, [{"max_tokens": 4}], 4):
        with pytest.raises(RequestError, match="params: found .*; needed are SamplingParams"):
            runner.generate(["class Node:"], params)


def test_threads_wait_for_each_other(tiny_llama):
    """Two that were in the compiled kernels at once ended the process."""
    runner, params, texts = engine_of(tiny_llama), SamplingParams(max_tokens=16), prompts(4)
    wanted = [output.token_ids for output in runner.generate(texts, params)]

    def run(number: int) -> bool:
        if number % 2:
            made = runner.generate(texts, params)
        else:
            made = [list(runner.stream(text, params))[-1] for text in texts]
        return [output.token_ids for output in made] == wanted

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(32)))
    runner.check_integrity()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_is_refused_where_it_would_wait_for_ever(tiny_llama, monkeypatch):
    """With an engine of its parent, and with one of its own."""
    runner = engine_of(tiny_llama)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for use in (lambda: runner.generate(["a"]), lambda: engine_of(tiny_llama)):
        process = os.fork()
        if not process:
            try:
                use()
            except EngineError as error:
                os._exit(0 if "get_context('spawn')" in str(error) else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_a_deleted_engine_gives_its_memory_back_at_once(tiny_llama):
    """Not when the garbage collector comes by, before which the next engine would find none."""
    runner = engine_of(tiny_llama)
    runner.generate(["class Node:"], SamplingParams(max_tokens=4))
    engine, model = weakref.ref(runner), weakref.ref(runner.model)
    gc.disable()
    try:
        del runner
        assert (engine(), model()) == (None, None)
    finally:
        gc.enable()


def test_an_engine_that_cannot_hold_one_request_is_refused(tiny_llama):
    with pytest.raises(EngineError, match="kv_blocks 3"):
        engine_of(tiny_llama, kv_blocks=3)
    with pytest.raises(EngineError, match="1000 is more than the model's 512"):
        engine_of(tiny_llama, max_model_len=1000)


def test_logits_that_are_not_finite_end_the_request_only(tiny_llama, monkeypatch):
    runner = engine_of(tiny_llama)
    forward = runner.loop.forward

    def broken(batch):
        logits = forward(batch)
        logits[batch.query_start.diff().argmax()] = float("nan")
        return logits

    monkeypatch.setattr(runner.loop, "forward", broken)
    short = runner.add_request([5], SamplingParams(max_tokens=1))
    long = runner.add_request([5] * 9, SamplingParams(max_tokens=1))
    outputs = {o.request_id: o for o in runner.step()}
    assert outputs[short].finish_reason == "length"
    assert outputs[long].finish_reason == "error"
    assert "NaN" in (outputs[long].error or "")
    runner.check_integrity()


@pytest.mark.parametrize(
    ("device", "words"),
    [("gpu", ""), ("mps", ""), ("cuda:99", r" 'cuda:99', but torch sees \d+ GPUs")],
)
def test_a_device_that_is_not_here_is_refused_before_the_model_is_looked_at(
    tmp_path, device, words
):
    with pytest.raises(EngineError, match=f"^device: found{words}"):
        Engine.from_pretrained(tmp_path / "nowhere", device=device)


@pytest.mark.parametrize("dtype", ["float16", torch.int8])
def test_a_type_that_is_no_float_of_torch_is_refused(tiny_llama, dtype):
    with pytest.raises(EngineError, match=r"^dtype: found .* such as torch.float16"):
        Engine.from_pretrained(tiny_llama, dtype=dtype)
