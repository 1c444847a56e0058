"""The engine: continuous batching over a paged cache.

    step() = schedule -> run -> postprocess

Requests join and leave between steps. What one of them gets does not depend on the others: every op
returns a row with the same bits in any batch (`kernels.ops`), and random numbers are a request's
own. On a GPU tokens are chosen there and steps overlap (`inference.gpu.loop`); sums are cut by the
number of rows, so that there a row may differ in its last bits from one size of batch to another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.errors import EngineError, PTQError, RequestError
from inference.active import ActiveRequest
from inference.config import EngineConfig
from inference.kv_cache import BlockManager, KVStats
from inference.load import end_tokens, load_model, load_tokenizer, make_cache
from inference.models.llama import LlamaModel
from inference.request import FinishReason, RequestOutput, SamplingParams
from inference.runner import run_slices
from inference.scheduler import Scheduler, Slice
from inference.scheduler import Sequence as TokenSequence

if TYPE_CHECKING:
    from inference.gpu.loop import DeviceLoop


class Engine:
    """Runs requests on a loaded model; make one with `Engine.from_pretrained`.

    Attributes:
        checkpoint: What was loaded.
        model: The decoder.
        tokenizer: A transformers tokenizer.
        config: Sizes, all resolved.
        quantized_kv: Whether K and V are quantized in the cache.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: LlamaModel,
        tokenizer: Any,
        config: EngineConfig,
        *,
        quantized_kv: bool = True,
    ) -> None:
        self.checkpoint, self.model, self.tokenizer = checkpoint, model, tokenizer
        shape = model.config
        length, blocks = config.sizes(shape.max_positions)
        self.config = config.model_copy(update={"max_model_len": length, "kv_blocks": blocks})
        self._length = length
        kv_cache = checkpoint.scheme.kv_cache if quantized_kv else None
        self.quantized_kv = kv_cache is not None
        self._pools = make_cache(checkpoint, model, self.config, kv_cache)
        self._blocks = BlockManager(blocks)
        self._scheduler = Scheduler(self._blocks, config.max_batch_size, config.max_batched_tokens)
        self._requests: dict[str, ActiveRequest] = {}
        self._backlog: list[RequestOutput] = []
        self._names = (f"request-{i}" for i in count())
        self._ends = end_tokens(checkpoint, tokenizer)
        self._device_loop = self._make_device_loop() if model.place.triton else None

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        config: EngineConfig | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        quantized_kv: bool = True,
    ) -> Engine:
        """Load a checkpoint, float or quantized.

        Args:
            path: Its folder.
            config: Sizes.
            device: Where it runs: cpu, cuda or cuda:N.
            dtype: Of activations and of float weights; see `inference.load.load_model`.
            quantized_kv: Quantize K and V in the cache as the checkpoint says.

        Raises:
            CheckpointError: it is damaged, or of a kind that is not run here.
            EngineError: the device is not one that is run on.
        """
        checkpoint = Checkpoint.open(path)
        tokenizer = load_tokenizer(checkpoint.path)
        model = load_model(checkpoint, device=device, dtype=dtype)
        return cls(
            checkpoint, model, tokenizer, config or EngineConfig(), quantized_kv=quantized_kv
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._requests) or bool(self._backlog)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return sum(pool.nbytes_per_token for pool in self._pools)

    def stats(self) -> KVStats:
        """Blocks of the cache."""
        return self._blocks.stats()

    def check_integrity(self) -> None:
        """Check that every block is free or has one owner, and that owners live.

        Raises:
            EngineError: the cache's bookkeeping is broken.
        """
        self._blocks.check()
        if not self._requests and self._blocks.free != self._blocks.total:
            raise EngineError(f"no request is left, but {self.stats()} says that blocks are held")

    def add_request(
        self,
        prompt: str | Sequence[int],
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
            RequestError: the prompt is empty, too long or holds unknown tokens; the name is used.
        """
        params = params or SamplingParams()
        name = request_id or next(n for n in self._names if n not in self._requests)
        if name in self._requests:
            raise RequestError(f"request_id: {name!r} is running already", "request_id")
        text = isinstance(prompt, str)
        tokens = list(self.tokenizer(prompt)["input_ids"]) if text else list(prompt)
        self._check_prompt(tokens)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._ends)
        request = ActiveRequest(name, tokens, params, self.tokenizer, ends, self._length)
        self._requests[name] = request
        self._scheduler.add(request.sequence)
        return name

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; gives its last state, or None where there is no such request."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        return self._finish(request, "abort")

    def step(self) -> list[RequestOutput]:
        """Compute one token of every running request, or a chunk of a prompt.

        Returns:
            The state of each request that gained a token or ended.

        Raises:
            EngineError: the step failed; all requests are dropped, the engine can go on.
        """
        outputs, self._backlog = self._backlog, []
        try:
            loop = self._device_loop
            outputs += self._step() if loop is None else loop.step()
        except PTQError:
            self._drop_all()
            raise
        except Exception as error:  # the engine's boundary: nothing of a broken step may stay
            self._drop_all()
            raise EngineError(
                f"a step failed ({type(error).__name__}: {error}); its requests are lost"
            ) from error
        return outputs

    def _make_device_loop(self) -> DeviceLoop:
        from inference.gpu.loop import make_loop

        return make_loop(
            self.model,
            self._pools,
            self._scheduler,
            self.config,
            self._requests,
            self._postprocess,
            self._accept,
        )

    def warm_up(self) -> None:
        """On a GPU, compile and capture all decode steps now instead of when each is needed."""
        if self._device_loop is not None:
            self._device_loop.runner.warm_up(self.config.max_batch_size)

    def _step(self) -> list[RequestOutput]:
        slices = self._scheduler.schedule()
        if not slices:
            return []
        names = [part.sequence.name for part in slices]
        whole = {name for name in names if self._requests[name].wants_prompt_logits}
        logits = run_slices(self.model, self._pools, slices, self._blocks, whole)
        self._scheduler.advance(slices)
        outputs = []
        for part in slices:
            rows = logits.get(part.sequence.name)
            if rows is not None:
                outputs += self._postprocess(part, rows)
        return outputs

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer a batch of prompts.

        Args:
            prompts: Texts or token id lists.
            params: For all of them, or one for each.

        Returns:
            Final outputs in the order of the prompts.

        Raises:
            RequestError: a prompt or its parameters are not allowed; none is run.
        """
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise RequestError(f"params: {len(each)} for {len(prompts)} prompts", "params")
        names: list[str] = []
        try:
            for prompt, one in zip(prompts, each, strict=True):
                names.append(self.add_request(prompt, one))
        except RequestError:
            for name in names:
                self.abort(name)
            raise
        done = {output.request_id: output for output in self._drive(names) if output.finished}
        return [done[name] for name in names]

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Answer one prompt token by token; closing the iterator aborts the request."""
        name = self.add_request(prompt, params)
        try:
            yield from self._drive([name])
        finally:
            self.abort(name)

    def score(self, ids: Tensor | Sequence[int]) -> Tensor:
        """Logits of a given text, computed on the real kernels, the quantized cache included.

        Args:
            ids: Token ids [T].

        Returns:
            fp32 [T, vocabulary]; row i predicts token i + 1.

        Raises:
            RequestError: as in `add_request`.
            EngineError: running requests hold the cache's blocks.
        """
        tokens = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        self._check_prompt(tokens, room=0)
        sequence = TokenSequence(" score", tokens)  # no request has this name
        if not self._blocks.grow(sequence.name, len(tokens)):
            raise EngineError("running requests hold the cache; finish them before scoring")
        try:
            parts = []
            for start in range(0, len(tokens), self.config.max_batched_tokens):
                size = min(self.config.max_batched_tokens, len(tokens) - start)
                parts.append(self._score(Slice(sequence, start, size)))
        finally:
            self._blocks.release(sequence.name)
        return torch.cat(parts)

    def _score(self, part: Slice) -> Tensor:
        if self._device_loop is not None:
            return self._device_loop.runner.score(part)
        name = part.sequence.name
        return run_slices(self.model, self._pools, [part], self._blocks, {name})[name]

    def _drive(self, names: Sequence[str]) -> Iterator[RequestOutput]:
        """Step until these requests are done; what others gain waits for the next `step`."""
        pending, others = set(names), []
        try:
            while pending:
                for output in self.step():
                    if output.request_id not in pending:
                        others.append(output)
                        continue
                    if output.finished:
                        pending.discard(output.request_id)
                    yield output
        finally:
            self._backlog = others + self._backlog

    def _check_prompt(self, tokens: Sequence[int], room: int = 1) -> None:
        if not tokens:
            raise RequestError("prompt: it is empty; give at least one token", "prompt")
        if len(tokens) + room > self._length:
            most = self.model.config.max_positions
            or_raise = f", or raise max_model_len up to {most}" if self._length < most else ""
            raise RequestError(
                f"prompt: {len(tokens)} tokens leave no room in max_model_len {self._length}; "
                f"shorten it{or_raise}",
                "prompt",
            )
        vocabulary = self.model.config.vocab_size
        bad = [t for t in tokens if not (isinstance(t, int) and 0 <= t < vocabulary)]
        if bad:
            raise RequestError(
                f"prompt: token {bad[0]!r} is not in the vocabulary of {vocabulary}", "prompt"
            )

    def _postprocess(self, part: Slice, logits: Tensor) -> list[RequestOutput]:
        """Give a request its logits: for the prompt's log probabilities, and for its next token."""
        request = self._requests[part.sequence.name]
        if not bool(torch.isfinite(logits).all()):
            return [self._fail(request)]
        if request.wants_prompt_logits:
            request.note_prompt(part, logits)
        if not part.samples:
            return []
        reason = request.take(logits[-1])
        return [self._finish(request, reason) if reason else request.snapshot()]

    def _accept(self, request: ActiveRequest, token: int) -> RequestOutput:
        """Give a request its next token; a negative one says that its logits were not finite."""
        if token < 0:
            return self._fail(request)
        reason = request.accept(token)
        return self._finish(request, reason) if reason else request.snapshot()

    def _fail(self, request: ActiveRequest) -> RequestOutput:
        request.output.error = "the model's logits hold NaN or infinity; check the checkpoint"
        return self._finish(request, "error")

    def _finish(self, request: ActiveRequest, reason: FinishReason) -> RequestOutput:
        self._scheduler.remove(request.sequence)
        del self._requests[request.output.request_id]
        return request.close(reason)

    def _drop_all(self) -> None:
        for request in list(self._requests.values()):
            self._scheduler.remove(request.sequence)
        self._requests.clear()
        if self._device_loop is not None:
            self._device_loop.drop()
