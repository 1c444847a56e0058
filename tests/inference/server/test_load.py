"""Load for a while; `python -m tests.inference.server.load` is the same for longer."""

from pathlib import Path

import pytest

from tests.inference.server.load import load

DEFAULT_MODEL = Path(__file__).parents[3] / "recipes" / "tiny-python"


@pytest.mark.ci
def test_whoever_stays_gets_what_is_right_and_nothing_is_lost(make_quantized):
    checkpoint = make_quantized(DEFAULT_MODEL, "a8w8c8")
    options = ["--kv-blocks", "512"]  # soon written once: until then a cache takes more memory
    report = load(checkpoint, clients=200, seconds=45, leaving=0.3, seed=0, options=options)
    assert not report.wrong, report.wrong[0]
    assert not report.lost
    assert report.right > 200
    assert report.left["before the head"] > 20
    assert report.left["amid the stream"] > 20
    assert report.blocks["used"] == 0
    assert report.blocks["free"] + report.blocks["cached"] == report.blocks["total"]
    assert report.exit_code == 0
    growth = {name: report.growth(name) for name in report.megabytes}
    assert max(growth.values()) < 64, growth  # ten minutes are flat; the first one still grows
