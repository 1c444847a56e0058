"""What is not taken: a call that ends in an error is one line of a test."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from formats.errors import CheckpointError, RecipeError, RequestError


def refused_by(error: type[Exception], message: str, call: Callable, *given: Any, **named: Any):
    """The call with these arguments is an error that says so; `message` is a regular expression."""
    with pytest.raises(error, match=message):
        call(*given, **named)


refused = partial(refused_by, ValueError)
refused_checkpoint = partial(refused_by, CheckpointError)
refused_recipe = partial(refused_by, RecipeError)
refused_request = partial(refused_by, RequestError)
