"""From text or messages to the token ids of a prompt, through the chat template or without it.

A template writes all special tokens that a prompt has, its BOS token included: what it renders is
tokenized without adding any; see `formats.chat_tokens` for what messages hold of them.
Text that no template renders gets those that the tokenizer adds, but for those that it begins with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from formats.chat_template import has_chat_template, text_tokens
from formats.chat_tokens import ChatEncoder
from formats.errors import RequestError
from inference.requests.request import check_unicode

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class PromptFormat:
    """How prompts are written for a model.

    Attributes:
        tokenizer: A transformers tokenizer.
        template: Whether its chat template renders them.
        system: The system message of chats that bring none.
        note: What becomes of prompts, in words.
        chats: Encodes chats.
    """

    tokenizer: Any
    template: bool
    note: str
    chats: ChatEncoder
    system: str | None = None

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        *,
        raw: bool = False,
        system: str | None = None,
        special_tokens_in_content: bool = False,
    ) -> PromptFormat:
        """The format of a tokenizer: by its chat template where it has one, unless `raw`.

        Texts of messages hold control tokens only by `special_tokens_in_content`.

        Raises:
            RequestError: there is a system message without a template, or it is refused.
        """
        template = has_chat_template(tokenizer) and not raw
        if template:
            note = "prompts go through the model's chat template; --raw leaves it off"
        elif raw:
            note = "prompts are completed as they stand"
        else:
            note = "the model has no chat template: prompts are completed as they stand"
        chats = ChatEncoder(tokenizer, special_tokens_in_content=special_tokens_in_content)
        return cls(tokenizer, template, note, chats).with_system(system)

    def with_system(self, system: str | None) -> PromptFormat:
        """The same with another system message, or none.

        Raises:
            RequestError: there is no template, or it refuses system messages.
        """
        changed = replace(self, system=system)
        if system is not None:
            if not self.template:
                raise RequestError(
                    "system: a system message needs the model's chat template; leave it out, or "
                    "write it into the prompt",
                    "system",
                )
            changed.tokens([{"role": "user", "content": "Hello"}])
        return changed

    def tokens(self, prompt: str | Messages) -> list[int]:
        """Token ids of a text, which with a template is a user's message, or of a chat.

        Raises:
            RequestError: it is empty or no Unicode, the template refuses it, or a chat meets none.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("prompt: it is empty; give some text", "prompt")
            if not self.template:
                check_unicode(prompt)
                return text_tokens(self.tokenizer, prompt)
            prompt = [{"role": "user", "content": prompt}]
        if not self.template:
            raise RequestError(
                "messages: they need a chat template, which the model lacks or --raw leaves off; "
                "give text instead",
                "messages",
            )
        if self.system is not None and prompt[0]["role"] != "system":
            prompt = [{"role": "system", "content": self.system}, *prompt]
        try:
            return self.chats.tokens(prompt, answer=True, check=check_unicode)
        except ValueError as error:
            roles = ", ".join(str(message["role"]) for message in prompt)
            raise RequestError(
                f"messages ({roles}): {error}. Change them, or complete text without a template: "
                "`ptq predict --raw`",
                "messages",
            ) from error

    def continuation_tokens(self, text: str) -> list[int]:
        """Token ids of a text that follows a prompt: encoded on its own, without special tokens.

        Raises:
            RequestError: it is no Unicode.
        """
        check_unicode(text)
        options = {"add_special_tokens": False, "verbose": False}  # no word on its length
        return list(self.tokenizer(text, **options)["input_ids"])
