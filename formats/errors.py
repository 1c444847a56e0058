"""The project's error types.

Every message says what was found, what is allowed, and how to fix it. They live here because
`formats` is the ground that every other package may import.
"""


class PTQError(Exception):
    """Base of every error that is the user's to act on; the commands print it without a trace."""


class RecipeError(PTQError):
    """A recipe, its data or its model cannot be used as asked."""


class CheckpointError(PTQError):
    """A checkpoint is damaged, incomplete or of a kind this project does not read."""


class RequestError(PTQError):
    """One generation request is invalid; the engine goes on.

    Args:
        message: What was found, what is allowed, how to fix it.
        param: Name of the offending request field, if there is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineError(PTQError):
    """The engine cannot go on: an invariant of its own was broken or a step failed."""
