"""`python -m inference.bench`: the command of `inference.bench.command`."""

from formats.command import run_command
from inference.bench.command import main

if __name__ == "__main__":
    raise SystemExit(run_command(main))
