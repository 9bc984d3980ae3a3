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


MAX_SHOWN_CHARS = 120


def shown(value: object) -> str:
    """A value as a message shows it: on one line, and cut where it goes on and on."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return f"a {type(value).__name__} of more digits than can be written"
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def own_words(message: str) -> str:
    """What one of our validators said, without pydantic's words in front of it."""
    return message.removeprefix("Value error, ")
