"""`python -m ptq.report`: the command of `ptq.report.report`."""

from formats.command import run_command
from ptq.report.report import main

if __name__ == "__main__":
    raise SystemExit(run_command(main))
