"""Which tokens running requests gain from a step, and who ends by them."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from inference.requests.request import StepResult
from inference.scheduling.active import ActiveRequest, ActiveRequests
from inference.scheduling.batch import Bools, Ints
from inference.scheduling.sampler import likeliest, top_logprobs
from inference.scheduling.work import Work

NOT_FINITE = "the model's logits hold NaN or infinity; check the checkpoint"
PlaceLogprobs = dict[int, dict[int, float]]  # log probabilities by place


class Acceptance:
    """Gives running requests the tokens of a step.

    Args:
        requests: Those that live.
    """

    def __init__(self, requests: ActiveRequests) -> None:
        self._requests, self._scheduler = requests, requests.scheduler

    def take_tokens(
        self, places: Ints, tokens: Ints, logprobs: PlaceLogprobs, now: float | None = None
    ) -> StepResult:
        """Give running requests their next tokens.

        Args:
            places: Whose.
            tokens: The token of each; negative where its logits were not finite.
            logprobs: By place, the log probabilities of those that want them.
            now: Seconds at which the tokens were there; default: now.
        """
        finite = tokens >= 0
        result = StepResult()
        if not finite.all():
            result.finished += [
                self._requests.finish(self._requests.at(place), "error", NOT_FINITE)
                for place in places[~finite].tolist()
            ]
            places, tokens = places[finite], tokens[finite]
        batch = self._scheduler.batch
        for place in places[batch.terms.logprobs[places] >= 0].tolist():
            result.logprobs.append((batch.names[place], logprobs[place]))
            self._requests.at(place).note_logprobs(logprobs[place])
        watched = batch.take(places, tokens, time.perf_counter() if now is None else now)
        result.names = [batch.names[place] for place in places.tolist()]
        result.tokens = tokens.tolist()
        for name in compress(result.names, watched.tolist()):
            self._look_at(self._requests[name], result)
        return result

    def take_chosen(
        self, work: Work, which: Ints, firsts: Ints, tokens: Ints, logprobs: PlaceLogprobs
    ) -> StepResult:
        """Give requests what a device chose for their slices.

        Where a slice has drafts there is a token after each of its rows; those count whose row is
        that of the last token or of an accepted draft.

        Args:
            which: Indices of slices of it.
            firsts: The row of each one's last token; those of its drafts follow.
            tokens: The token chosen after each row; negative where logits were not finite.
            logprobs: By row, the log probabilities of those that want them.
        """

        def choose(places: Ints, rows: Ints) -> tuple[Ints, PlaceLogprobs]:
            own = zip(places.tolist(), rows.tolist(), strict=True)
            return tokens[rows], {place: logprobs[row] for place, row in own if row in logprobs}

        result, now, all_ = StepResult(), time.perf_counter(), np.ones(len(which), np.bool_)
        served, accepted = self._take_plain(work, which, firsts, all_, tokens, now, result)
        if not served.all():
            rest = ~served
            accepted[rest] = self._take_rows(work, which[rest], firsts[rest], choose, result, now)
        self._note_accepted(work, which, accepted, result)
        return result

    def take_logits(self, work: Work, which: Ints, logits: Tensor) -> StepResult:
        """Give requests the logits of their slices: for their prompts, and for their next tokens.

        Where a slice has drafts, tokens are chosen row by row as if each row were a step of its
        own, as long as the token is the draft whose row comes next: no token depends on drafts.

        Args:
            which: Indices of slices of it, each with at least one row of logits.
            logits: fp32 [rows, vocabulary], on the host: the rows of each slice, in that order.
        """
        places, counts, drafts = work.places[which], work.rows[which], work.drafts[which]
        ends, batch = np.cumsum(counts), self._scheduler.batch
        finite = np.logical_and.reduce(np.isfinite(logits.numpy()), axis=1)
        firsts = ends - 1 - drafts  # the row of each one's next token
        sound = finite[firsts]
        for i in np.flatnonzero(work.whole[which]).tolist():
            rows = slice(ends[i] - counts[i], ends[i])
            sound[i] = finite[rows].all()
            if sound[i]:
                self._requests.at(int(places[i])).note_prompt(
                    int(work.starts[which[i]]), logits[rows]
                )
        takes = sound & work.samples[which]
        for i in np.flatnonzero(takes & batch.held_by_client[places]).tolist():
            request, takes[i] = self._requests.at(int(places[i])), False
            assert request.candidates is not None
            self._requests.candidates[request.sequence.name] = likeliest(
                logits[firsts[i]], request.candidates
            )
        result = self.take_tokens(places[~sound], np.full(np.count_nonzero(~sound), -1), {})
        likely = np.where(finite, _likeliest_of(logits, counts, drafts), -1)
        now = time.perf_counter()
        plain = takes & batch.terms.greedy[places] & batch.on_device(places)
        served, accepted = self._take_plain(work, which, firsts, plain, likely, now, result)

        def choose(own: Ints, rows: Ints) -> tuple[Ints, PlaceLogprobs]:
            tokens, ok = np.full(len(own), -1), finite[rows]
            tokens[ok], logprobs = self._choose(own[ok], logits, rows[ok], likely[rows[ok]])
            return tokens, logprobs

        rest = takes & ~served
        accepted[rest] = self._take_rows(work, which[rest], firsts[rest], choose, result, now)
        self._note_accepted(work, which[takes], accepted[takes], result)
        return result

    def _take_rows(
        self,
        work: Work,
        which: Ints,
        firsts: Ints,
        choose: Callable[[Ints, Ints], tuple[Ints, PlaceLogprobs]],
        result: StepResult,
        now: float,
    ) -> Ints:
        """Give requests the tokens of their rows, one by one, as long as they are the drafts.

        Args:
            which: Indices of slices of it.
            firsts: The row of each one's last token; those of its drafts follow.
            choose: The tokens of places from a row each, and their log probabilities, by place.
            result: What the step gave; it takes the tokens.
            now: Seconds at which the tokens were there.

        Returns:
            How many drafts of each were accepted.
        """
        places, drafts, batch = work.places[which], work.drafts[which], self._scheduler.batch
        accepted, going = np.zeros(len(which), np.int64), np.arange(len(which))
        while len(going):
            own = places[going]
            tokens, logprobs = choose(own, firsts[going] + accepted[going])
            expected = batch.ids[own, batch.known[own]]  # overwritten by what comes
            result += self.take_tokens(own, tokens, logprobs, now)
            right = (accepted[going] < drafts[going]) & (tokens == expected)
            accepted[going] += right
            alive = batch.serial[own] == work.serials[which[going]]
            going = going[right & alive]
            batch.computed[places[going]] += 1  # the draft's K and V are the token's
        return accepted

    def _note_accepted(self, work: Work, which: Ints, accepted: Ints, result: StepResult) -> None:
        """Note how many drafts of some slices were accepted, in the result and for who drafts."""
        drafter, some = self._scheduler.drafter, work.drafts[which] > 0
        if drafter is None or not some.any():
            return
        batch, which, accepted = self._scheduler.batch, which[some], accepted[some]
        drafter.note_accepted(batch, work, which, accepted)
        if batch.states is not None:
            for place in work.places[which].tolist():
                batch.states.go_back(place, int(batch.computed[place]))
        names = [batch.names[place] for place in work.places[which].tolist()]
        counts = work.drafts[which].tolist(), accepted.tolist()
        result.drafts += zip(names, *counts, strict=True)

    def _take_plain(
        self,
        work: Work,
        which: Ints,
        firsts: Ints,
        among: Bools,
        chosen: Ints,
        now: float,
        result: StepResult,
    ) -> tuple[Bools, Ints]:
        """Give requests that want no log probabilities and watch no token all their tokens.

        Args:
            which: Indices of slices of it.
            firsts: The row of each one's last token; those of its drafts follow.
            among: Those whose tokens are what `chosen` says.
            chosen: The token that comes after each row; negative where logits are not finite.
            now: Seconds at which the tokens were there.
            result: What the step gave; it takes the tokens.

        Returns:
            Who was given tokens, and how many drafts of each were accepted.
        """
        places, drafts, batch = work.places[which], work.drafts[which], self._scheduler.batch
        plain = among & ~batch.terms.watched[places] & (batch.terms.logprobs[places] < 0)
        own, count = places[:, None], np.where(plain, drafts, 0)
        column = np.arange(count.max(initial=0) + 1)
        at = np.minimum(column, count[:, None])  # those after the last draft repeat it
        tokens = chosen[firsts[:, None] + at]
        drafted = batch.ids[own, batch.known[own] + at]
        ended = (tokens[:, :, None] == batch.terms.ends[own]).any(axis=2)
        right = (column < count[:, None]) & (tokens == drafted)
        others = np.cumprod(right & ~ended, axis=1).sum(axis=1)  # tokens after which one comes
        gained = column <= others[:, None]
        served = plain & ~(gained & (tokens < 0)).any(axis=1)
        accepted = np.where(served, others + right[np.arange(len(right)), others], 0)
        gained &= served[:, None]
        takers, counts, flat = places[served], others[served] + 1, tokens[gained]
        looked_at = (
            batch.take_several(takers, counts, flat, now) | ended[gained][np.cumsum(counts) - 1]
        )
        names = [batch.names[place] for place in np.repeat(takers, counts).tolist()]
        result.names += names
        result.tokens += flat.tolist()
        for place in takers[looked_at].tolist():
            self._look_at(self._requests.at(place), result)
        return served, accepted

    def _choose(
        self, places: Ints, logits: Tensor, rows: Ints, likely: Ints
    ) -> tuple[Ints, PlaceLogprobs]:
        """The next tokens of requests from a row of logits each, and their log probabilities.

        Args:
            places: Whose.
            logits: fp32 [R, vocabulary].
            rows: The row of each.
            likely: The token with the largest logit there.
        """
        batch, tokens = self._scheduler.batch, likely.copy()
        for i in np.flatnonzero(~(batch.terms.greedy[places] & batch.on_device(places))).tolist():
            tokens[i] = self._requests.at(int(places[i])).choose(logits[rows[i]])
        logprobs: PlaceLogprobs = {}
        counts = batch.terms.logprobs[places]
        for count in set(counts[counts >= 0].tolist()):
            own = np.flatnonzero(counts == count)
            found = top_logprobs(logits[torch.from_numpy(rows[own])], tokens[own].tolist(), count)
            logprobs |= zip(places[own].tolist(), found, strict=True)
        return tokens, logprobs

    def _look_at(self, request: ActiveRequest, result: StepResult) -> None:
        """See whether a request that has a new token ends, and note it in the result."""
        if request.prompt_logprobs is not None and len(request.tokens) == 1:
            result.prompt_logprobs[request.sequence.name] = request.prompt_logprobs
        if reason := request.ending():
            fault = "no token goes on with what its constraint asks" if reason == "error" else None
            result.finished.append(self._requests.finish(request, reason, fault))


def _likeliest_of(logits: Tensor, counts: Ints, drafts: Ints) -> Ints:
    """The token with the largest logit in each row from which one may be chosen, else -1.

    Args:
        logits: fp32 [R, vocabulary].
        counts: Rows of each slice; of those, all before the next token's are of a prompt.
        drafts: Rows of each after the next token's.
    """
    before = np.cumsum(counts) - counts
    rows = np.flatnonzero(np.arange(len(logits)) >= np.repeat(before + counts - 1 - drafts, counts))
    found, values = np.full(len(logits), -1), logits.numpy()
    found[rows] = (values if len(rows) == len(values) else values[rows]).argmax(axis=1)
    return found
