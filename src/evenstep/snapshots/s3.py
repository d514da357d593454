"""How S3 is asked, so that a store that is silent is found out, however it is silent.

By themselves botocore and s3fs each try a request five times. And as botocore wants to be told to go on before it
sends a file, and aiohttp waits for that without limit, a request to a store that says nothing would never end.
"""

from typing import Any

import aiohttp
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession

TRIES = 2
CONNECTED_WITHIN, ANSWERED_WITHIN, DONE_WITHIN = 5.0, 15.0, 180.0  # seconds: the last for a block of a file


class _Bounded(AIOHTTPSession):  # type: ignore[misc]
    """Every request ends within its time, whatever it waits for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timeout = aiohttp.ClientTimeout(
            total=DONE_WITHIN, sock_connect=CONNECTED_WITHIN, sock_read=ANSWERED_WITHIN
        )


def options() -> dict[str, Any]:
    """What fsspec hands on to s3fs."""
    session = AioSession()
    session.register("before-call.s3", _send_at_once)
    retries = {"mode": "standard", "total_max_attempts": TRIES}
    return {"session": session, "config_kwargs": {"retries": retries, "http_session_cls": _Bounded}}


def _send_at_once(params: dict[str, Any], **others: Any) -> None:
    del others
    params["headers"].pop("Expect", None)
