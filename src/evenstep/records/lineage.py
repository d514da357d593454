"""Which of the steps that ranks say they took still count.

A *session* is the time between a start of all ranks and the next. It goes on from a snapshot that an earlier
session took, or from nothing; so the sessions form a tree, and what a run has come to is the way from its root
to the last of them. The steps on that way count; all others were undone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from evenstep.files import RunFiles
from evenstep.order.digest import Digest
from evenstep.records.events import read_events

Place = tuple[int, int]  # epoch and step
START: Place = (0, 0)
END: Place = (1 << 62, 0)


class Noted(NamedTuple):
    """Steps that a rank says it took in a session."""

    session: str
    rank: int
    epoch: int
    first: int
    last: int
    """The step after them."""
    digest: Digest
    """Of all samples in them."""
    left_out: tuple[int, ...] = ()
    """Those of the steps whose update was left out."""
    left_out_digest: Digest = Digest()

    @property
    def begin(self) -> Place:
        return self.epoch, self.first

    @property
    def end(self) -> Place:
        return self.epoch, self.last

    def __str__(self) -> str:
        return f"steps {self.first} to {self.last} of epoch {self.epoch} on rank {self.rank}"


@dataclass
class Session:
    """What its ranks have told of it."""

    world: int
    begin: Place = START
    of: str = ""
    """The session whose snapshot it went on from; empty where it began from nothing."""
    reached: dict[int, Place] = field(default_factory=dict)
    """How far each rank has come; START for one that has noted no step."""
    kept: int = 0
    """Steps, from the training's start, that are in a snapshot it acknowledged."""

    @property
    def trained(self) -> bool:
        """Whether any rank noted a step."""
        return any(place > START for place in self.reached.values())

    @property
    def together(self) -> Place:
        """How far all ranks have come."""
        return max(self.begin, min(self.reached.get(rank, START) for rank in range(self.world)))


class Stretch(NamedTuple):
    """The part of a session that counts."""

    session: str
    begin: Place
    end: Place


@dataclass
class Lineage:
    """The sessions of a run, the way through them, and what is odd about them."""

    sessions: dict[str, Session] = field(default_factory=dict)
    way: list[Stretch] = field(default_factory=list)
    """From the run's start on."""
    odd: list[str] = field(default_factory=list)

    @property
    def worlds(self) -> dict[str, int]:
        """How many ranks took each stretch of the way."""
        return {name: self.sessions[name].world for name, _, _ in self.way}

    def counts(self, noted: Noted) -> bool:
        """Whether these steps are on the way."""
        return any(noted.session == name and noted.begin < end for name, _, end in self.way)

    def fits(self, noted: Noted) -> bool:
        """Whether they do not lie across a place where the way turns into their session, or off from it."""
        return not any(
            noted.session == name and (noted.begin < begin or noted.begin < end < noted.end)
            for name, begin, end in self.way
        )


def read_lineage(run: RunFiles, *, ended: bool) -> Lineage:
    """All sessions in the order they began, and the way to the last that trained. Where the run has not ended, but
    was broken off or goes on, what not all ranks have noted yet does not count."""
    found = Lineage()
    for rank, path in run.all_events().items():
        for event in read_events(path):
            if event["name"] in ("started", "resumed", "trained", "saved"):
                _take(found, rank, event)
    for name, session in found.sessions.items():
        if silent := sorted(set(range(session.world)) - session.reached.keys()):
            found.odd.append(f"nothing is known of session {name[:8]} from ranks {silent}")
    # one that was broken off before it went on from anywhere has undone nothing
    heads = (name for name, session in reversed(found.sessions.items()) if ended or session.trained or session.of)
    if head := next(heads, ""):
        _find_way(found, head, END if ended else found.sessions[head].together)
    return found


def read_noted(run: RunFiles) -> Iterator[Noted]:
    """What every rank says it trained on."""
    for rank, path in run.all_events().items():
        for event in read_events(path):
            if event["name"] == "trained":
                yield _noted(rank, event)


def _noted(rank: int, event: Mapping[str, Any]) -> Noted:
    first, left_out = event["step"], Digest(*event.get("left_out_digest", ()))
    return Noted(
        session=event["session"],
        rank=rank,
        epoch=event["epoch"],
        first=first,
        last=first + event["steps"],
        digest=Digest(*event["digest"]).plus(left_out),
        left_out=tuple(event.get("left_out", ())),
        left_out_digest=left_out,
    )


def _take(found: Lineage, rank: int, event: Mapping[str, Any]) -> None:
    """Take in an event that tells of a session."""
    name, told = event["name"], event["session"]
    session = found.sessions.get(told)
    if name == "started":
        if session is None:
            session = found.sessions[told] = Session(event["world"])
        if session.world != event["world"] or event["rank"] != rank or rank in session.reached:
            found.odd.append(f"rank {rank} started session {told[:8]} twice, or not as others did")
        session.reached[rank] = START
    elif session is None or rank not in session.reached:
        found.odd.append(f"rank {rank} tells of session {told[:8]}, in which it did not start")
    elif name == "resumed":
        begin = event["epoch"], event["step"]
        if session.begin not in (START, begin) or session.of not in ("", event["of"]):
            found.odd.append(f"the ranks of session {told[:8]} do not agree on where they went on")
        session.begin, session.of = begin, event["of"]
    elif name == "trained":
        session.reached[rank] = max(session.reached[rank], (event["epoch"], event["step"] + event["steps"]))
    elif event["error"] is None:
        session.kept = max(session.kept, event["step"])


def _find_way(found: Lineage, name: str, end: Place) -> None:
    """From a session, back from snapshot to snapshot."""
    while name:
        session = found.sessions.get(name)
        if session is None:
            found.odd.append(f"session {name[:8]}, from whose snapshot another went on, has left no records")
            return
        if session.begin > end or name in found.worlds:
            found.odd.append(f"session {name[:8]} began after the place where another went on from it")
            return
        found.way.insert(0, Stretch(name, session.begin, end))
        name, end = session.of, session.begin
