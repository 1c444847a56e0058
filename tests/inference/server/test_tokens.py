"""`/tokenize`, `/detokenize`, `/tokenizer_info`: what clients without the tokenizer need."""

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from inference.server.logprobs import TokenTexts
from tests.inference.server.http_client import TEMPLATE, ask, post, tokenizer


def test_texts_and_chats_become_tokens_and_tokens_texts():
    text = "def add(ä, b):"
    ids = tokenizer()(text)["input_ids"]
    told = post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert (told["tokens"], told["count"], told["max_model_len"]) == (ids, len(ids), 512)
    assert "bytes:\\xc3" in told["token_strs"]
    assert post("/detokenize", {"tokens": ids}).json() == {"prompt": text}
    assert post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    chat = post("/tokenize", {"messages": [{"role": "user", "content": "hello"}]}).json()
    assert chat["tokens"] == tokenizer()("user: hello\nassistant: ")["input_ids"]
    assert chat["token_strs"] is None
    for body in ({}, {"prompt": "a", "messages": []}):
        assert post("/tokenize", body).status_code == 400


def test_a_rendered_text_gets_no_second_bos():
    def begins() -> Any:
        made = tokenizer()
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        return made

    for text in ("hello", "<|endoftext|>hello"):
        told = post("/tokenize", {"prompt": text}, load_tokenizer=begins).json()["tokens"]
        assert told == [0, *tokenizer()("hello")["input_ids"]]


def test_an_evaluation_harness_finds_what_it_reads():
    info = ask("GET", "/tokenizer_info").json()
    assert info["eos_token"] == info["bos_token"] == info["pad_token"] == "<|endoftext|>"
    assert info["chat_template"] == TEMPLATE
    assert (info["model_max_length"], info["vocab_size"]) == (512, 384)
    body = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert post("/tokenize", body).json()["tokens"] == [tokenizer().eos_token_id]
    assert ask("GET", "/tokenizer_info", chat_template=None).json()["chat_template"] is None
    assert ask("GET", "/version").json()["version"]


class Pieces:
    """A tokenizer of SentencePiece's kind, as far as single tokens are read."""

    all_special_ids = (0,)
    added_tokens_decoder = {0: "<s>", 7: "▁added"}  # noqa: RUF012
    pieces = ("<s>", "▁hello", "lo", "<0xE2>", "<0x82>", "▁", "Ġ", "▁added")

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return self.pieces[token] if token < len(self.pieces) else None


@pytest.mark.parametrize(
    ("token", "text", "data"),
    [
        (0, "<s>", b"<s>"),
        (1, " hello", b" hello"),
        (2, "lo", b"lo"),
        (3, "bytes:\\xe2", b"\xe2"),
        (5, " ", b" "),
        (6, "Ġ", "Ġ".encode()),
        (7, "▁added", "▁added".encode()),
        (8, "", b""),
    ],
)
def test_pieces_are_read_as_text(token, text, data):
    texts = TokenTexts(Pieces())
    assert (texts.text(token), texts.bytes(token)) == (text, data)
    assert texts.shown(token) == (b"" if token == 0 else data)


def test_the_tokens_of_a_text_are_its_bytes():
    texts, text = TokenTexts(tokenizer()), "x = 'Grüße, 世界 🙂'\n\tÀ"
    ids = tokenizer()(text)["input_ids"]
    assert b"".join(map(texts.bytes, ids)).decode() == text
