"""`python -m ptq.report`: the command of `ptq.commands.report`."""

from formats.command import run_command
from ptq.commands.report import main

if __name__ == "__main__":
    raise SystemExit(run_command(main))
