"""An engine on several GPUs without one: its kernels interpreted, its ranks as processes that meet
through the host."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (it is in the `test` extra)")
from transformers import AutoTokenizer

from formats.checkpoint.read import Checkpoint
from inference.config import EngineConfig
from inference.engine import Engine
from inference.gpu.backend import TritonBackend
from inference.parallel.backend import FirstBackend
from inference.parallel.communication import Progress
from inference.parallel.part import device_store, join
from inference.requests.request import SamplingParams
from tests.adapters import write_adapter, write_prefix
from tests.inference.gpu.test_gpu import checkpoint_of, prompt
from tests.inference.parallel.host_ranks import host_loader
from tests.kernels.triton_lab import interpreted


def triton_backend(rank):
    """Of any rank."""
    return TritonBackend(torch.device("cpu"), torch.float16)


def engine_on(path, ranks):
    checkpoint = Checkpoint.open(path)
    config = EngineConfig(tensor_parallel=ranks, max_model_len=192, max_batch_size=4)
    backend = triton_backend(0)
    if ranks > 1:
        opened = partial(Checkpoint.open, path)
        backend = FirstBackend(backend, opened, config, triton_backend, loader=host_loader)
    return Engine(checkpoint, AutoTokenizer.from_pretrained(path), config, backend)


def test_what_nccl_reads_outlives_the_engines_folder(tmp_path):
    """Its monitor, without which the group does not end, waits for a file that is gone."""
    folder = tmp_path / "met"
    folder.mkdir()

    def meet(rank: int):
        spec = SimpleNamespace(rank=rank, ranks=2, meeting=str(folder / "meeting"))
        return device_store(join(spec, Progress()))

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(meet, (0, 1))
    second.set("key", "value")
    shutil.rmtree(folder)
    start = time.monotonic()
    assert first.get("key") == b"value"
    assert not first.check(["dump"])
    assert time.monotonic() - start < 2
    listening = Path("/proc/net/tcp").read_text() if Path("/proc/net/tcp").exists() else ""
    places = [line.split()[1] for line in listening.splitlines()[1:]]
    own = [place for place in places if int(place.split(":")[1], 16) == first.port]
    assert own or not listening
    assert all(place.startswith("0100007F") for place in own)  # nobody else's machine reaches it


ODD = {"hidden_size": 320, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.ci
@pytest.mark.parametrize("sizes", [{"head_dim": 64}, ODD | {"intermediate_size": 160}])
@interpreted
def test_two_ranks_give_what_one_gives(sizes, tmp_path):
    """Bit for bit; no part of the second is as wide as the integer kernel wants it."""
    path = checkpoint_of(tmp_path, "a8w8c8", **sizes)
    params, found = SamplingParams(max_tokens=3, ignore_eos=True), {}
    for ranks in (1, 2):
        engine = engine_on(path, ranks)
        outputs = engine.generate([prompt(5)], params)
        found[ranks] = [o.token_ids for o in outputs], engine.score(prompt(4, seed=2))
        engine.close()
    (tokens, logits), (wanted, expected) = found[2], found[1]
    assert expected.abs().max() > 0.5
    assert torch.equal(logits, expected)
    assert tokens == wanted


@pytest.mark.ci
@pytest.mark.parametrize(("preset", "head_dim"), [("a8w8c8", 64), ("w4", 32)])
@interpreted
def test_adapters(preset, head_dim, tmp_path):
    """Sums of integers have no place for what an adapter adds; sums of floats have, and w4's o reads
    the inputs of all ranks. The second adapter needs larger tables."""
    path = checkpoint_of(tmp_path, preset, head_dim=head_dim)
    few = write_adapter(tmp_path / "few", Path(path), 4, ("q_proj", "o_proj"), seed=1, scale=0.3)
    own = {"few": few, "all": write_adapter(tmp_path / "all", Path(path), 20, seed=2, scale=0.3)}
    own["prefix"] = write_prefix(tmp_path / "prefix", Path(path), 9)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    each, found = [params.model_copy(update={"adapter": a}) for a in (None, "all", "few")], {}
    for ranks in (1, 2):
        engine = engine_on(path, ranks)
        for name, folder in own.items():
            engine.load_adapter(name, folder)
        logits = [engine.score(prompt(9, seed=2), name) for name in (None, *own)]
        outputs = engine.generate([prompt(5 + i) for i in range(3)], each)
        found[ranks] = torch.stack(logits).float(), [o.token_ids for o in outputs]
        engine.close()
    (logits, tokens), (wanted, expected) = found[2], found[1]
    assert (wanted[1:] - wanted[0]).norm(dim=(1, 2)).min() > 0.2 * wanted[0].norm()
    assert (logits - wanted).norm() / wanted.norm() < 0.01
    assert tokens == expected
