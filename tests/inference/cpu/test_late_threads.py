"""A thread that is late changes nothing, such as one whose core is busy with something else.

The kernels are compiled with PTQ_DELAYS (`csrc/api.h`): each thread sleeps at random where it
may meet others. What was built is kept in the cache: it is built again where a source has changed.
"""

import os
import random

import pytest

from inference.engine import Engine
from inference.requests.request import SamplingParams
from kernels.cpu import build, native
from tests.inference.engines import engine_of
from tests.ptq.quantizing import quantize_head
from tests.tiny_families import TINY

if native.library() is None:
    pytest.skip("no C++ compiler, and no compiled kernels", allow_module_level=True)

COUNT = int(os.environ.get("PTQ_LATE_PROMPTS", "40"))
SIZES = {"max_batched_tokens": 160, "max_batch_size": 12, "prefix_cache": False}
FAMILIES = ["llama", "gemma3_text", "olmo2"]  # norms before layers, on both sides, after them
LENGTHS = (1, 2, 3, 5, 8, 13, 17, 40, 64, 64, 300)  # the last: attention's splits of a token


@pytest.fixture(scope="module")
def delayed(pytestconfig):
    """The kernels, with threads that are late; not optimized as far, as that takes long."""
    if pytestconfig.getoption("--native-library") is not None:  # those are to be tested
        return native.library()
    flags = ("-DPTQ_DELAYS", "-O1")
    return native.open_library(build.build(native.cache_folder() / "delays", flags))


@pytest.fixture(scope="module")
def folders(make_model, tmp_path_factory):
    """Directories of a family: of a float model, and of one whose head is quantized as well."""

    def make(family: str, kind: str):
        folder = make_model(family, **TINY.get(family, {}))
        out = tmp_path_factory.mktemp(f"{family}-{kind}")
        return folder if kind == "float" else quantize_head(folder, out, of_head=kind).path

    return make


def some_requests(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of which some are echoed, and some go on for a few tokens."""
    return [
        (
            [rng.randrange(1, 384) for _ in range(length)],
            SamplingParams(
                max_tokens=1 + i % 2,
                ignore_eos=True,
                logprobs=0,
                prompt_logprobs=0 if i % 3 == 1 else None,
            ),
        )
        for i, length in enumerate(LENGTHS)
    ]


def answers(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[tuple]:
    """Tokens and log probabilities of each."""
    outputs = engine.generate(*map(list, zip(*requests, strict=True)))
    return [(list(o.token_ids), o.logprobs, o.prompt_logprobs) for o in outputs]


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("kind", ["float", "a8w8_dynamic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_late_threads_change_no_answer(
    folders, delayed, monkeypatch, with_threads, family, kind, threads
):
    """PTQ_LATE_PROMPTS in the environment asks for another number of prompts."""
    engine = engine_of(folders(family, kind), **SIZES)
    rng = random.Random(0)
    requests = some_requests(rng)
    rarer = [1 / (10 + length) for length in LENGTHS]
    wanted, done, wrong = answers(engine, requests), 0, 0
    monkeypatch.setattr(native, "library", lambda: delayed)
    with_threads(threads)
    while done < COUNT:
        some = rng.choices(range(len(requests)), rarer, k=rng.choice((1, 3, 12, 24)))
        found = answers(engine, [requests[i] for i in some])
        wrong += sum(one != wanted[i] for i, one in zip(some, found, strict=True))
        done += len(some)
    assert wrong == 0, f"{wrong} of {done} answers are wrong"
