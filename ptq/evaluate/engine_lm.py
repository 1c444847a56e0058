"""Our engine as a language model of lm-eval: what its tasks ask of one, in large batches.

lm-eval (EleutherAI, `lm_eval.api.model.TemplateLM`) asks for log likelihoods of continuations, of
whole texts, and for completions. Requests of a task are queued all at once; the engine batches them
as it has room. Contexts that begin alike, as those of an item's choices do, are computed once: only
the log probabilities of the continuation are asked for (`SamplingParams.prompt_logprobs_start`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from formats.command import bar
from formats.text_tokens import text_tokens
from inference.engine import Engine
from inference.requests.request import SamplingParams
from ptq.evaluate.answers import answers, likelihoods

DEFAULT_TOKENS = 256  # of a completion whose task does not say; lm-eval's own default


class EngineLM(TemplateLM):
    """An engine that answers lm-eval's requests.

    Args:
        engine: Idle; its `max_batch_size` is the number of requests that run at once.
        adapter: The name of one of its adapters, which requests run with.
        progress: Show a progress bar for the requests of each kind.

    Attributes:
        max_length: Most tokens of a context with its continuation but for the last.
    """

    def __init__(
        self, engine: Engine, *, adapter: str | None = None, progress: bool = True
    ) -> None:
        super().__init__()
        self.adapter = adapter
        self.engine, self.tokenizer = engine, engine.tokenizer
        assert engine.config.max_model_len is not None
        self.max_length = engine.config.max_model_len - 2  # and one that is generated
        self._progress = progress

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return min(self.engine.end_tokens, default=self.tokenizer.eos_token_id or 0)

    @property
    def prefix_token_id(self) -> int:
        """What a text stands after that has no context: the token that begins texts, if any."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's own caches."""
        return str(self.engine.checkpoint.path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of a text; a text that brings the first special token gets no second one."""
        if add_special_tokens is False:
            return list(self.tokenizer.encode(string, add_special_tokens=False))
        return text_tokens(self.tokenizer, string)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A chat as the text that the model's template makes of it."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log likelihood of continuations; tokenizing them, which is quick, shows no bar."""
        return super().loglikelihood(list(requests), disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Of each (texts, context, continuation): its log likelihood, and whether it is greedy."""
        prompts, starts = [], []
        for _, context, continuation in requests:
            ids = (context + continuation)[-(self.max_length + 1) :]
            prompts.append(ids)
            starts.append(max(1, len(ids) - len(continuation)))
        with self._bar("Scoring", len(prompts)) as shown:
            return likelihoods(self.engine, prompts, starts, shown, self.adapter)

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log likelihood of whole texts, each token from as much before it as fits."""
        windows, owners = [], []
        for i, (text,) in enumerate(request.args for request in requests):
            tokens = self.tok_encode(text, add_special_tokens=False)
            tokens = tokens[tokens[:1] == [self.prefix_token_id] :]  # which is put before it
            own = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            windows += [(None, *make_disjoint_window(pair)) for pair in own]
            owners += [i] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        for i, (chance, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[i] += chance
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Completions up to the first of the texts at which they are to stop."""
        prompts, params = [], []
        for request in requests:
            context, options = cast("tuple[str, dict[str, Any]]", request.args)
            one = sampling_params(options, self.max_length)
            tokens = self.tok_encode(context)
            prompts.append(tokens[-(self.max_length + 1 - one.max_tokens) :])
            params.append(one.model_copy(update={"adapter": self.adapter}))
        with self._bar("Completing", len(prompts)) as shown:
            return [output.text for output in answers(self.engine, prompts, params, shown)]

    def _bar(self, title: str, total: int) -> Any:
        return bar(title=title, unit="request", total=total, shown=self._progress)


def sampling_params(options: dict[str, Any], longest: int) -> SamplingParams:
    """How lm-eval's `generation_kwargs` ask to decode.

    Args:
        longest: Most tokens of prompt and completion.

    Raises:
        RequestError: a value is not allowed.
    """
    known = dict(options)
    until = known.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(until)
    most = known.get("max_gen_toks", known.get("max_tokens", DEFAULT_TOKENS))
    drawn = bool(known.get("do_sample", known.get("temperature", 0.0) > 0))
    return SamplingParams(
        max_tokens=max(1, min(int(most), longest - 1)),
        stop=tuple(text for text in stop if text),
        temperature=float(known.get("temperature", 1.0)) if drawn else 0.0,
        top_p=float(known.get("top_p", 1.0)) if drawn else 1.0,
        top_k=int(known.get("top_k", 0)) if drawn else 0,
        seed=0,
    )
