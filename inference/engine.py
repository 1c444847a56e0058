"""The engine: continuous batching over a paged cache.

    step() = schedule -> run -> postprocess

Requests join and leave between steps. What one of them gets does not depend on the others: every op
returns a row with the same bits in any batch (`kernels.ops`), and random numbers are a request's
own. On a GPU tokens are chosen there and steps overlap (`inference.gpu.loop`); sums are cut by the
number of rows, so that there a row may differ in its last bits from one size of batch to another.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from itertools import count
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from formats.chat_template import text_tokens
from formats.checkpoint.read import Checkpoint
from formats.errors import EngineError, PTQError, RequestError
from formats.gguf.locate import locate_model
from formats.tokenizer import end_tokens, load_tokenizer
from inference.adapters import Adapters
from inference.backend import Backend, choose_backend, require_device
from inference.config import EngineConfig
from inference.models.kv_cache import CacheShape
from inference.models.model import Model
from inference.parallel.backend import choose_ranks
from inference.proposers import Proposer, draft_methods, require_method
from inference.requests.request import (
    RequestOutput,
    SamplingParams,
    StepResult,
    check_prompt,
    check_tokens,
    check_unicode,
)
from inference.scheduling.active import ActiveRequest, ActiveRequests
from inference.scheduling.blocks import BlockChanges, BlockManager, KVStats
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import Held, Terms, check_beams
from inference.scheduling.sequence import Sequence as TokenSequence
from inference.scheduling.states import DRAFTS, SNAPSHOTS, StateRows, piece_of
from inference.scheduling.work import Work
from inference.speculate.chain import Target
from inference.speculate.decoder import SpeculativeDecoder
from inference.structured.compiler import GrammarCompiler
from inference.transformers_code.model import CodeModel, CodeShape, Shape, check_config, read_shape
from kernels.op_inputs import KV_BLOCK, KVPool

P = ParamSpec("P")
T = TypeVar("T")
ENGINE_PROCESSES: set[int] = set()  # ids of those that have made one; a fork inherits them


def _refuse_fork() -> None:
    """Raise EngineError in a fork of a process with an engine: kernels would wait there for threads
    that it has not got, for ever."""
    if ENGINE_PROCESSES and os.getpid() not in ENGINE_PROCESSES and torch.get_num_threads() > 1:
        raise EngineError(
            "this process is a fork of one that has made an engine, whose threads it has not got. "
            "Start it by multiprocessing.get_context('spawn'), or call torch.set_num_threads(1)"
        )


def _alone(method: Callable[Concatenate[Engine, P], T]) -> Callable[Concatenate[Engine, P], T]:
    """A method of an engine in which one thread is at a time; others wait for it."""

    @wraps(method)
    def waiting(self: Engine, /, *args: P.args, **settings: P.kwargs) -> T:
        _refuse_fork()
        with self.lock:
            return method(self, *args, **settings)

    return waiting


class Engine:
    """Runs requests on a model; make one with `Engine.from_pretrained`.

    Several threads may call it: one computes at a time, and the others wait.

    Args:
        checkpoint: What is loaded, float or quantized.
        tokenizer: A transformers tokenizer.
        config: Sizes.
        backend: The device that it runs on.
        quantized_kv: Quantize K and V in the cache, and kept states, as the checkpoint says.

    Attributes:
        checkpoint, tokenizer, backend: As given.
        lock: Held by the thread that computes.
        model: What runs: a decoder as its family is declared, or transformers' own code.
        config: Sizes, all resolved.
        quantized_kv: Whether K and V are quantized in the cache.
        state_bytes: Bytes of recurrent states, those of snapshots with them; 0 without.
        pools: The cache, layer by layer.
        loop: Runs steps.
        speculation: Gives steps their drafts, and tells how many were accepted; None without.

    Raises:
        CheckpointError: the checkpoint is damaged, or of a kind that is not run here.
        EngineError: sizes do not fit, or the device's memory is too small.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Any,
        config: EngineConfig,
        backend: Backend,
        *,
        quantized_kv: bool = True,
    ) -> None:
        _refuse_fork()
        ENGINE_PROCESSES.add(os.getpid())
        self.checkpoint, self.tokenizer, self.backend = checkpoint, tokenizer, backend
        if config.speculate is not None:
            require_method(config.speculate.method, networks=backend.runs_drafters)
        shape = read_shape(checkpoint, backend, transformers_code=config.transformers_code)
        length, blocks = config.sizes(shape.max_positions)
        with backend.loading(checkpoint.nbytes):
            self.model: Model = backend.load(checkpoint, shape, length)
        int8 = quantized_kv and checkpoint.scheme.states is not None
        states, self.state_bytes = self._keep_states(shape, config, int8=int8)
        sizes = config.model_copy(update={"max_model_len": length, "kv_blocks": blocks})
        cache = CacheShape.of_model(checkpoint, shape, sizes, backend, quantized=quantized_kv)
        self.quantized_kv = cache.quantized
        if config.kv_memory is not None and config.kv_blocks is None:
            each = cache.nbytes(backend.dtype) // blocks
            blocks = config.blocks_within(length, backend.free_bytes(), each)
        self.config = sizes.model_copy(update={"kv_blocks": blocks})
        self.pools = backend.cache(replace(cache, blocks=blocks))
        ends = end_tokens(checkpoint, tokenizer)
        self._ends = frozenset(token for token in ends if token < shape.vocab_size)  # can come
        self._grammars = GrammarCompiler(tokenizer, shape.vocab_size, self._ends)
        self._blocks = BlockManager(blocks, prefix_cache=config.prefix_cache, states=states)
        self.speculation: SpeculativeDecoder | None = None
        self.lock = threading.RLock()
        self._start()
        if config.speculate is not None:
            target = Target(
                tokenizer, shape.vocab_size, self.config, backend, self.model, checkpoint
            )
            own = config.speculate
            make = draft_methods()[own.method].make
            self.speculate_by(make(own.path, target), own.depth)

    def _keep_states(
        self, shape: Shape, config: EngineConfig, *, int8: bool
    ) -> tuple[StateRows | None, int]:
        """Rows of recurrent states, taken before the cache's share of the memory; their bytes."""
        if not (isinstance(shape, CodeShape) and shape.structure.mixers):
            return None, 0
        assert isinstance(self.model, CodeModel)
        own, places = config.speculate, config.max_batch_size
        kept = config.state_snapshots if config.prefix_cache else 0
        if kept is None:  # as many as floats of that number would take
            each = self.model.state_bytes(int8=int8)
            kept = max(places, SNAPSHOTS) * self.model.state_bytes() // each
        rows = StateRows(
            places + 1,
            kept,
            piece_of(config.max_batched_tokens, places),
            0 if own is None else max(places, DRAFTS, own.depth or 0),
            int8=int8,
        )
        try:
            return rows, self.model.keep_states(rows.rows, kept if int8 else None)
        except RuntimeError as error:
            if not self.backend.ran_out(error):
                raise
            raise EngineError(
                f"memory is too small: {rows.rows} rows of recurrent states found no room; lower "
                "max_batch_size or state_snapshots"
            ) from error

    def _start(self) -> None:
        """Be ready for the first request."""
        sizes = self.config
        assert sizes.max_model_len is not None
        self._length = sizes.max_model_len
        self._scheduler = Scheduler(
            self._blocks,
            sizes.max_batch_size,
            sizes.max_batched_tokens,
            root=self._blocks.new_root(),  # what a variant computes is another's
            span=self.model.config.attention_span,
            target_s=None if sizes.target_itl_ms is None else sizes.target_itl_ms / 1000,
        )
        # A bound method would keep a deleted engine, and its memory, until the garbage collector.
        change_blocks = partial(Engine._change_blocks, weakref.proxy(self))
        self._requests = ActiveRequests(self._scheduler, change_blocks)
        self._backlog = StepResult()  # of requests for which another caller has stepped
        self._names = (f"request-{i}" for i in count())
        self.loop = self.backend.loop(self.model, self.pools, self.config, self._requests)
        self._adapters = Adapters(self.checkpoint, self.model, self.loop.adapters)

    def variant(self, layers: Sequence[Any], pools: Sequence[KVPool]) -> Engine:
        """An idle engine that differs from this one in blocks or in its cache; nothing is copied.

        Args:
            layers: Blocks, of this engine or of another of its backend and of the same shape.
            pools: The cache, layer by layer, likewise. Of engines that share it one runs at a time;
                they share the bookkeeping of its blocks, and find only what they computed.
        """
        twin = copy.copy(self)
        twin.model, twin.pools = self.model.with_layers(layers), list(pools)
        twin.speculation = None
        twin._start()
        return twin

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        revision: str | None = None,
        config: EngineConfig | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        quantized_kv: bool = True,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> Engine:
        """Load a checkpoint, float or quantized.

        Args:
            path: Its folder, a .gguf file, or `organization/model` on the Hugging Face hub.
            revision: Branch, tag or commit there.
            config: Sizes.
            device: Where it runs: cpu, cuda or cuda:N.
            dtype: Of activations and of float weights; see `inference.backend.choose_backend`.
            quantized_kv: Quantize K and V in the cache, and kept states, as the checkpoint says.
            adapters: Folders of adapters to load, by the names that requests give; see
                `load_adapter`.

        Raises:
            CheckpointError: it is damaged, or of a kind that is not run here.
            EngineError: the device is not one that is run on, or its memory is too small.
            RequestError: an adapter's name is not allowed.
        """
        require_device(device)  # first: the rest takes its time
        folder = locate_model(path, revision)
        checkpoint = Checkpoint.open(folder, quantized_kv=quantized_kv)
        check_config(checkpoint)  # before the tokenizer, which reads config.json too
        tokenizer = load_tokenizer(checkpoint.path)
        sizes = config or EngineConfig()
        backend = choose_ranks(
            choose_backend(device, checkpoint, dtype),
            partial(Checkpoint.open, checkpoint.path, quantized_kv=quantized_kv),
            sizes,
        )
        engine = cls(checkpoint, tokenizer, sizes, backend, quantized_kv=quantized_kv)
        for name, folder in (adapters or {}).items():
            engine.load_adapter(name, folder)
        return engine

    @property
    def adapters(self) -> dict[str, Path]:
        """The folders of the adapters that are loaded, by name."""
        return self._adapters.paths

    @_alone
    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load an adapter, LoRA or prefix tuning, which requests name in `SamplingParams.adapter`.

        Args:
            name: Its name.
            path: The folder that PEFT wrote, or `organization/model` on the Hugging Face hub.

        Raises:
            RequestError: the name is used, or is none.
            CheckpointError: it is damaged, of another base, or of a kind that is not run.
            EngineError: adapters are not run with this model, or memory is too small.
        """
        slot = self._adapters.load(name, path, no_prefixes=self._no_prefixes())
        self._scheduler.roots[slot] = self._blocks.new_root()

    def _no_prefixes(self) -> str | None:
        """Why K and V that an adapter gives cannot be put into the cache; None where they can."""
        own = self.config.speculate
        if own is not None and draft_methods()[own.method].network:
            return f"drafts of {own.method} come from a network that has no such prefix"
        return None

    @_alone
    def unload_adapter(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            RequestError: there is none of that name, or requests with it wait or run.
        """
        using = sum(request.params.adapter == name for request in self._requests.values())
        if using:
            raise RequestError(
                f"adapter: {using} requests with {name!r} wait or run; unload it when they have "
                "ended, or abort them",
                "adapter",
            )
        self._adapters.unload(name)

    def _slot_of(self, adapter: str | None) -> tuple[int, int]:
        """The slot of a request's adapter, -1 for none; and how many tokens it gives."""
        slot = -1 if adapter is None else self._adapters.slot_of(adapter)
        return slot, self._adapters.given(slot)

    def check_alive(self) -> None:
        """Raise EngineEndedError where a process that the engine needs is gone."""
        self.backend.check_alive()

    def close(self) -> None:
        """End the processes that run parts of the model, if there are any; nothing runs then."""
        self.backend.close()

    def speculate_by(self, proposer: Proposer | None, depth: int | None = None) -> None:
        """Have drafts of the next tokens from a proposer from now on; no token changes by that.

        Args:
            proposer: Makes them; None for no drafts any more.
            depth: Drafts of each request in a step; default: as many as pay.

        Raises:
            EngineError: the model keeps a recurrent state, and the engine none before drafts.
        """
        states = self._blocks.states
        if proposer is not None and states is not None:
            states.reserve(max(DRAFTS, depth or 0))
            if not states.drafts:
                raise EngineError(
                    "this engine has no rows for recurrent states before drafts; make it with "
                    "EngineConfig(speculate=...), or with state_snapshots"
                )
        places = self.config.max_batch_size
        self.speculation = None if proposer is None else SpeculativeDecoder(proposer, places, depth)
        self._scheduler.drafter = self.speculation

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._requests) or bool(self._backlog)

    @property
    def queues(self) -> tuple[int, int]:
        """How many requests wait, and how many run."""
        return len(self._scheduler.waiting), len(self._scheduler.running)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a text of the model."""
        return self._ends

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return sum(pool.nbytes_per_token for pool in self.pools)

    def stats(self) -> KVStats:
        """Blocks of the cache, and what was found in it."""
        own = self._scheduler
        return replace(
            self._blocks.stats(),
            queried_tokens=own.queried_tokens,
            hit_tokens=own.hit_tokens,
            preemptions=own.preemptions,
        )

    def check_integrity(self) -> None:
        """Check that every block is free, cached or held, and that those who hold them live.

        Raises:
            EngineError: the cache's bookkeeping is broken.
        """
        self._blocks.check()
        self._scheduler.check()
        if not self._requests and self._blocks.available != self._blocks.total:
            raise EngineError(f"no request is left, but {self.stats()} says that blocks are held")

    @_alone
    def add_request(
        self,
        prompt: str | Sequence[int] | Tensor,
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request; `step` answers it.

        Args:
            prompt: Text, or token ids.
            params: How it is decoded; default greedy.
            request_id: Its name; default a new one.

        Returns:
            Its name.

        Raises:
            RequestError: the prompt is empty or too long, the model does not know a token of it, of
                `stop_token_ids` or of `logit_bias`, the name is used, the adapter is not loaded,
                or the package that constraints need is missing. A constraint that cannot be
                compiled ends the request later, with an error whose `param` is "constraint".
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params: found {params!r:.40}; needed are SamplingParams", "params")
        slot, given = self._slot_of(params.adapter)
        name, tokens = self._new_name(request_id), self._tokens(prompt, given)
        check_tokens(params.stop_token_ids, self.model.config.vocab_size, "stop_token_ids")
        biased = [token for token, _ in params.logit_bias]
        check_tokens(biased, self.model.config.vocab_size, "logit_bias")
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._ends)
        request = ActiveRequest(
            name, tokens, params, self.tokenizer, ends, self._length, adapter=slot, given=given
        )
        request.sequence.reference = self._reference(params)
        constraint = params.constraint
        self._requests.add(request, constraint and self._grammars.compile(constraint))
        return name

    @_alone
    def hold(
        self,
        prompt: str | Sequence[int] | Tensor,
        *,
        top: int,
        beams: int = 1,
        max_tokens: int = 128,
        stop_token_ids: Sequence[int] = (),
        request_id: str | None = None,
        adapter: str | None = None,
    ) -> Held:
        """Queue a request that waits after its prompt, and after each token, for the next.

        `StepResult.candidates` tells how it may go on; `extend`, `fork` and `abort` tell how it
        does. Until then it takes up a place and its blocks.

        Args:
            prompt: Text, or token ids.
            top: How many of the likeliest tokens are returned.
            beams: Most requests that it will have been forked to at any time, itself included.
            max_tokens: Most tokens that any of them will have after the prompt.
            stop_token_ids: Tokens that the client looks out for; only checked.
            request_id: Its name; default a new one.
            adapter: Name of the adapter that it runs with.

        Raises:
            RequestError: as in `add_request`, or places or blocks would never suffice.
        """
        slot, given = self._slot_of(adapter)
        name, tokens = self._new_name(request_id), self._tokens(prompt, given)
        check_tokens(stop_token_ids, self.model.config.vocab_size, "stop_token_ids")
        length = given + len(tokens)
        room = min(max_tokens, self._length - length)
        check_beams(beams, length, room, self._scheduler.max_batch_size, self._blocks.total)
        params = SamplingParams(max_tokens=room, adapter=adapter)
        request = ActiveRequest(
            name, tokens, params, self.tokenizer, frozenset(), self._length, candidates=top,
            adapter=slot, given=given,
        )  # fmt: skip
        request.sequence.places = beams
        self._requests.add(request)
        return Held(name, room)

    @_alone
    def extend(self, name: str, token: int) -> None:
        """Give a held request its next token, once the likeliest were returned."""
        self._requests[name].sequence.append(token)

    @_alone
    def fork(self, name: str, new_name: str, token: int) -> None:
        """Begin a held request with the tokens of another and one more; it shares their blocks.

        Raises:
            RequestError: the new name is used.
        """
        self._requests.fork(self._requests[name], self._new_name(new_name), token)

    def assume_computed(self, request_id: str) -> None:
        """Take the prompt of a waiting request as computed, but for its last token.

        For measurements: its K and V are what the cache happens to hold.

        Raises:
            EngineError: the cache or the batch has no room for it now.
        """
        if not self._scheduler.assume_computed(self._requests[request_id].sequence):
            raise EngineError(f"{request_id}: no place is free, or too few blocks: {self.stats()}")

    @_alone
    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; gives its last state, or None where there is no such request."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        return self._requests.finish(request, "abort")

    @_alone
    def step(self) -> list[RequestOutput]:
        """Compute the next tokens of every running request, or a chunk of a prompt.

        Where memory runs out, later steps are made smaller, of fewer tokens and if need be of fewer
        requests: the newest then end with an error, and the others go on.

        Returns:
            The state of each request that gained a token or ended.

        Raises:
            EngineError: the step failed; all requests are dropped, the engine can go on.
        """
        return self._outputs(self._next())

    @_alone
    def advance(self) -> StepResult:
        """`step`, as one object: which requests gained which token, and which ended.

        What a step costs here does not grow with the text or with those that wait, and hardly with
        those that run.

        Raises:
            EngineError: as `step`.
        """
        result = self._next()
        result.candidates = self._requests.take_candidates()
        return result

    def _next(self) -> StepResult:
        """What `_drive` kept back for others, or else what a step gives."""
        kept, self._backlog = self._backlog, StepResult()
        return kept or self._run()

    def _run(self) -> StepResult:
        """One step of the loop."""
        refused: list[RequestOutput] = []
        try:
            refused = self._requests.admit_compiled()
            result = self.loop.step()
            result.finished = refused + result.finished
            result.found, self._scheduler.found = self._scheduler.found, {}
            return result
        except Exception as error:  # the engine's boundary: nothing of a broken step may stay
            if self.backend.ran_out(error):
                result = self.loop.settle()
                result.finished = refused + result.finished + self._requests.ask_for_less(error)
                return result
            self._requests.drop()
            self.loop.drop()
            if isinstance(error, PTQError):
                raise
            raise EngineError(
                f"a step failed ({type(error).__name__}: {error}); its requests are lost"
            ) from error

    def _outputs(self, result: StepResult) -> list[RequestOutput]:
        """The state of each request that a step changed."""
        names = dict.fromkeys(name for name in result.names if name in self._requests)
        going = [self._requests[name].snapshot() for name in names]
        return going + result.finished

    def warm_up(self) -> None:
        """On a GPU, compile and capture the usual steps now instead of when each is needed.

        Raises:
            EngineError: memory is too small for them.
        """
        self.loop.warm_up()

    @_alone
    def generate(
        self,
        prompts: str | Iterable[str] | Iterable[Sequence[int] | Tensor],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer a batch of prompts.

        Args:
            prompts: Texts or token ids, a list each; or one text.
            params: For all of them, or one for each.

        Returns:
            Final outputs in the order of the prompts.

        Raises:
            RequestError: a prompt or its parameters are not allowed; none is run.
        """
        given: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(given)
        if len(each) != len(given):
            raise RequestError(f"params: {len(each)} for {len(given)} prompts", "params")
        alone, names, done = not self.has_unfinished, list[str](), dict[str, RequestOutput]()
        try:
            for prompt, one in zip(given, each, strict=True):
                names.append(self.add_request(prompt, one))
            while alone and len(done) < len(names):
                ended = map(_or_refused, self.advance().finished)
                done |= {output.request_id: output for output in ended}
            for output in () if alone else self._drive(names):
                done[output.request_id] = output
        finally:  # of a batch that is refused or interrupted nothing is left
            for name in names:
                self.abort(name)
        return [done[name] for name in names]

    def stream(
        self, prompt: str | Sequence[int] | Tensor, params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Answer one prompt token by token; closing the iterator aborts the request."""
        name = self.add_request(prompt, params)
        try:
            yield from self._drive([name])
        finally:
            self.abort(name)

    @_alone
    def score(
        self,
        ids: Tensor | Sequence[int],
        adapter: str | None = None,
        *,
        rounded_states: bool = True,
    ) -> Tensor:
        """Logits of a given text, computed on the real kernels, the quantized cache included.

        Args:
            ids: Token ids [T].
            adapter: Name of the adapter that the model runs with.
            rounded_states: Where kept recurrent states are quantized, compute each block of 64
                tokens as if what precedes it had been found: the most that a request can lose.

        Returns:
            fp32 [T, vocabulary], where the model runs; row i predicts token i + 1.

        Raises:
            RequestError: as in `add_request`.
            EngineError: running requests hold the cache's blocks.
        """
        parts = list(self.score_parts(ids, adapter, rounded_states=rounded_states))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def score_parts(
        self,
        ids: Tensor | Sequence[int],
        adapter: str | None = None,
        *,
        rounded_states: bool = True,
    ) -> Iterator[Tensor]:
        """`score`, a step's tokens at a time: logits of `max_batched_tokens` at the most."""
        tokens = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        slot, given = self._slot_of(adapter)
        self._check_prompt(tokens, room=given)
        ids = [0] * given + tokens
        sequence = TokenSequence(" score", ids, Terms(adapter=slot), whole=True, given=given)
        if not self._scheduler.enter_apart(sequence):
            raise EngineError("running requests hold the cache; finish them before scoring")
        states, step = self._blocks.states, self.config.max_batched_tokens
        step -= 0 if states is None else step % states.piece
        rounded = rounded_states and states is not None and states.int8
        finite, logits, scored = False, list[Tensor](), 0
        try:
            self._requests.prepare_cache()
            for part in self._parts(sequence, step, rounded=rounded):
                logits.append(self.loop.score(part))
                finite = bool(torch.isfinite(logits[-1][-1]).all())
                scored += len(logits[-1])
                if scored % step == 0 or scored == len(tokens):
                    yield torch.cat(logits) if len(logits) > 1 else logits[0]
                    logits = []
        finally:
            self._scheduler.leave_apart(sequence, seen=len(ids) if finite else 0)

    def _change_blocks(self, changes: BlockChanges) -> None:
        self.backend.change_blocks(self.pools, changes)
        if changes.states:
            assert isinstance(self.model, CodeModel)
            assert self._blocks.states is not None
            self.model.copy_states(changes.states, self._blocks.states.kept)
        for fill in changes.fills:
            self.backend.write_kv(self.pools, self._adapters.tokens(fill))
        if self.speculation is not None:
            self.speculation.proposer.note_changes(changes)

    def _parts(self, sequence: TokenSequence, step: int, *, rounded: bool) -> Iterator[Work]:
        """The steps of so many tokens that compute a sequence that is run apart; where states are
        to be rounded they are cut into blocks."""
        batch, start, count = self._scheduler.batch, sequence.given, len(sequence)
        while start < count:
            now = min(step - (start - sequence.given) % step, count - start)
            now = min(now, KV_BLOCK - start % KV_BLOCK) if rounded else now
            work = Work.of(batch, np.array([batch.spare]), np.array([now]))
            yield work
            self._scheduler.advance(work)
            start += now
            if rounded and start % KV_BLOCK == 0:
                assert isinstance(self.model, CodeModel)
                self.model.round_states(batch.spare)

    def _drive(self, names: Sequence[str]) -> Iterator[RequestOutput]:
        """Step until these requests are done; what others gain waits for whoever asks next."""
        pending = set(names)
        while pending:
            with self.lock:
                own, self._backlog = self._backlog.split(pending)
                if not own:
                    own, others = self._run().split(pending)
                    self._backlog += others
                outputs = self._outputs(own)
            for output in outputs:
                if _or_refused(output).finished:
                    pending.discard(output.request_id)
                yield output

    def _new_name(self, asked: str | None) -> str:
        if asked in self._requests:
            raise RequestError(f"request_id: {asked!r} is running already", "request_id")
        return asked or next(n for n in self._names if n not in self._requests)

    def _tokens(self, prompt: str | Sequence[int] | Tensor, given: int) -> list[int]:
        """Token ids of a prompt that may be run after so many that an adapter gives."""
        if isinstance(prompt, str):
            check_unicode(prompt)
            tokens = text_tokens(self.tokenizer, prompt)
        elif isinstance(prompt, Sequence | Tensor) and not isinstance(prompt, bytes | bytearray):
            tokens = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
        else:
            raise RequestError(
                f"prompt: found {prompt!r:.40}; needed is text, or a list of token ids. Messages "
                "of a chat become text by apply_chat_template of the tokenizer",
                "prompt",
            )
        self._check_prompt(tokens, 1 + given)
        return tokens

    def _reference(self, params: SamplingParams) -> list[int]:
        """Token ids of the text that a request's output is expected to repeat in parts."""
        text = params.reference
        if isinstance(text, str):
            if not text or self.speculation is None:
                return []
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        check_tokens(text, self.model.config.vocab_size, "reference")
        return list(text)

    def _check_prompt(self, tokens: Sequence[int], room: int) -> None:
        shape = self.model.config
        check_prompt(tokens, self._length, shape.max_positions, shape.vocab_size, room)


def _or_refused(output: RequestOutput) -> RequestOutput:
    """An output; RequestError where a parameter was found to be wrong after it was queued."""
    if output.param is not None:
        raise RequestError(str(output.error), output.param)
    return output
