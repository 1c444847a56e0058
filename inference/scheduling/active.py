"""The requests of an engine, from their arrival to their end, and whose blocks come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

from formats.errors import EngineEndedError, EngineError, RequestError
from inference.requests.request import FinishReason, Logprobs, RequestOutput
from inference.scheduling.active_request import ActiveRequest
from inference.scheduling.blocks import BlockChanges
from inference.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from inference.structured.compiler import MakeMatcher

PATIENCE = 0.005  # seconds for which an idle engine waits for a constraint to be compiled


class ActiveRequests(Mapping[str, ActiveRequest]):
    """The requests of an engine, by name, from their arrival to their end.

    Args:
        scheduler: Has their sequences.
        change_blocks: Copies and clears blocks of the cache.

    Attributes:
        candidates: Of held requests that wait for their next token, the likeliest, by name.
    """

    def __init__(self, scheduler: Scheduler, change_blocks: Callable[[BlockChanges], None]) -> None:
        self._scheduler, self._change_blocks = scheduler, change_blocks
        self._by_name: dict[str, ActiveRequest] = {}
        self.candidates: dict[str, Logprobs] = {}
        self._uncompiled: dict[str, Future[MakeMatcher]] = {}

    def __getitem__(self, name: str) -> ActiveRequest:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def at(self, place: int) -> ActiveRequest:
        """The request in a slot of the running batch."""
        return self._by_name[self._scheduler.batch.names[place]]

    def add(self, request: ActiveRequest, compiled: Future[MakeMatcher] | None = None) -> None:
        """Queue a request; one that has a constraint when that is compiled."""
        self._by_name[request.sequence.name] = request
        if compiled is None:
            self._scheduler.add(request.sequence)
        else:
            self._uncompiled[request.sequence.name] = compiled

    def admit_compiled(self) -> list[RequestOutput]:
        """Queue the requests whose constraints are compiled by now; gives those that are refused.

        Where there is nothing else to do it waits a little.
        """
        if not self._uncompiled:
            return []
        busy = self._scheduler.waiting or self._scheduler.running
        wait(self._uncompiled.values(), 0 if busy else PATIENCE, FIRST_COMPLETED)
        refused = []
        for name in [name for name, future in self._uncompiled.items() if future.done()]:
            request = self[name]
            try:
                request.matcher = self._uncompiled[name].result()(request.params.stop_token_ids)
            except RequestError as error:
                refused.append(self.finish(request, "error", str(error), error.param))
            else:
                del self._uncompiled[name]
                self._scheduler.add(request.sequence)
        return refused

    def prepare_cache(self) -> None:
        """Copy and clear the blocks of the cache that the next step needs so; before it runs."""
        changes = self._scheduler.blocks.take_changes()
        if changes is None:
            return
        try:
            self._change_blocks(changes)
        except EngineEndedError:
            raise
        except Exception as error:  # no second try: what was copied may be overwritten
            raise EngineError(f"blocks of the cache could not be copied: {error}") from error

    def fork(self, request: ActiveRequest, name: str, token: int) -> None:
        """Begin a held request with the tokens of another and one more; it shares their blocks."""
        other = self._by_name[name] = request.fork(name, token)
        self._scheduler.fork(request.sequence, other.sequence)

    def take_candidates(self) -> dict[str, Logprobs]:
        """What held requests may go on with: {token: log probability}; given once."""
        found, self.candidates = self.candidates, {}
        return found

    def finish(
        self,
        request: ActiveRequest,
        reason: FinishReason,
        error: str | None = None,
        param: str | None = None,
    ) -> RequestOutput:
        """End a request and take its blocks back; `error` says why where the reason is that."""
        if self._uncompiled.pop(request.sequence.name, None) is None:
            self._scheduler.remove(request.sequence, failed=reason == "error")
        del self._by_name[request.sequence.name]
        self.candidates.pop(request.sequence.name, None)
        drafter = self._scheduler.drafter
        if drafter is not None and reason != "error":
            drafter.note_end([*request.prompt, *request.tokens], len(request.prompt))
        return request.close(reason, error, param)

    def ask_for_less(self, error: Exception) -> list[RequestOutput]:
        """After a step for which memory was too small, make those to come smaller.

        First of fewer tokens; where each has one at most, of fewer requests. Gives those that had
        to end: the newest half of what runs.
        """
        scheduler = self._scheduler
        if scheduler.max_batched_tokens > scheduler.max_batch_size:
            half = scheduler.max_batched_tokens // 2
            scheduler.max_batched_tokens = max(half, scheduler.max_batch_size)
            return []
        reason = f"memory was too small for a step ({error}); older requests went on"
        newest = sorted(scheduler.running, key=lambda sequence: sequence.order)
        newest = newest[-max(1, len(newest) // 2) :]
        return [self.finish(self[sequence.name], "error", reason) for sequence in newest]

    def drop(self) -> None:
        """Forget all of them, and whatever is cached, after a step that failed."""
        for name, request in self._by_name.items():
            if name not in self._uncompiled:
                self._scheduler.remove(request.sequence, failed=True)
        self._uncompiled.clear()
        self._scheduler.blocks.forget()
        self._by_name.clear()
        self.candidates.clear()
