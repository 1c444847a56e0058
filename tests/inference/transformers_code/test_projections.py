"""Linear layers of modules that keep a state: once a step, with the bits that each piece has alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from formats.errors import CheckpointError
from inference.transformers_code.linear import Projections
from inference.transformers_code.state import Stateful
from tests.inference.transformers_code.test_states import engine_of, ids_of, write_small


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2", "mamba2", "jamba"])
def test_what_reads_or_makes_a_step_runs_once(tmp_path, kind, monkeypatch):
    """Not what is between (Jamba's x_proj), which sees pieces, or single tokens."""
    engine, ids = engine_of(write_small(kind, tmp_path), max_batched_tokens=512), ids_of(130)
    mixers = [part for part in engine.model.module.modules() if isinstance(part, Stateful)]
    calls, rows = Counter[str](), Counter[str]()
    for own in (own for mixer in mixers for own in mixer.projections._names):
        name = own._owner._names[own]

        def note(_, args, name=name):
            calls[name] += 1
            rows[name] += args[0].numel() // args[0].shape[-1]

        own.layer.register_forward_pre_hook(note)
    found = engine.score(ids)
    between = {"x_proj"} if kind == "jamba" else set()
    assert set(rows.values()) == {130 * len(mixers)}
    assert {n for n, count in calls.items() if count > len(mixers)} == between
    assert all(mixer.projections.last in ("out_proj", "o_proj") for mixer in mixers)
    computed = Projections.computed  # each piece by itself

    def alone(self, own, x):
        return computed(self, own, x) if self._step is None else own.layer(x)

    monkeypatch.setattr(Projections, "computed", alone)
    assert torch.equal(engine.score(ids), found)


def test_code_that_changes_what_a_layer_gives_for_some_tokens_is_refused(tmp_path):
    engine = engine_of(write_small("lfm2", tmp_path), max_batched_tokens=512)
    mixer = next(part for part in engine.model.module.modules() if isinstance(part, Stateful))
    forward = mixer.mixer.forward
    mixer.mixer.forward = lambda *args, **given: forward(*args, **given) * 2
    with pytest.raises(CheckpointError, match="changes what its layer out_proj gives"):
        engine.score(ids_of(130))
