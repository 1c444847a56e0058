"""Damaged checkpoints end in the undamaged one's tokens or in one clear error, and never hang.

    pytest tests/fault/test_damage.py                                   300 cases, some seconds
    python -m tests.fault.test_damage --cases 20000 --seed 1            as many as one likes

Every case is a checkpoint with one to three damages (`tests.fault.damage`), opened with
`verify=True`, loaded and asked for a few tokens, in one of three states:

    listed      the manifest is as it was written: what differs from it must be told
    unlisted    config.json and the folder name no manifest, as other software writes them
    rewritten   the manifest is that of the damaged files: as faulty software would write it

In the last two a change that is no fault by itself, such as another eps, has other tokens.
"""

import argparse
import hashlib
import json
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, EngineError, PTQError, RequestError
from inference.config import EngineConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from tests.conftest import write_model, write_quantized
from tests.fault.damage import damage

CASES = 300
SECONDS = 20  # of one case; a usual one takes some hundredths
STATES = ("listed", "unlisted", "rewritten")
SIZES = EngineConfig(max_batch_size=1, max_model_len=64)
PARAMS = SamplingParams(max_tokens=3)


class Hang(BaseException):
    """A case took too long."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise `Hang` when a case takes longer."""

    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tokens_of(folder: Path) -> tuple[int, ...] | None:
    """The tokens that a checkpoint answers with; None where it tells that they are none."""
    Checkpoint.open(folder, verify=True)
    output = Engine.from_pretrained(folder, config=SIZES).generate(["def add"], PARAMS)[0]
    return None if output.finish_reason == "error" else tuple(output.token_ids)


def set_state(folder: Path, state: str) -> None:
    """Leave, remove or rewrite the manifest of a damaged folder."""
    manifest = folder / "quant" / "manifest.json"
    if state == "listed" or not manifest.is_file() or manifest.is_symlink():
        return
    manifest.unlink()
    if state == "rewritten":
        files = [path for path in folder.rglob("*") if path.is_file()]
        rows = {
            path.relative_to(folder).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in files
            if not path.is_symlink()
        }
        manifest.write_text(json.dumps({"files": rows}))


def run_case(base: Path, expected: tuple[int, ...], folder: Path, random: Random) -> str:
    """Damage a copy of a checkpoint and open it; says what came of it.

    Returns:
        `same`, `other` tokens, the type of the error that told, or a fault: `silent`, `hang`, or
        a traceback.
    """
    shutil.copytree(base, folder)
    state = random.choice(STATES)
    done = [damage(folder, random) for _ in range(random.choice([1, 1, 1, 2, 3]))]
    if state == "unlisted":
        _forget(folder)
    set_state(folder, state)
    label = f"{state}; {'; '.join(done)}"
    try:
        with limited(SECONDS):
            found = tokens_of(folder)
    except Hang:
        return f"FAULT hang: {label}"
    except (CheckpointError, RequestError) as error:
        return type(error).__name__
    except EngineError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, PTQError) or "hold NaN or infinity" in str(cause):
            return "EngineError"
        return f"FAULT {error} <- {_place(cause)}: {label}"
    except Exception as error:
        return f"FAULT {type(error).__name__}: {str(error)[:200]} <- {_place(error)}: {label}"
    if found is None:
        return "told by the request"
    if found == expected:
        return "same tokens"
    return f"FAULT silent: {label}" if state == "listed" else "other tokens"


def _forget(folder: Path) -> None:
    """Take out of config.json that the checkpoint was written here."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes()) if path.is_file() and not path.is_symlink() else None
    except (ValueError, RecursionError):
        return
    if isinstance(config, dict):
        config.pop("ptq", None)
        path.write_text(json.dumps(config))


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f"{Path(f.filename).name}:{f.lineno}" for f in frames if "site-packages" not in f.filename
    ]
    return " > ".join(own[-3:])


def run_cases(bases: list[Path], cases: int, seed: int) -> Counter[str]:
    """Run cases in turn over some checkpoints; counts what came of them, faults in full."""
    torch.manual_seed(0)
    expected = [tokens_of(base) for base in bases]
    assert all(expected)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as work:
        for case in range(cases):
            i, place = case % len(bases), Path(work) / "case"
            place.mkdir()
            result = run_case(
                bases[i], expected[i] or (), place / "model", Random(f"{seed} {case}")
            )
            found[result] += 1
            if result.startswith("FAULT"):
                print(f"case {case}: {result}", flush=True)
            shutil.rmtree(place)
            if sys.stdout.isatty() or (case + 1) % 1000 == 0:
                print(f"{case + 1} cases: {dict(found.most_common(6))}", flush=True)
    return found


def test_damage_is_told_or_harms_nothing(make_quantized, tiny_llama, tmp_path):
    sharded = write_quantized(tiny_llama, tmp_path / "sharded", shard_bytes=100_000)
    found = run_cases([make_quantized(tiny_llama), sharded], CASES, seed=0)
    assert not [result for result in found if result.startswith("FAULT")]
    assert found["CheckpointError"] > CASES // 2
    assert found["same tokens"] > 0


def main() -> int:
    """Run many cases over several schemes and families; 1 where there were faults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        bases = []
        for family, preset in [
            *(("llama", "a8w8c8"), ("llama", "w4c8"), ("qwen3", "fp8_c8"), ("llama", "c8")),
            *(("phi3", "a8w4"), ("llama", "a8w8"), ("mixtral", "a8w8c8")),
        ]:
            model = Path(work) / f"{family}-model"
            if not model.exists():
                write_model(model, family)
            out = Path(work) / f"{family}-{preset}"
            bases.append(write_quantized(model, out, preset, shard_bytes=100_000))
        found = run_cases(bases, arguments.cases, arguments.seed)
    for result, count in found.most_common():
        print(f"{count:6} {result}")
    return any(result.startswith("FAULT") for result in found)


if __name__ == "__main__":
    raise SystemExit(main())
