"""`python -m ptq.run`: the command of `ptq.commands.run`."""

from formats.command import run_command
from ptq.commands.run import main

if __name__ == "__main__":
    raise SystemExit(run_command(main))
