"""The statistics artifact: what calibration saw of every tensor, to be solved as often as wanted.

On disk: one safetensors file with the arrays of `TensorStatistics.state` under the name
`<module>/<role>/<array>`, occupied bins only, and their SHA-256 in its JSON header. Nothing in it
is code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from types import MappingProxyType

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from calibrate.tensor_statistics import Accumulator, TensorStatistics
from formats.errors import CheckpointError
from formats.files import replace_file

Key = tuple[str, str]  # full module name; "input", "k_cache", "v_cache", or `SINK_INPUT`
AFTER = " after "  # in a role, before the method that had changed the block when it was seen


class Statistics(MutableMapping[Key, TensorStatistics]):
    """Statistics by module and role, such as `("model.layers.0.mlp.up_proj", "input")`."""

    def __init__(self, of: Mapping[Key, TensorStatistics] = MappingProxyType({})) -> None:
        self._of = dict(of)
        self._open: dict[Key, Accumulator] = {}

    def __getitem__(self, key: Key) -> TensorStatistics:
        return self.gathered()[key]

    def __setitem__(self, key: Key, value: TensorStatistics) -> None:
        self.gathered()[key] = value

    def __delitem__(self, key: Key) -> None:
        del self.gathered()[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(sorted(self.gathered()))

    def __len__(self) -> int:
        return len(self.gathered())

    def observe(
        self,
        module: str,
        role: str,
        x: Tensor,
        *,
        histogram: bool = True,
        first: int = 0,
        samples: int = 1,
    ) -> None:
        """Add tokens [T, K] or [T, H, D] of a module's role; see `Accumulator.observe`.

        Raises:
            RecipeError: they hold NaN or infinity; of tokens on a GPU `gathered` raises it.
        """
        if (module, role) not in self._open:
            self._open[module, role] = Accumulator(tuple(x.shape[1:]), histogram=histogram)
        self._open[module, role].observe(x, module, first, samples)

    def gathered(self) -> dict[Key, TensorStatistics]:
        """All that was observed, in the host's memory.

        Raises:
            RecipeError: what was observed holds NaN or infinity.
        """
        for key in list(self._open):
            found = self._open.pop(key).statistics(key[0])
            if key in self._of:
                self._of[key].merge(found)
            else:
                self._of[key] = found
        return self._of

    def merge(self, other: Statistics) -> None:
        """Add what another pass, over other data or on another rank, has seen."""
        mine = self.gathered()
        for key, stats in other.items():
            if key not in mine:
                mine[key] = TensorStatistics(tuple(stats.channel_absmax.shape))
            mine[key].merge(stats)

    def below(self, name: str) -> Statistics:
        """Those of a module and of the modules in it."""
        return Statistics({k: own for k, own in self.items() if f"{k[0]}.".startswith(f"{name}.")})

    def marked(self, stage: str) -> Statistics:
        """The same, as seen after a method has changed the block: under `<role> after <stage>`."""
        return Statistics({(m, f"{role}{AFTER}{stage}"): own for (m, role), own in self.items()})

    def at(self, stage: str = "") -> Statistics:
        """What was seen after a method had changed the block; of the original model for ''."""
        parts = ((module, *role.partition(AFTER), own) for (module, role), own in self.items())
        return Statistics({(m, plain): own for m, plain, _, after, own in parts if after == stage})

    def save(self, path: Path) -> None:
        """Write the file; it is replaced at once or not at all."""
        arrays = {
            f"{module}/{role}/{name}": array.clone()
            for (module, role), stats in self.items()
            for name, array in stats.state().items()
        }
        replace_file(path, save(arrays, metadata=_header(arrays)))

    @classmethod
    def load(cls, path: Path) -> Statistics:
        """Read a file that `save` wrote.

        Raises:
            CheckpointError: it is missing, damaged or something else.
        """
        states: dict[Key, dict[str, Tensor]] = {}
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata()
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if header != _header(arrays):
                raise ValueError(f"found header {header}, its contents need {_header(arrays)}")
            for name, array in arrays.items():
                module, role, kind = name.rsplit("/", 2)
                states.setdefault((module, role), {})[kind] = array
            restored = cls({k: TensorStatistics.from_state(own) for k, own in states.items()})
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(
                f"{path}: not a statistics file ({error}). Run the recipe again to write it"
            ) from error
        return restored


def _header(arrays: Mapping[str, Tensor]) -> dict[str, str]:
    """What the file says of itself: its version, and the SHA-256 of names, shapes and contents.

    One entry, as safetensors writes several in no certain order.
    """
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {tuple(array.shape)}\n".encode())
        digest.update(array.contiguous().numpy().tobytes())
    about = {"version": 3, "sha256": digest.hexdigest()}
    return {"ptq_statistics": json.dumps(about)}
