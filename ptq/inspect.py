"""`python -m ptq.inspect`: the command of `ptq.commands.inspect`."""

from formats.command import run_command
from ptq.commands.inspect import main

if __name__ == "__main__":
    raise SystemExit(run_command(main))
