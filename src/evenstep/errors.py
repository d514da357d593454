"""The one exception that is the user's to mend: it is shown as one line, without a traceback."""

from collections.abc import Iterable


class UserError(ValueError):
    """What is wrong, what is valid and what to do, in one line."""


def unknown(kind: str, name: object, valid: Iterable[str], where: str = "") -> UserError:
    """The sentence for a name that does not exist, with those that do."""
    place = f" for {where}" if where else ""
    return UserError(f"no {kind} {name}{place}; there are {', '.join(valid)}")
