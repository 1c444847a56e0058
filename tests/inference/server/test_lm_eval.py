"""lm-eval's requests: the server's log probabilities are the engine's, for each token.

lm-eval's `local-completions` posts a context and its continuation as one prompt, asks for `echo` and
`logprobs`, and reads the continuation's; the one token that it has made is cut off.
"""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from inference.engine import Engine
from inference.requests.request import SamplingParams
from tests.e2e.installed import environment
from tests.inference.server.real_server import RealServer

LENGTH = 2048  # most tokens of the shared server's model
Pair = tuple[list[int], list[int]]  # tokens of a context and of its continuation


def scored(engine: Engine, context: list[int], continuation: list[int]) -> tuple[list[float], bool]:
    """Log probabilities of a continuation's tokens, and whether each is the likeliest."""
    rows = torch.log_softmax(engine.score(context + continuation), dim=-1)[len(context) - 1 : -1]
    own = rows[range(len(rows)), continuation]
    return own.tolist(), bool((own == rows.amax(1)).all())


def told(choice: dict[str, Any], context: int) -> tuple[list[float], bool]:
    """The same as lm-eval reads it out of a choice; see its `LocalCompletionsAPI.parse_logprobs`."""
    found = choice["logprobs"]
    own, tops = found["token_logprobs"][context:-1], found["top_logprobs"][context:-1]
    return own, all(one == max(top.values()) for one, top in zip(own, tops, strict=True))


def post(server: RealServer, prompts: list) -> list[dict[str, Any]]:
    """The choices of a request of lm-eval's, in order."""
    body = {
        "model": "tiny",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return sorted(answer.json()["choices"], key=lambda choice: choice["index"])


@pytest.fixture(scope="module")
def engine(make_model) -> Engine:
    """Of the model that the shared server has."""
    return Engine.from_pretrained(make_model(max_position_embeddings=LENGTH))


@pytest.fixture(scope="module")
def pairs(engine) -> list[Pair]:
    """Of any lengths up to the longest; some continuations are the likeliest."""
    rng = random.Random(0)
    lengths = [
        (1, 1),
        (1, LENGTH - 2),
        (LENGTH - 2, 1),
        (63, 1),
        (64, 2),
        (65, 130),
        (7, 3),
        (300, 20),
    ]
    made = [([rng.randrange(384) for _ in range(n)], rng.choices(range(384), k=m)) for n, m in lengths]  # fmt: skip
    contexts = [context for context, _ in made if len(context) < 400]
    likeliest = engine.generate(contexts, SamplingParams(max_tokens=9, ignore_eos=True))
    made += [(o.prompt_token_ids, list(o.token_ids)) for o in likeliest]
    text = engine.tokenizer("class Node:\n    def __init__(self, value):\n")["input_ids"]
    return [*made, ([0], text)]  # without a context lm-eval takes the end token


def test_continuations_are_scored_as_by_the_engine(server, engine, pairs):
    """A batch of prompts in one request, as token ids."""
    choices = post(server, [context + continuation for context, continuation in pairs])
    greedy = set()
    for choice, (context, continuation) in zip(choices, pairs, strict=True):
        own, likeliest = scored(engine, context, continuation)
        found, found_likeliest = told(choice, len(context))
        assert found == pytest.approx(own, abs=1e-6)
        assert found_likeliest == likeliest
        greedy.add(likeliest)
    assert greedy == {True, False}


def test_texts_are_scored_as_their_tokens(server, engine):
    """Requests of lm-eval with `tokenized_requests=False`."""
    context, continuation = (
        "import os\n\nfor name in os.listdir('.'):\n",
        "    print(name, 1 + 2)\n",
    )
    count = len(engine.tokenizer(context)["input_ids"])
    both = engine.tokenizer(context + continuation)["input_ids"]
    (choice,) = post(server, [context + continuation])
    own, likeliest = scored(engine, both[:count], both[count:])
    assert told(choice, count) == (pytest.approx(own, abs=1e-6), likeliest)


def test_a_prompt_without_room_for_its_token_is_refused(server):
    body = {"prompt": [1] * LENGTH, "max_tokens": 1, "logprobs": 1, "echo": True}
    answer = httpx.post(f"{server.address}/v1/completions", json=body)
    assert answer.status_code == 400
    assert str(LENGTH) in answer.json()["error"]["message"]


TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
}
LONGEST = 1024  # tokens of the default model


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory) -> Path:
    """A Python that has lm-eval, beside what this one has."""
    python, _ = environment(tmp_path_factory.mktemp("lm-eval") / "venv", "checkout", Path())
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    subprocess.run([*command, "lm-eval[api]==0.4.13"], check=True)
    return python


def write_tasks(folder: Path) -> None:
    """Lines of this repository's to choose from, and texts of it, the last longer than the model."""
    source = Path(__file__).read_text(encoding="utf-8")
    lines = [line for line in source.splitlines() if line.strip()]
    rows = {
        "choices": [
            {"context": "\n".join(lines[:end]) + "\n", "choices": lines[end : end + 3], "gold": 0}
            for end in range(1, len(lines) - 3, 9)
        ],
        "texts": [{"text": source[:count]} for count in (5, 300, len(source))],
    }
    for name, values in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            **values,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def ids_of(engine: Engine, text: str) -> list[int]:
    return engine.tokenizer(text, add_special_tokens=False)["input_ids"]


def sum_of_choice(engine: Engine, context: str, continuation: str) -> tuple[float, bool]:
    """What lm-eval should find: blanks between the two are the continuation's, the end is kept."""
    blanks = len(context) - len(context.rstrip())
    context, continuation = context[:-blanks], context[-blanks:] + continuation
    first, both = ids_of(engine, context), ids_of(engine, context + continuation)
    cut = max(0, len(both) - (LONGEST - 1))
    own, likeliest = scored(engine, first[cut:], both[len(first) :])
    return sum(own), likeliest


def sum_of_text(engine: Engine, text: str) -> float:
    """What lm-eval should find: windows, each behind the token before it, at first the end token."""
    tokens, total, size = [0, *ids_of(engine, text)], 0.0, LONGEST - 2
    for begin in range(0, len(tokens) - 1, size):
        end = min(begin + size, len(tokens) - 1)
        context = tokens[max(0, end - size) : begin + 1]
        total += sum(scored(engine, context, tokens[begin + 1 : end + 1])[0])
    return total


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_lm_eval_finds_what_the_engine_does(lm_eval, make_quantized, tmp_path):
    """Its command, before a server of the quantized default model, which has the tokenizer, too."""
    source = Path(__file__).parents[3] / "recipes" / "tiny-python"
    checkpoint = make_quantized(source, "a8w8c8")
    write_tasks(tmp_path)
    with RealServer(checkpoint, "--served-model-name", "tiny") as server:
        values = {
            "model": "tiny",
            "base_url": f"{server.address}/v1/completions",
            "max_length": LONGEST,
            "num_concurrent": 3,
        }
        command = [lm_eval, "-m", "lm_eval", "--model", "local-completions", "--model_args"]
        command += [",".join(f"{key}={value}" for key, value in values.items())]
        command += ["--tasks", ",".join(TASKS), "--include_path", tmp_path, "--batch_size", "2"]
        command += ["--log_samples", "--output_path", tmp_path / "out"]
        subprocess.run(command, check=True, cwd=tmp_path)
    engine = Engine.from_pretrained(checkpoint)
    count = 0
    for sample in samples(tmp_path / "out", "choices"):
        for asked, found in zip(sample["arguments"].values(), sample["resps"], strict=True):
            own, likeliest = sum_of_choice(engine, asked["arg_0"], asked["arg_1"])
            assert float(found[0][0]) == pytest.approx(own, abs=1e-6)
            assert (str(found[0][1]) == "True") == likeliest
            count += 1
    assert count > 50
    for sample in samples(tmp_path / "out", "texts"):
        own = sum_of_text(engine, sample["doc"]["text"])
        assert float(sample["resps"][0][0]) == pytest.approx(own, abs=1e-6)


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    (found,) = folder.glob(f"*/samples_{task}_*.jsonl")
    return [json.loads(line) for line in found.read_text().splitlines()]
