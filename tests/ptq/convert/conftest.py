"""Quantized tiny Llamas and their conversions, made once for all tests of conversions."""

from collections.abc import Callable
from pathlib import Path

import pytest

from formats.scheme import PRESETS, Scheme, WeightSpec
from ptq.convert.convert import convert
from tests.conftest import write_quantized

SCHEMES = {
    "w4_g32": WeightSpec(dtype="int4", granularity="group", group_size=32),
    "w4_asym": WeightSpec(dtype="int4", granularity="group", group_size=32, symmetric=False),
    "w4_channel": WeightSpec(dtype="int4"),
    "w8_asym_g64": WeightSpec(dtype="int8", granularity="group", group_size=64, symmetric=False),
}
ALL_SCHEMES = SCHEMES | {
    "w8_g64": WeightSpec(dtype="int8", granularity="group", group_size=64)
}  # with what only libraries are asked to run


@pytest.fixture(scope="session")
def quantized(tiny_llama, make_quantized, tmp_path_factory) -> Callable[[str], Path]:
    """Factory of quantized tiny Llamas, by preset or by a name of ALL_SCHEMES."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in ALL_SCHEMES:
            return make_quantized(tiny_llama, name)
        if name not in made:
            out = tmp_path_factory.mktemp("source") / name
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(PRESETS, name, Scheme(weights=ALL_SCHEMES[name]))
                made[name] = write_quantized(tiny_llama, out, name)
        return made[name]

    return make


@pytest.fixture(scope="session")
def converted(quantized, tmp_path_factory) -> Callable[[str, str], Path]:
    """Factory of converted folders."""
    made: dict[tuple[str, str], Path] = {}

    def make(name: str, target: str) -> Path:
        if (name, target) not in made:
            out = tmp_path_factory.mktemp("converted") / target
            convert(quantized(name), out, target)
            made[name, target] = out
        return made[name, target]

    return make
