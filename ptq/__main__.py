"""`python -m ptq` is the command `ptq`."""

from ptq.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
