"""Child processes that Ctrl-C reaches, whatever started the tests."""

import signal


def take_interrupts() -> None:
    """For `preexec_fn`: SIGINT ends the child again.

    A shell has what it runs in the background ignore it, and children inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
