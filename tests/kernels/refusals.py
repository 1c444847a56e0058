"""What kernels do not take."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(message: str, call: Callable, *given: Any, **named: Any) -> None:
    """A call with these arguments is a ValueError that says so; `message` is a regular expression."""
    with pytest.raises(ValueError, match=message):
        call(*given, **named)
