"""Bodies of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with the fields of vLLM's."""

from __future__ import annotations

from pydantic import Field

from inference.server.schema.common import Body


class UnloadAdapterBody(Body):
    """An adapter that is loaded.

    Attributes:
        lora_name: What requests call it as their `model`.
    """

    lora_name: str = Field(min_length=1, max_length=128)


class LoadAdapterBody(UnloadAdapterBody):
    """An adapter that is to be loaded.

    Attributes:
        lora_name: What requests will call it as their `model`.
        lora_path: Its folder on the server's machine, as PEFT saves it.
    """

    lora_path: str = Field(min_length=1, max_length=4096)
