"""`python -m ptq.sweep.child PARENT ARGUMENT...`: `ptq` as a task of a sweep.

It ends with the process PARENT, so that a sweep or a node that is killed leaves nothing that works
in an output folder.
"""

from __future__ import annotations

import runpy
import sys

from formats.parent import end_with

if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    sys.argv[:2] = ["ptq"]
    runpy.run_module("ptq", run_name="__main__")
