"""Text that is decoded late, many tokens at once, is that of one token after another."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from inference.requests.detokenizer import Detokenizer, LateText, decodes_bytes

TEXT = "naïve 你好 🙂 don't stop , now . \ufffd x"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def wrapped(backend: Tokenizer, **settings) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.add_tokens(["é!"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def bytewise(**settings) -> PreTrainedTokenizerFast:
    """As of Llama 3 and Qwen: tokens are bytes, and some pairs of them."""
    pairs = [(a, b) for a in BYTES[200:216] for b in BYTES[200:216]]
    words = BYTES + [a + b for a, b in pairs]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend, **settings)


def spaced() -> PreTrainedTokenizerFast:
    """As of Llama 2: a space before words, of which the first is left out; bytes by name."""
    words = ["▁", "▁a", "▁the", "b", ".", "▁."] + [f"<0x{i:02X}>" for i in range(256)]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return wrapped(backend)


def tidied() -> PreTrainedTokenizerFast:
    """As of BERT: pieces of words, and no space before a full stop."""
    words = ["[UNK]", "do", "n", "'", "t", ".", "##a", "##b", "x"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}))
    backend.decoder = decoders.WordPiece()
    return wrapped(backend, clean_up_tokenization_spaces=True)


KINDS = {"bytes": bytewise, "spaces": spaced, "tidied": tidied}


def some_tokens(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[int]:
    """Of a text, and of none: characters break off, special tokens stand among them."""
    ids = [tokenizer.convert_tokens_to_ids(c) for c in BYTES]
    of_text = [
        ids[BYTES.index(c)] for c in pre_tokenizers.ByteLevel(False).pre_tokenize_str(TEXT)[0][0]
    ]
    count = len(tokenizer)
    noise = [rng.randrange(count) for _ in range(rng.randint(0, 30))]
    start = rng.randrange(len(of_text))
    return [t for t in [*of_text[start:], *noise, count - 2, *of_text[:start]] if t is not None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(20))
def test_many_tokens_at_once_have_the_text_of_one_by_one(kind, seed):
    rng, tokenizer = random.Random(seed), KINDS[kind]()
    tokens = some_tokens(tokenizer, rng)
    for stop in ((), ("don't", "now")):
        slow, fast, start = Detokenizer(tokenizer, stop), Detokenizer(tokenizer, stop), 0
        while start < len(tokens):
            part = tokens[start : start + rng.choice([1, 2, 3, 9, 40])]
            start += len(part)
            for token in part:
                slow.add(token)
            fast.extend(part)
            assert "".join(fast.pieces) == "".join(slow.pieces)
            assert (fast.taken, fast.stopped) == (slow.taken, slow.stopped)
        late = LateText(Detokenizer(tokenizer, stop), tokens)
        for one in (slow, fast):
            one.finish()
        assert "".join(fast.pieces) == "".join(slow.pieces) == "".join(late)


def test_which_tokens_are_bytes():
    assert decodes_bytes(bytewise())
    assert decodes_bytes(bytewise(clean_up_tokenization_spaces=True)), "which is left out for BPE"
    assert not decodes_bytes(spaced())
    assert not decodes_bytes(tidied())

    class Own(PreTrainedTokenizerFast):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).upper()

    assert not decodes_bytes(Own(tokenizer_object=bytewise().backend_tokenizer))


def test_a_whole_output_is_decoded_at_once_and_only_where_it_is_read():
    tokenizer, calls = bytewise(), []

    class Counted(Detokenizer):
        def _decode(self, begin, end):
            calls.append(end - begin)
            return super()._decode(begin, end)

    late = LateText(Counted(tokenizer), [BYTES.index("a")] * 1000)
    assert calls == []
    assert "".join(late) == "a" * 1000
    assert len(calls) <= 4
