"""Bars on a terminal, lines elsewhere, nothing where nothing is to be shown."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from tests.test_import_order import ROOT

COUNT = """
import sys, time
from formats import command as progress
progress.SECONDS = 0.05
for i in progress.bar(range(4), title="Comparing", unit="sequence", shown=sys.argv[1] == "shown"):
    time.sleep(0.06)
    if i == 2:
        progress.say("a line")
"""


def printed(shown: str, terminal: bool) -> str:
    """Standard error of a process that counts to four."""
    command = [sys.executable, "-c", COUNT, shown]
    if not terminal:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with subprocess.Popen(command, cwd=ROOT, stderr=theirs) as process:
        os.close(theirs)
        found = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            found += part
        process.wait()
    os.close(ours)
    return found.decode()


def test_lines_without_carriage_returns_where_there_is_no_terminal():
    found = printed("shown", terminal=False)
    assert "\r" not in found
    assert "a line\n" in found
    lines = [line for line in found.splitlines() if line != "a line"]
    assert all(line.startswith("Comparing: ") for line in lines)
    assert lines[-1].startswith("Comparing: 4 of 4, 00:0")


def test_a_bar_on_a_terminal():
    found = printed("shown", terminal=True)
    assert "\rComparing: " in found
    assert "100%" in found
    assert "a line" in found


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_where_nothing_is_to_be_shown(terminal):
    assert printed("hidden", terminal).strip() == "a line"
