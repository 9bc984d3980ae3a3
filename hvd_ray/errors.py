"""Errors that a user can mend, kept apart from faults of our own.

The command line prints a `UserError` as one line and exits with 2; the server turns it into a
4xx. Anything else is a bug and keeps its traceback.
"""


class UserError(ValueError):
    """Input or environment that the user can mend.

    The message says what happened, what was expected and what to type next, in one line.
    """


class NotSupportedError(UserError):
    """A request that is understood but that this engine or configuration cannot serve."""

    def __init__(self, what: str) -> None:
        super().__init__(f"not supported: {what}")


def own_words(message: str) -> str:
    """What one of our validators said, without pydantic's words in front of it."""
    return message.removeprefix("Value error, ")
