"""The adapters of an engine: what is loaded, by name, and in which slots.

An adapter (LoRA, `formats.adapters`) is held beside the weights, in a slot of tables that the
kernels read; each row of a step has the slot of its request's adapter. One of prefix tuning gives K
and V of tokens before the prompt, which are written into the cache. What is computed with one is
found in the cache by requests of the same adapter alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from formats.adapters import read_lora
from formats.adapters.prefix import read_prefix
from formats.adapters.settings import PrefixSettings, adapter_folder, read_settings
from formats.checkpoint.read import Checkpoint
from formats.errors import EngineError, RequestError
from formats.families.registry import block_names
from inference.models.adapters import AdapterStore, CachedPrefix, CachedTokens, lay_out
from inference.scheduling.blocks import Fill

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


class Adapters:
    """What is loaded.

    Args:
        checkpoint: The base.
        model: The base as it runs.
        store: Gives what holds adapters on the model's device; EngineError where none run with it.
    """

    def __init__(
        self, checkpoint: Checkpoint, model: Any, store: Callable[[], AdapterStore]
    ) -> None:
        self._checkpoint, self._model, self._store = checkpoint, model, store
        self._slots: dict[str, int] = {}
        self._paths: dict[str, Path] = {}
        self._prefixes: dict[int, CachedPrefix] = {}  # by slot

    @property
    def paths(self) -> dict[str, Path]:
        """The folder of each, by name."""
        return dict(self._paths)

    def load(self, name: str, path: str | Path, *, no_prefixes: str | None = None) -> int:
        """Read an adapter and hold it; gives its slot.

        Args:
            name: Its name.
            path: Its folder, or its name on the hub.
            no_prefixes: Why none of prefix tuning runs here; None where they do.

        Raises:
            RequestError: the name is used, or is none.
            CheckpointError: it is damaged, or of another base.
            EngineError: none are run with this model, or the device's memory is too small.
        """
        store = self._store()
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            raise RequestError(
                f"adapter: found the name {name!r}; allowed are letters, digits and . _ : / -, at "
                "most 128, a letter or digit first",
                "adapter",
            )
        if name in self._slots:
            raise RequestError(
                f"adapter: {name!r} is loaded already, from {self._paths[name]}; unload it first, "
                "or choose another name",
                "adapter",
            )
        folder = adapter_folder(path)
        settings, prefix, parts = read_settings(folder), None, {}
        if isinstance(settings, PrefixSettings):
            if no_prefixes is not None:
                raise EngineError(f"adapter: {folder} is of prefix tuning: {no_prefixes}")
            found = read_prefix(folder, settings, self._checkpoint)
            prefix = CachedPrefix(self._model.config, found)
        else:
            lora = read_lora(folder, self._checkpoint)
            parts = lay_out(self._model, block_names(self._checkpoint.config), lora)
        slot = next(i for i in count() if i not in self._slots.values())
        store.put(slot, parts)
        if prefix is not None:
            self._prefixes[slot] = prefix
        self._slots[name], self._paths[name] = slot, Path(path)
        return slot

    def unload(self, name: str) -> None:
        """Forget an adapter, which nothing runs with; its slot is the next one's.

        Raises:
            RequestError: there is none of that name.
        """
        slot = self.slot_of(name)
        del self._slots[name], self._paths[name]
        self._prefixes.pop(slot, None)
        self._store().put(slot, {})

    def given(self, slot: int) -> int:
        """Tokens before a prompt whose K and V the adapter in a slot gives."""
        return len(self._prefixes[slot]) if slot in self._prefixes else 0

    def tokens(self, fill: Fill) -> CachedTokens:
        """The tokens of an adapter's prefix that a part of the cache is to hold."""
        return self._prefixes[fill.adapter].tokens(fill.start, fill.slots)

    def slot_of(self, name: str) -> int:
        """Where an adapter is.

        Raises:
            RequestError: there is none of that name.
        """
        if name not in self._slots:
            loaded = ", ".join(self._slots) or "none"
            raise RequestError(
                f"adapter: found {name!r}; loaded: {loaded}. Load it by `Engine.load_adapter`, or "
                "--adapter NAME=FOLDER of the commands",
                "adapter",
            )
        return self._slots[name]
