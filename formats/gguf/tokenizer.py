"""The tokenizer of a .gguf file, as the files that transformers reads.

Two kinds are read. `gpt2`: byte-level BPE (Sennrich et al. 2016; Radford et al. 2019) with merges,
and a name, `tokenizer.ggml.pre`, of the rule that cuts text into words first. `llama`:
SentencePiece's BPE (Kudo and Richardson 2018), which has no merges but a score for each token: of
two neighbours whose union is a token, those of the highest score merge first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from formats.errors import CheckpointError
from formats.gguf.file import GgufFile
from formats.namespace import later
from formats.scheme import either

with later():
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
"""Tokens that tokenizer_config.json names, by their key in a file."""
ENDS = ("eos", "eot", "eom")  # tokens that end an answer
SPACE = "\u2581"  # in the place of a space, of SentencePiece

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Rule:
    """How a byte-level tokenizer cuts text into words.

    Attributes:
        patterns: Regular expressions, each applied to what the one before has left whole.
        whole_words: Whether a word that is a token is one, whatever merges say.
        begins: Whether BOS stands first where the file does not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    begins: bool = False


_BY_THREES = f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_REST}"
_ONE_BY_ONE = f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_REST}"
_DIGITS = Rule((r"\p{N}", _GPT2))
RULES: dict[str, Rule] = {
    "llama-bpe": Rule((_BY_THREES,), whole_words=True, begins=True),
    "dbrx": Rule((_BY_THREES,)),
    "smaug-bpe": Rule((_BY_THREES,)),
    "glm4": Rule((_BY_THREES,), whole_words=True),
    "chatglm-bpe": Rule((_BY_THREES,)),
    "qwen2": Rule((_ONE_BY_ONE,)),
    "deepseek-r1-qwen": Rule((_ONE_BY_ONE,)),
    "stablelm2": Rule((_ONE_BY_ONE,)),
    "tekken": Rule((f"{_CASED}|\\p{{N}}|{_SLASHED}",), whole_words=True, begins=True),
    "gpt-2": Rule((_GPT2,)),
    "olmo": Rule((_GPT2,)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
}
RULES["llama3"] = RULES["llama-v3"] = RULES["llama-bpe"]


def tokenizer_documents(file: GgufFile) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json, generation_config.json and the chat template.

    Returns:
        What each holds, by its name; no template where the file has none.

    Raises:
        CheckpointError: the kind of tokenizer or its rule is not known, or parts are missing.
    """
    tokens = file.array("tokenizer.ggml.tokens", str)
    usual = [NORMAL] * len(tokens)
    kinds = file.array("tokenizer.ggml.token_type", int, len(tokens), usual)
    model = file.value("tokenizer.ggml.model", str)
    if model == "gpt2":
        made, begins = _byte_level(file, tokens)
    elif model == "llama":
        made, begins = _sentencepiece(file, tokens, kinds)
    else:
        raise CheckpointError(
            f"{file.path}: found a tokenizer of the kind {model!r}; read are gpt2 and llama. Give "
            "the folder of the original model"
        )
    made.add_special_tokens(
        [_added(t) for t, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, UNKNOWN)]
    )
    made.add_tokens(
        [_added(t, False) for t, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    )
    _require_ids(file, made, tokens)
    bos = _token(file, "bos", tokens)
    begins = file.value("tokenizer.ggml.add_bos_token", bool, begins) and bos is not None
    if begins:
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokens.index(bos))],
        )
    documents = {"tokenizer.json": made.to_str(pretty=False)} | _settings(file, tokens, begins)
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        documents["chat_template.jinja"] = template
    return {name: text.encode() for name, text in documents.items()}


def _settings(file: GgufFile, tokens: list[str], begins: bool) -> dict[str, str]:
    """tokenizer_config.json and generation_config.json."""
    named = {own: _token(file, key, tokens) for key, own in SPECIAL.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.count("{arch}.context_length"),
        "add_bos_token": begins,
    } | {key: text for key, text in named.items() if text is not None}
    ids = {key: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ENDS}
    generation: dict[str, Any] = {
        "eos_token_id": sorted({i for i in ids.values() if i is not None})
    }
    if named["bos_token"] is not None:
        generation["bos_token_id"] = tokens.index(named["bos_token"])
    return {
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }


def token_ids(file: GgufFile) -> dict[str, int | None]:
    """The tokens that config.json names: bos, eos and pad."""
    keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {
        f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in keys.items()
    }


def _added(text: str, special: bool = True) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, special=special, normalized=False)


def _token(file: GgufFile, key: str, tokens: list[str]) -> str | None:
    name = f"tokenizer.ggml.{key}_token_id"
    if name not in file.metadata:
        return None
    found = file.value(name, int)
    if not 0 <= found < len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.{key}_token_id is {found}; there are {len(tokens)} "
            "tokens. Get the file again"
        )
    return tokens[found]


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer of a file with merges, and whether BOS stands first by its rule."""
    name = file.value("tokenizer.ggml.pre", str, "")
    rule = RULES.get(name)
    if rule is None:
        raise CheckpointError(
            f"{file.path}: found the rule {name!r} in tokenizer.ggml.pre; known are "
            f"{either(sorted(RULES))}. Give the folder of the original model"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for pair in file.array("tokenizer.ggml.merges", str):
        left, _, right = pair.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise CheckpointError(
                f"{file.path}: found the merge {pair!r} in tokenizer.ggml.merges, of what are no "
                "tokens; get the file again"
            )
        merges.append((left, right))
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.whole_words)
    )
    made.pre_tokenizer = _cutter(rule)
    made.decoder = decoders.ByteLevel()
    return made, rule.begins


def _cutter(rule: Rule) -> pre_tokenizers.Sequence:
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        for pattern in rule.patterns
    ]
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, whole])


def cuts_by(rule: Rule, text: str) -> list[str]:
    """The words that a rule cuts a text into, bytes written as byte-level BPE writes them."""
    return [word for word, _ in _cutter(rule).pre_tokenize_str(text)]


def _sentencepiece(
    file: GgufFile, tokens: list[str], kinds: list[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer of a file with scores, and whether BOS stands first if it does not say."""
    scores = file.array("tokenizer.ggml.scores", float, len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = _token(file, "unknown", tokens)
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, scores, kinds),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = file.value("tokenizer.ggml.add_space_prefix", bool, True)
    first = [normalizers.Prepend(SPACE)] if prefixed else []
    made.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    return made, True


def _merges(vocab: dict[str, int], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """All pairs of tokens whose union is a token, those of the highest score first."""
    pairs: list[tuple[float, int, tuple[str, str]]] = []
    for token, i in vocab.items():
        if kinds[i] not in (NORMAL, UNUSED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                pairs.append((-scores[i], i, (left, right)))
    pairs.sort(key=lambda pair: pair[:2])
    return [pair for *_, pair in pairs]


def _require_ids(file: GgufFile, made: tokenizers.Tokenizer, tokens: list[str]) -> None:
    found = made.get_vocab_size(with_added_tokens=True)
    if found != len(set(tokens)):
        raise CheckpointError(
            f"{file.path}: its tokenizer was rebuilt with {found} tokens; the file has "
            f"{len(set(tokens))}. Give the folder of the original model"
        )
