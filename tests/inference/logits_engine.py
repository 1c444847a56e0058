"""An engine for beam searches that is a function from tokens to log probabilities."""

from types import SimpleNamespace

from inference.requests.request import StepResult


class LogitsEngine:
    """Holds requests as the engine does, on a function from tokens to log probabilities."""

    def __init__(self, logprobs, ends=()):
        self._logprobs, self.end_tokens, self.held = logprobs, frozenset(ends), {}

    def hold(self, prompt, *, top, beams, max_tokens, stop_token_ids, request_id, adapter):
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

    @property
    def has_unfinished(self):
        return bool(self.held)

    def advance(self):
        told, self.fresh = self.fresh, set()
        return StepResult(candidates={name: self._likeliest(self.held[name]) for name in told})

    def _likeliest(self, tokens):
        found = self._logprobs(tokens)
        values, index = found.topk(min(self._top, len(found)))
        return dict(zip(index.tolist(), values.tolist(), strict=True))
