"""What is asked of the engine, and what it answers: a request's output, and a step's result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, overload

from pydantic import BeforeValidator, Field, ValidationError

from formats.documents import Strict
from formats.errors import RequestError, suggestion
from inference.requests.constraint import Constraint, refused

Item = TypeVar("Item")
FinishReason = Literal["stop", "length", "abort", "error"]
LEAST, MOST = 1e-10, 1e10  # of what logits are divided by: their quotients stay finite
MOST_TOLD = 200  # characters of a value that is refused
MOST_BIASES = 300  # tokens of a request's logit_bias


def _as_pairs(value: object) -> object:
    """The pairs of a mapping, in the order of their keys where they have one."""
    if not isinstance(value, Mapping):
        return value
    known = all(isinstance(token, int) for token in value)
    return tuple(sorted(value.items()) if known else value.items())


Bias = tuple[int, Annotated[float, Field(ge=-100, le=100)]]


class RequestParams(Strict):
    """What a request may choose; a value that is not allowed is a RequestError that names it."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            faults = error.errors()
            first, at = faults[0], faults[0]["loc"][:1]
            param = str(at[0]) if at else None
            if param is not None and first["type"] == "extra_forbidden":
                names = suggestion(param, type(self).model_fields)
                raise RequestError(f"{param}: unknown parameter; {names}", param) from error
            same = [f["msg"].removeprefix("Input ") for f in faults if f["loc"][:1] == at]
            allowed = " or ".join(dict.fromkeys(same))  # several where several types are allowed
            found = repr(first["input"])
            if len(found) > MOST_TOLD:
                found = f"{found[:MOST_TOLD]}..."
            raise RequestError(f"{param}: {allowed}; found {found}", param) from error


class SamplingParams(RequestParams):
    """How one request is decoded.

    Attributes:
        max_tokens: Most tokens to generate.
        temperature: 0 is greedy: the most likely token, the lowest id of equals.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Then keep the fewest whose probabilities reach p (Holtzman et al. 2020).
        min_p: Of those keep the ones whose probability, after temperature, is at least so many
            times the largest (Nguyen et al. 2024, arXiv 2407.01082); 0 keeps all.
        logit_bias: Added to the logits of tokens, after penalties: {token: -100 to 100} of at most
            300 tokens, kept as pairs.
        repetition_penalty: Divides positive and multiplies negative logits of all tokens of the
            prompt and the output (Keskar et al. 2019, section 4.1).
        presence_penalty: Subtracted from the logits of tokens that the output holds.
        frequency_penalty: Subtracted from them once for each time they occur.
        seed: Of this request's random numbers: the same tokens whatever else runs.
        stop: Texts that end the output; they are not part of it.
        stop_token_ids: Tokens that end the output, beside the model's own end tokens.
        ignore_eos: Go on after the model's end tokens.
        min_tokens: No end token before so many tokens.
        logprobs: Give the log probabilities of the so many most likely tokens, and of the chosen
            one, of the model's own distribution: before penalties and temperature.
        prompt_logprobs: The same for the prompt's tokens.
        prompt_logprobs_start: The first token of the prompt whose log probability is returned;
            what precedes it may then be shared with other prompts.
        constraint: What the text must be. An end token comes where it is complete and no sooner,
            and when nothing else may come the request ends: also where `ignore_eos` or
            `min_tokens` ask for more. `stop` and `stop_token_ids` may end it sooner.
        reference: A text, or its token ids, that the output is expected to repeat in parts, beside
            the prompt: drafts come from it where the engine speculates (`EngineConfig.speculate`,
            method `ngram`). It changes no token.
        adapter: Name of the adapter that it runs with (`Engine.load_adapter`); None for none.

    Raises:
        RequestError: a value is not allowed; `param` names it.
    """

    max_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0, le=MOST)
    top_k: int = Field(default=0, ge=0, lt=2**31)
    top_p: float = Field(default=1.0, ge=LEAST, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    logit_bias: Annotated[tuple[Bias, ...], BeforeValidator(_as_pairs)] = Field(
        default=(), max_length=MOST_BIASES
    )
    repetition_penalty: float = Field(default=1.0, ge=LEAST, le=MOST)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    stop: tuple[str, ...] = Field(default=(), strict=False)
    stop_token_ids: tuple[int, ...] = Field(default=(), strict=False)
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=100)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=100)
    prompt_logprobs_start: int = Field(default=0, ge=0)
    constraint: Constraint | None = None
    reference: str | tuple[int, ...] = ""
    adapter: str | None = None

    def model_post_init(self, context: object, /) -> None:
        """Check what no single value's limits tell."""
        if 0 < self.temperature < LEAST:
            raise refused(
                "temperature", f"found {self.temperature}; give 0, for greedy, or from {LEAST} on"
            )
        if "" in self.stop:
            raise refused("stop", "an empty text would end every output at once")
        if self.min_tokens > self.max_tokens:
            raise refused(
                "min_tokens",
                f"found {self.min_tokens}, but the output has at most {self.max_tokens} tokens "
                "(given, by default, or what the model's length leaves); lower it, or allow more",
            )
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            raise refused("logit_bias", "a token is there twice; give each once")


class ListView(Sequence[Item]):
    """The first items of a list that is only ever appended to; none is copied."""

    def __init__(self, items: list[Item], count: int) -> None:
        self._items, self._count = items, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        own = range(self._count)[index]
        return self._items[own] if isinstance(own, int) else [self._items[i] for i in own]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, ListView)) and list(self) == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  (equal to lists, which have none)

    def __repr__(self) -> str:
        return repr(list(self))


@dataclass
class RequestOutput:
    """State of a request after a step; while it runs, sequences are views that cost nothing.

    Attributes:
        token_ids: Generated tokens so far, an end token included.
        pieces: Their text so far, piece by piece; see `text`. That of a request that has ended is
            decoded when it is first looked at.
        returned: How many of them the request's previous output returned; see `delta`.
        finish_reason: `stop` (end token or stop text), `length`, `abort`, `error`; None before.
        error: Why, where the reason is `error`.
        param: The parameter whose fault that is, if one's: a constraint shows only after its
            request was queued that it cannot be compiled.
        logprobs: For each generated token, {token: log probability}.
        prompt_logprobs: {token: log probability} for each prompt token but the first, which has
            none.
        arrival: When it was added, seconds of `time.perf_counter`.
        token_times: When each token was there, in the same seconds.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: Sequence[int] = ()
    pieces: Sequence[str] = ()
    returned: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    param: str | None = None
    logprobs: Sequence[dict[int, float]] | None = None
    prompt_logprobs: Sequence[dict[int, float] | None] | None = None
    arrival: float = 0.0
    token_times: Sequence[float] = ()

    @property
    def text(self) -> str:
        """The text of the tokens, without a stop text.

        While unfinished, what can still turn out to be the start of a stop text or half of a
        character is held back.
        """
        return "".join(self.pieces)

    @property
    def delta(self) -> str:
        """What the text gained since the request's previous output."""
        return "".join(self.pieces[self.returned :])

    @property
    def finished(self) -> bool:
        """Whether no more will come."""
        return self.finish_reason is not None


def check_tokens(tokens: Sequence[int], vocabulary: int, param: str) -> None:
    """Check that a model knows the token ids of a parameter.

    Raises:
        RequestError: it does not.
    """
    bad = [t for t in tokens if not (isinstance(t, int) and 0 <= t < vocabulary)]
    if bad:
        raise refused(param, f"token {bad[0]!r} is not in the vocabulary of {vocabulary}")


def check_prompt(
    tokens: Sequence[int], length: int, positions: int, vocabulary: int, room: int = 1
) -> None:
    """Check the token ids of a prompt.

    Args:
        length: Most tokens of prompt and output.
        positions: Most tokens that the model allows.
        vocabulary: Tokens that it knows.
        room: Tokens that must still fit after the prompt.

    Raises:
        RequestError: it is empty, too long or holds unknown tokens.
    """
    if not tokens:
        raise refused("prompt", "it is empty; give at least one token")
    if len(tokens) + room > length:
        or_raise = f", or raise max_model_len up to {positions}" if length < positions else ""
        raise RequestError(
            f"prompt: {len(tokens)} tokens leave no room in max_model_len {length}; "
            f"shorten it{or_raise}",
            "prompt",
        )
    check_tokens(tokens, vocabulary, "prompt")


def check_unicode(text: str) -> None:
    """Check that a tokenizer can read a text.

    Raises:
        RequestError: it is no Unicode.
    """
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise RequestError(
            "prompt: it holds half a surrogate pair, such as bytes that are no UTF-8 leave; "
            "give Unicode text",
            "prompt",
        )


Logprobs = Mapping[int, float]


@dataclass
class StepResult:
    """What a step gave: one object a step instead of one a request.

    Attributes:
        names: Requests that gained a token; one is there as often as it gained one, in order.
        tokens: The token that each of them gained, in the order of `names`.
        logprobs: Of requests that want them: the name and {token: log probability} for each of
            their tokens, in order.
        prompt_logprobs: Of requests that want them, once all of a prompt's are known: an entry for
            each of its tokens, None for the first.
        candidates: Of requests that are held (`Engine.hold`) and wait for their next token: {token:
            log probability} of the likeliest, most likely first.
        drafts: Of requests that had drafts in the step: the name, how many, and how many of them
            came; these are the first of the tokens that it gained.
        found: Of requests that began: how many tokens of the prompt the prefix cache held.
    """

    names: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[str, Logprobs]] = field(default_factory=list)
    prompt_logprobs: dict[str, Sequence[Logprobs | None]] = field(default_factory=dict)
    finished: list[RequestOutput] = field(default_factory=list)
    candidates: dict[str, Logprobs] = field(default_factory=dict)
    drafts: list[tuple[str, int, int]] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.names or self.finished or self.candidates)

    def split(self, names: Set[str]) -> tuple[StepResult, StepResult]:
        """What it tells of some requests, and of the others; without candidates."""
        parts = StepResult(), StepResult()
        for name, token in zip(self.names, self.tokens, strict=True):
            part = parts[name not in names]
            part.names.append(name)
            part.tokens.append(token)
        for name, own in self.logprobs:
            parts[name not in names].logprobs.append((name, own))
        for name, all_of_prompt in self.prompt_logprobs.items():
            parts[name not in names].prompt_logprobs[name] = all_of_prompt
        for output in self.finished:
            parts[output.request_id not in names].finished.append(output)
        for own in self.drafts:
            parts[own[0] not in names].drafts.append(own)
        for name, count in self.found.items():
            parts[name not in names].found[name] = count
        return parts

    def __iadd__(self, other: StepResult) -> StepResult:
        """Take what another part of the same step gave."""
        self.names += other.names
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.prompt_logprobs |= other.prompt_logprobs
        self.finished += other.finished
        self.candidates |= other.candidates
        self.drafts += other.drafts
        self.found |= other.found
        return self
