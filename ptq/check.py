"""`python -m ptq.check`: the command of `ptq.commands.check`."""

from formats.command import run_command
from ptq.commands.check import main

if __name__ == "__main__":
    raise SystemExit(run_command(main))
