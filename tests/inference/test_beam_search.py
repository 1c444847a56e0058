"""Beam search: the hypotheses and scores of transformers, and no block of the cache lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from inference.beam_search import BeamParams, Hypothesis, beam_search
from inference.scheduling.step_result import StepResult

MODES = [True, False, "never"]


class LogitsEngine:
    """Holds requests as the engine does, on a function from tokens to log probabilities."""

    def __init__(self, logprobs, ends=()):
        self._logprobs, self.end_tokens, self.held = logprobs, frozenset(ends), {}

    def hold(self, prompt, *, top, beams, max_tokens, stop_token_ids, request_id):
        self._top = top
        name = request_id or f"request-{len(self.held)}"
        self.held[name] = list(prompt)
        self.fresh = {name}
        return SimpleNamespace(name=name, max_tokens=max_tokens)

    def fork(self, name, new_name, token):
        assert new_name not in self.held
        assert name not in self.fresh  # as it was when its candidates were told
        self.held[new_name] = [*self.held[name], token]
        self.fresh.add(new_name)

    def extend(self, name, token):
        self.held[name].append(token)
        self.fresh.add(name)

    def abort(self, name):
        del self.held[name]

    def advance(self):
        told, self.fresh = self.fresh, set()
        return StepResult(candidates={name: self._likeliest(self.held[name]) for name in told})

    def _likeliest(self, tokens):
        found = self._logprobs(tokens)
        values, index = found.topk(min(self._top, len(found)))
        return dict(zip(index.tolist(), values.tolist(), strict=True))


@pytest.fixture(scope="module")
def model(tiny_llama):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def logprobs(model):
    """Log probabilities behind tokens, of a model that is flat enough for hypotheses to compete."""
    known = {}

    @torch.no_grad()
    def of(tokens):
        if tuple(tokens) not in known:
            logits = model(torch.tensor([tokens])).logits[0, -1]
            known[tuple(tokens)] = torch.log_softmax(logits, dim=-1)
        return known[tuple(tokens)]

    return of


def theirs(model, prompt, params: BeamParams, ends) -> list[tuple[list[int], float]]:
    """Continuations and scores of transformers, padding removed."""
    made = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=sorted(ends) or None,
        pad_token_id=next(iter(sorted(ends)), 0),
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for row, used, score in zip(
        made.sequences, made.beam_indices, made.sequences_scores, strict=True
    ):
        length = int((used >= 0).sum())
        found.append((row[len(prompt) :][:length].tolist(), score.item()))
    return found


def assert_same(own: list[Hypothesis], other: list[tuple[list[int], float]]) -> None:
    assert [list(h.token_ids) for h in own] == [tokens for tokens, _ in other]
    assert [h.score for h in own] == pytest.approx([s for _, s in other], rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("early_stopping", MODES)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_hypotheses_and_scores_are_those_of_transformers(model, logprobs, width, early_stopping):
    prompt = [5, 6, 7]
    likely = logprobs(prompt).topk(40).indices.tolist()
    reasons = set()
    for ends in ([likely[1]], likely[3:40:6], []):  # one end token, several, none
        model.generation_config.eos_token_id = ends or None
        for penalty in (-1.0, 0.0, 1.0, 2.5):
            params = BeamParams(
                beam_width=width, n=width, max_tokens=12,
                length_penalty=penalty, early_stopping=early_stopping,
            )  # fmt: skip
            own = beam_search(engine := LogitsEngine(logprobs, ends), [prompt], params)[0]
            assert_same(own, theirs(model, prompt, params, ends))
            assert not engine.held
            reasons |= {h.finish_reason for h in own}
    assert reasons == {"stop", "length"}
