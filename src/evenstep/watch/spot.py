"""EC2's notice that it takes a spot instance back, asked for where an instance asks about itself.

A notice of interruption, which comes two minutes before, is a request to stop. A recommendation to rebalance,
which may come earlier, is a reason for a snapshot at once.
"""

import contextlib
import functools
import http.client
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from urllib.parse import urlsplit

from evenstep import world
from evenstep.watch import stopping
from evenstep.world import World

EVERY = 5.0  # seconds, as Amazon recommends
ANSWERS_WITHIN = 2.0
TOKEN_LASTS = 21600
TOKEN = "/latest/api/token"
INTERRUPTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


@contextlib.contextmanager
def notices(wanted: str | None, place: World) -> Iterator[threading.Event]:
    """Meanwhile one rank of each node looks for them, where the run says so; the event is the advice to take a
    snapshot."""
    advised = threading.Event()
    if wanted is None or place.local_rank > 0:
        yield advised
        return

    def say(line: str) -> None:  # at once, from whatever rank: it cannot wait until the ranks compare notes
        sys.stderr.write(f"evenstep: rank {place.rank} on {place.host}: {line}\n")

    asked = functools.partial(stopping.request, signal.SIGUSR1)
    spot = Spot(world.metadata_service(), stop=asked, save=advised.set, say=say)
    spot.start()
    try:
        yield advised
    finally:
        spot.close()


class Spot:
    """Looks for notices in a thread of its own, and never holds anything up."""

    def __init__(
        self, address: str, *, stop: Callable[[], None], save: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self._place = urlsplit(address)
        self._stop = stop
        self._save = save
        self._say = say
        self._token: str | None = None
        self._advised = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spot", daemon=True)

    def start(self) -> None:
        """From now on."""
        self._thread.start()

    def close(self) -> None:
        """Until now; a question that is under way ends by itself."""
        self._closing.set()

    def _run(self) -> None:
        complained = False
        while True:
            try:
                if self._look():
                    return
            except (OSError, http.client.HTTPException) as error:
                if not complained and not self._closing.is_set():
                    self._say(f"no word of spot notices from {self._place.geturl()}: {error}; asking on")
                complained = True
            if self._closing.wait(EVERY):
                return

    def _look(self) -> bool:
        """Whether the instance is taken back; then there is nothing more to ask."""
        notice = self._ask(INTERRUPTION)
        if notice is not None:
            self._say(f"this spot instance is taken back{_in_words(notice)}: stopping")
            self._stop()
            return True
        if not self._advised and self._ask(REBALANCE) is not None:
            self._advised = True
            self._say("this spot instance may be taken back soon: taking a snapshot")
            self._save()
        return False

    def _ask(self, path: str) -> str | None:
        """What is known of something; None if nothing is."""
        if self._token is None:
            wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LASTS)}
            status, self._token = self._request("PUT", TOKEN, wanted)
            if status != http.client.OK:
                self._token = None
                raise OSError(f"a token was refused ({status})")
        status, text = self._request("GET", path, {"X-aws-ec2-metadata-token": self._token})
        if status == http.client.UNAUTHORIZED:  # too old: the next look gets another
            self._token = None
        return text if status == http.client.OK else None

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        connection = http.client.HTTPConnection(
            self._place.hostname or "", self._place.port or 80, timeout=ANSWERS_WITHIN
        )
        try:
            connection.request(method, f"{self._place.path.rstrip('/')}{path}", headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            connection.close()


def _in_words(notice: str) -> str:
    """What is done and when, as far as the notice can be read."""
    try:
        told = json.loads(notice)
        left = (datetime.fromisoformat(told["time"]) - datetime.now(UTC)).total_seconds()
        return f" in {max(0.0, left):.0f} s ({told['action']})"
    except (ValueError, TypeError, KeyError):
        return ""
