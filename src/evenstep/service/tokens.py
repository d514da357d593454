"""The word that lets a client in: one token for the whole service, sent with each call."""

import hmac
from collections.abc import Iterable
from pathlib import Path

from evenstep.errors import UserError

SHORTEST = 16  # letters
HEADER = "authorization"
_SCHEME = "Bearer "


def read(path: Path | None) -> str:
    """The token in a file; empty where there is no file."""
    if path is None:
        return ""
    try:
        token = path.expanduser().read_text(encoding="ascii").strip()
    except OSError as error:
        raise UserError(f"the token file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        token = ""
    if len(token) < SHORTEST or not token.isprintable() or " " in token:
        raise UserError(
            f"{path} holds no token: {SHORTEST} letters or more, in one word; to make one: "
            f"python -c 'import secrets; print(secrets.token_urlsafe())' > {path}"
        )
    return token


def header(token: str) -> tuple[tuple[str, str], ...]:
    """What a client sends along with each call."""
    return ((HEADER, _SCHEME + token),) if token else ()


def admits(token: str, given: Iterable[str | bytes]) -> bool:
    """Whether one of these headers is the right one; how long that takes tells nothing about the token."""
    wanted = (_SCHEME + token).encode()
    found = [hmac.compare_digest(wanted, one.encode() if isinstance(one, str) else one) for one in given]
    return not token or any(found)
