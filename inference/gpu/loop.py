"""The engine's steps where tokens are chosen on the device.

    launch step n + 1  ->  wait for step n  ->  tell its tokens

The device is given the next step before the host knows the tokens of the last one, so that it never
waits for the host. A sequence that turns out to have ended has then one row too many on its way; it
is dropped when it arrives. Whenever the next step depends on more than where tokens go (blocks run
short, a request's next token is chosen on the host, or from those that its constraint allows, or
drafts are made, which follow known tokens), the step on its way is waited for first; and so is a
step of drafts, since where tokens go next depends on how many of them are accepted: all else of
the step that follows is planned and written while it runs (`Prepared`). Who waits for a place is
admitted with what is free by then: a step later than it could be, at the most. A step of many
tokens of prompts is waited for, too, and so is any of prompts while others are expected beside a
long one, so that who arrives meanwhile is in the next.
"""

from __future__ import annotations

import time

import numpy as np
from torch import Tensor

from inference.gpu.runner import GpuRunner, Launched, Prepared
from inference.models.adapters import AdapterStore
from inference.requests.request import StepResult
from inference.scheduling.acceptance import Acceptance
from inference.scheduling.active import ActiveRequests
from inference.scheduling.batch import Bools, Ints
from inference.scheduling.work import Work

LONG = 768  # tokens of prompts; launching a step takes a small part of the time of so many
WARM_DRAFTS = 4  # of a sequence: for so many steps are captured at the start
MOST_WARM = 256  # decodes and drafts of such a step


class DeviceLoop:
    """Steps of an engine.

    Args:
        runner: Runs them.
        requests: Those that live, and what schedules them.
        ahead: Launch steps before the tokens of the last are known.

    Attributes:
        runner: Runs them.
        waited: Seconds for which the host has waited for the device.
    """

    def __init__(self, runner: GpuRunner, requests: ActiveRequests, *, ahead: bool = True) -> None:
        self.runner, self._scheduler, self._requests = runner, requests.scheduler, requests
        self._acceptance = Acceptance(requests)
        self._ahead, self.waited = ahead, 0.0
        self._on_its_way: Launched | None = None
        self._waiting = StepResult()  # the result of a step that is returned with the next
        self._collected = 0.0  # when the last step was there

    def step(self) -> StepResult:
        """Launch a step, and tell the tokens of the one before it."""
        if (repeated := self._repeated()) is not None:
            result, self._on_its_way = self.settle(), repeated
            return result
        ahead = self._look_ahead()
        result = StepResult() if self._may_run_ahead() else self.settle()
        drafted = self._scheduler.wants_drafts
        if result and not drafted:
            return result  # the next step is another one now
        work = self._scheduler.schedule(ahead.work if ahead and drafted else None)
        if not len(work):
            result += self.settle()
            return result
        self._waiting = result  # is returned even where launching fails
        launched = self._launch(work, ahead if ahead and ahead.is_like(work) else None)
        if drafted:  # what the host did since the last step no device's time hides
            launched.at = self._collected
        result = self.settle()
        self._on_its_way = launched
        return result if result or drafted or self._may_run_ahead() else self.settle()

    def settle(self) -> StepResult:
        """Wait for the step on its way and tell its tokens."""
        launched, self._on_its_way = self._on_its_way, None
        waiting, self._waiting = self._waiting, StepResult()
        if launched is None:
            return waiting
        start = time.perf_counter()
        tokens, work = launched.tokens(), launched.work
        now = time.perf_counter()
        self.waited += now - start
        self._scheduler.note_time(work, now - max(self._collected, launched.at))
        self._collected = now
        alive, result = work.alive(), waiting  # others have ended since
        spoiled = alive & _spoiled_by_drafts(launched, tokens)
        alive &= ~spoiled
        drafter = self._scheduler.drafter
        if launched.hidden and drafter is not None:
            drafter.proposer.note_hidden(work.taken(alive))
        if work.plain:
            result += self._acceptance.take_tokens(work.places[alive], tokens[alive], {})
            return result
        device = np.flatnonzero(alive & work.samples & ~work.host)
        logprobs, firsts = launched.logprobs(), launched.firsts
        result += self._acceptance.take_chosen(work, device, firsts[device], tokens, logprobs)
        read = np.flatnonzero(alive & work.host & (work.rows > 0))
        if len(read):
            result += self._acceptance.take_logits(work, read, launched.logits_of(read))
        for place in work.places[spoiled].tolist():
            self._scheduler.recompute(place)
        return result

    def score(self, work: Work) -> Tensor:
        """Logits of the tokens of a sequence that is run apart, fp32 [tokens, vocabulary], on the
        device."""
        return self.runner.score(work)

    def warm_up(self) -> None:
        """Compile and capture the steps of decodes, of prompts and of both.

        Raises:
            EngineError: memory is too small for them.
        """
        scheduler = self._scheduler
        sequences, rows = scheduler.max_batch_size, 0
        if scheduler.drafter is not None:
            rows = min(sequences * (1 + WARM_DRAFTS), MOST_WARM)
            self.runner.executor.tell_hidden(scheduler.drafter.proposer.reads)
        self._warm(sequences, scheduler.max_batched_tokens, rows)
        if scheduler.drafter is not None:
            scheduler.drafter.learn_times(self.runner.graphs.times)

    def replay(self, sequences: int, times: int) -> None:
        """Launch the graph of a step of so many decodes again and again, for measurements."""
        self.runner.executor.replay(sequences, times)

    def adapters(self) -> AdapterStore:
        """`StepExecutor.adapters`."""
        return self.runner.executor.adapters()

    def drop(self) -> None:
        """Forget the step on its way."""
        self._on_its_way, self._waiting = None, StepResult()

    def _warm(self, sequences: int, tokens: int, rows: int) -> None:
        self.runner.warm_up(sequences, tokens, rows)

    def _repeated(self) -> Launched | None:
        """Launch the step after one that is on its way where it is the same, each token one further
        on; None where it has to be planned."""
        now = self._on_its_way
        if now is None or not self._ahead:
            return None
        work = self._scheduler.repeat(now.work)
        return None if work is None else self._launch(work, now.step)

    def _may_run_ahead(self) -> bool:
        """Whether the next step is known without the tokens of the last, but for their ids."""
        scheduler, now = self._scheduler, self._on_its_way
        long = 0 if scheduler.prefill.hurried else LONG
        if now is not None and (now.work.drafts.any() or now.work.prompt_tokens > long):
            return False
        if now is not None and scheduler.wants_drafts:  # (without one, all tokens are known)
            return False
        order, batch = scheduler.order, scheduler.batch
        masked = batch.terms.masked[order]  # a mask needs the token before it
        free = batch.on_device(order) & ~masked
        return self._ahead and bool(free.all()) and scheduler.unhindered

    def _look_ahead(self) -> Prepared | None:
        """Plan the step after a step of drafts while the device computes that."""
        now = self._on_its_way
        if now is None or not self._ahead or not now.work.drafts.any() or now.done:
            return None
        work = self._scheduler.look_ahead(now.work)
        return None if work is None else self.runner.prepare(work)

    def _launch(self, work: Work, prepared: Prepared | None = None) -> Launched:
        self._requests.prepare_cache()
        drafter = self._scheduler.drafter
        reads = None if drafter is None else drafter.proposer.reads
        self.runner.executor.tell_hidden(reads)
        launched = self.runner.launch(work, prepared)
        launched.hidden = reads is not None
        self._scheduler.advance(work)
        on_its_way = work.samples & ~work.host & (work.drafts == 0)
        self._scheduler.batch.expect(work.places[on_its_way])
        return launched


def _spoiled_by_drafts(launched: Launched, tokens: Ints) -> Bools:
    """Which slices have drafts and a row whose logits are not finite.

    The V of a wrong draft need not be finite, and attention multiplies what is after a sequence's
    last token by 0: 0 times NaN is NaN. What comes without drafts is found by computing the
    sequence again.
    """
    drafts = launched.work.drafts
    spoiled = np.zeros(len(drafts), np.bool_)
    if drafts.any() and (tokens < 0).any():
        firsts = launched.firsts
        for i in np.flatnonzero(drafts).tolist():
            spoiled[i] = (tokens[firsts[i] : firsts[i] + drafts[i] + 1] < 0).any()
    return spoiled
