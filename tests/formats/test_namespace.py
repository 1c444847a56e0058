"""Modules that are imported inside `later` are loaded with their first use, those outside at once."""

import gc
import subprocess
import sys

import pytest

from formats import namespace
from tests.test_import_order import ROOT

PROGRAM = """
import sys
from threading import Event, Thread
from formats.namespace import later

inside, done, seen = Event(), Event(), []


def elsewhere():
    inside.wait()
    import colorsys
    seen.append(colorsys.rgb_to_hls is not None and "colorsys" in sys.modules)
    done.set()


thread = Thread(target=elsewhere)
thread.start()
with later():
    inside.set()
    done.wait()
    import fractions
    import xml.dom.minidom as minidom
    from xml.etree import ElementTree
thread.join()
print(seen, [n in sys.modules for n in ("fractions", "xml.dom.minidom", "xml.etree.ElementTree")])
print(fractions.Fraction(2, 4), minidom.parseString("<a/>").toxml()[-4:], ElementTree.Element("b").tag)
print([n in sys.modules for n in ("fractions", "xml.dom.minidom", "xml.etree.ElementTree")])
import wave
print("wave" in sys.modules)
"""


def test_modules_are_loaded_with_their_first_use():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert run.stdout.splitlines() == [
        "[True] [False, False, False]",
        "1/2 <a/> b",
        "[True, True, True]",
        "True",
    ]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_while_a_module_is_loaded(enabled, monkeypatch):
    seen = []
    monkeypatch.setattr(namespace, "import_module", lambda name: seen.append(gc.isenabled()))
    (gc.enable if enabled else gc.disable)()
    try:
        namespace.load_module("wave")
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        gc.enable()
