"""Runs tasks on an engine: those of lm-eval, and ours that need no network.

lm-eval (EleutherAI, `lm_eval.api.model.TemplateLM`) asks for log likelihoods of continuations, of
whole texts, and for completions. Requests of a task are queued all at once; the engine batches them
as it has room. Contexts that begin alike, as those of an item's choices do, are computed once: only
the log probabilities of the continuation are asked for (`SamplingParams.prompt_logprobs_start`).
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from io import StringIO
from typing import Any, cast

from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from formats.chat_template import text_tokens
from formats.command import bar
from formats.errors import EngineError, RequestError
from formats.scheme import either
from inference.engine import Engine
from inference.requests.request import SamplingParams
from ptq.evaluate import local_tasks
from ptq.evaluate.answers import answers, likelihoods
from ptq.evaluate.figures import Metric

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
        asked = []
        for _, context, continuation in requests:
            ids = (context + continuation)[-(self.max_length + 1) :]
            start = max(1, len(ids) - len(continuation))
            asked.append((ids[:start], ids[start:]))
        with self._bar("Scoring", len(asked)) as shown:
            return likelihoods(self.engine, asked, shown, self.adapter)

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


def evaluate(
    engine: Engine,
    tasks: Sequence[str],
    *,
    adapter: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    allow_code: bool = False,
    progress: bool = True,
) -> list[Metric]:
    """Run tasks.

    Args:
        engine: Idle.
        tasks: Names of local tasks, `local` for all of these, or of lm-eval's own, whose data is
            read from the hub.
        adapter: The name of one of the engine's adapters, which the tasks run with.
        limit: Most items of a task.
        num_fewshot: Examples before each item; None leaves it to the task.
        chat: Ask through the model's chat template.
        allow_code: Run what the model has written, where a task does that.

    Raises:
        RequestError: there is no such task, its data cannot be had, or it runs code and that is not
            allowed.
        EngineError: this machine stopped one: its disk is full, or a file may not be read.
    """
    for name in ("lm_eval", "lm-eval"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # lm-eval would fork a pool to resample, whose workers have our handler of the signal that is to
    # end them: it waits for them forever.
    os.environ["DISABLE_MULTIPROC"] = "1"
    # It would ask git after each task what is checked out here; git says `fatal` where nothing is.
    evaluator.get_git_commit_hash = str
    lm = EngineLM(engine, adapter=adapter, progress=progress)
    names = [own for name in tasks for own in _expanded(name, allow_code=allow_code)]
    found: list[Metric] = []
    local = all(name in local_tasks.NAMES for name in names)
    known = TaskManager(include_defaults=not local)  # reads thousands of files for its own
    for name in dict.fromkeys(names):
        with _told_elsewhere(progress), _data_of(name):
            result = evaluator.simple_evaluate(
                lm,
                tasks=[_task(name, lm, known)],
                task_manager=known,
                limit=limit,
                num_fewshot=num_fewshot,
                apply_chat_template=chat,
                bootstrap_iters=1000,
                confirm_run_unsafe_code=allow_code,
            )
        assert result is not None
        found += _metrics(result)
    return found


@contextmanager
def _told_elsewhere(progress: bool) -> Iterator[None]:
    """Keep what lm-eval prints out of the result: on stderr, or nowhere without progress."""
    with nullcontext() if progress else redirect_stderr(StringIO()), redirect_stdout(sys.stderr):
        yield


@contextmanager
def _data_of(name: str) -> Iterator[None]:
    """Say what stopped a task: its data, which `datasets` reads from the hub, or this machine."""
    try:
        yield
    except OSError as error:  # of `datasets` and the hub, each of its own kind
        reason = " ".join(str(error).split()) or type(error).__name__
        network = isinstance(error, (ConnectionError, TimeoutError, socket.gaierror))
        if error.errno is not None and not network:  # the system's, such as a full disk
            raise EngineError(f"{name}: {reason}. Mend that here, and run it again") from error
        raise RequestError(
            f"{name}: its data cannot be had ({reason}). They come from the hub: check the "
            "network, or give `local`, the tasks that need none",
            "tasks",
        ) from error


def _expanded(name: str, *, allow_code: bool) -> list[str]:
    """The tasks that a name stands for."""
    if name == "local":
        return [n for n in local_tasks.NAMES if allow_code or n not in local_tasks.UNSAFE]
    if name in local_tasks.UNSAFE and not allow_code:
        raise RequestError(
            f"{name}: it runs what the model writes; allow that with --allow-code, for a model "
            "that you trust",
            "tasks",
        )
    return [name]


def _task(name: str, lm: EngineLM, known: TaskManager) -> Any:
    """A task as `simple_evaluate` takes it."""
    if name in local_tasks.NAMES:
        model = local_tasks.Text(encode=lm.tok_encode, longest=lm.max_length)
        return ConfigurableTask(config=local_tasks.task_config(name, model))
    if name not in known.all_tasks:
        own = ["local", *local_tasks.NAMES]
        close = get_close_matches(name, [*own, *known.all_tasks], n=3)  # of thousands
        guess = f"did you mean {either(close)}? " if close else ""
        allowed = f"allowed: {', '.join(own)}, and what `lm-eval ls tasks` lists"
        raise RequestError(f"no task {name!r}; {guess}{allowed}", "tasks")
    return name


def _metrics(result: Mapping[str, Any]) -> list[Metric]:
    """lm-eval's results, metric by metric."""
    found = []
    for task, values in result["results"].items():
        samples = result["samples"].get(task, [])
        for key, value in values.items():
            name, _, _ = key.partition(",")
            if not isinstance(value, float) or name.endswith("_stderr"):
                continue
            stderr = values.get(key.replace(name, f"{name}_stderr", 1))
            each = {s["doc_id"]: float(s[name]) for s in samples if s.get(name) in (0, 1)}
            found.append(
                Metric(
                    task=task,
                    name=name,
                    value=value,
                    stderr=stderr if isinstance(stderr, float) and math.isfinite(stderr) else None,
                    higher_is_better=result["higher_is_better"].get(task, {}).get(name, True),
                    items=values.get("sample_len", len(samples)),
                    each=each if len(each) == len(samples) else {},
                )
            )
    return found
