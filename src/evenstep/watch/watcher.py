"""Watches over the ranks from a thread of each: finds out who is to blame when no step ends, and ends the try.

Every rank leaves a note about itself twice a second. The first rank that shows signs of life leads: when any
rank has been still for longer than it may, the leader asks all for their stacks, looks after those that do not
answer, and judges. The verdict hangs on the board; every rank reads it and ends itself by it.
"""

import contextlib
import faulthandler
import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from evenstep.failure import lost_peer
from evenstep.watch import pulse, stacks
from evenstep.watch.board import Board, Gone
from evenstep.watch.culprits import Condition, Statement, judge
from evenstep.watch.ending import end, say
from evenstep.watch.patience import Patience, Stillness
from evenstep.watch.pulse import Pulse, Where
from evenstep.watch.verdict import Verdict, pronounce, statement_of, verdict_of
from evenstep.watch.witness import Witness
from evenstep.world import World

STDERR = 2
# all in seconds
TICK = 0.5  # between two notes
BRISK = 0.1  # between two, once half of the patience is gone
SILENT = 2.0  # without a sign of life from the rank that leads, the next one does
ANSWER = 0.8  # within which a rank that is asked answers
LOOK = 0.5  # within which another rank on its host has looked after one that does not
SOON = 0.05
AGAIN = 5.0  # until the leader asks once more, where it was too early to judge


class LostRank(RuntimeError):
    """Another rank has gone, and which."""


@contextlib.contextmanager
def watching(board: Board, place: World, patience: Patience, name: str) -> Iterator[Pulse]:
    """Meanwhile the ranks watch over each other; each says by its pulse where it is."""
    watch = Watch(board, place, patience, name)
    watch.start()
    try:
        yield watch.pulse
    except BaseException as error:
        watch.close()
        gone = watch.gone() if lost_peer(error) else []
        if not gone:
            raise
        raise LostRank(f"{' and '.join(gone)} has gone: {error}") from error
    watch.close()
    watch.say_done()


class Watch:
    """One rank's part in it."""

    def __init__(self, board: Board, place: World, patience: Patience, name: str) -> None:
        self.pulse = pulse.shown(name)
        self.place = place
        self._board = board
        self._name = name
        self._stillness = Stillness(patience, self.pulse, time.monotonic())
        self._witness = Witness(place, self._stillness, name)
        self._notes = itertools.count(1)
        self._asked = 0
        self._asks_again = 0.0
        self._answered = (-1, 0)
        self._said: Where | None = None
        self._signs: dict[int, tuple[int, float]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """From now on."""
        stacks.answer_when_asked()
        with contextlib.suppress(Gone):
            self._sign()  # so that whoever leaves at once is known by name
        self._thread.start()

    def close(self) -> None:
        """Until now."""
        self._closing.set()
        self._thread.join(SILENT)  # no longer: whoever keeps the board may be gone
        if self.place.size == 1:
            faulthandler.cancel_dump_traceback_later()

    def say_done(self) -> None:
        """Tell those that have not come to their end that this rank has."""
        with contextlib.suppress(Gone):
            self._sign(done=True)

    def gone(self) -> list[str]:
        """The ranks that were on this host, or at work, and are no more."""
        others = [rank for rank in range(self.place.size) if rank != self.place.rank]
        deadline = time.monotonic() + LOOK
        with contextlib.suppress(Gone):
            while time.monotonic() < deadline:
                looked = [self._witness.of(rank, self._read(f"rank/{rank}")) for rank in others]
                lost = [told for told in looked if told.condition in (Condition.GONE, Condition.DONE)]
                if lost:
                    return [f"rank {told.rank} on {told.host} (pid {told.pid})" for told in lost]
                time.sleep(SOON)
        return []

    # In the thread

    def _run(self) -> None:
        with contextlib.suppress(Gone):  # then the end has come anyway
            while not self._closing.wait(self._tick()):
                self._stillness.look(time.monotonic())
                if self.place.size == 1:  # nobody else can look after it when it keeps the interpreter to itself
                    faulthandler.dump_traceback_later(max(self._stillness.left, 0.0) + SILENT, file=STDERR)
                self._sign()
                if self._stillness.left <= 0:
                    self._post("still", True)
                leader, asked = self._leader()
                if leader == self.place.rank:
                    self._lead()
                elif asked and self._answered != (leader, asked):
                    self._follow(leader, asked)

    def _tick(self) -> float:
        return BRISK if self._stillness.still > self._stillness.left else TICK

    def _sign(self, *, done: bool = False) -> None:
        own = {"note": next(self._notes), "asked": self._asked, "done": done, "sign": self._witness.sign()}
        self._post(f"rank/{self.place.rank}", own)

    def _leader(self) -> tuple[int, int]:
        """The first rank that shows signs of life, and how often it has asked."""
        now = time.monotonic()
        for rank in range(self.place.rank):
            note = self._read(f"rank/{rank}") or {"note": 0, "asked": 0, "done": False}
            if self._signs.get(rank, (-1, now))[0] != note["note"]:
                self._signs[rank] = (note["note"], now)
            if now - self._signs[rank][1] < SILENT and not note["done"]:
                return rank, note["asked"]
        return self.place.rank, self._asked

    # Of the rank that leads

    def _lead(self) -> None:
        """Judge, where a rank has been still for too long."""
        if time.monotonic() < self._asks_again or not self._read("still") or self._said == self._stillness.where:
            return
        self._post("still", None)
        self._asked += 1
        self._sign()
        question = f"{self.place.rank}/{self._asked}"
        statements = self._statements(question)
        finding = judge(statements)
        if finding is None:
            self._asks_again = time.monotonic() + AGAIN
            self._post(f"over/{question}", True)
        else:
            self._announce(pronounce(statements, finding))

    def _statements(self, question: str) -> list[Statement]:
        """What is known of each rank."""
        others = [rank for rank in range(self.place.size) if rank != self.place.rank]
        told = self._answers(question, others, ANSWER)
        silent = [rank for rank in others if rank not in told]
        if silent:
            notes = {rank: self._read(f"rank/{rank}") for rank in silent}
            away = [r for r, note in notes.items() if note is not None and note["sign"]["host"] != self.place.host]
            self._post(f"look/{question}", away)
            seen = {rank: self._witness.of(rank, note) for rank, note in notes.items()}
            told = {**seen, **told, **self._answers(question, away, LOOK)}
        told[self.place.rank] = self._witness.own()
        return [told[rank] for rank in sorted(told)]

    def _answers(self, question: str, ranks: Iterable[int], patience: float) -> dict[int, Statement]:
        """What hangs on the board by then."""
        deadline = time.monotonic() + patience
        found: dict[int, Statement] = {}
        left = set(ranks)
        while left and time.monotonic() < deadline and not self._closing.wait(SOON):
            found |= {r: statement_of(note) for r in left if (note := self._read(f"told/{question}/{r}"))}
            left -= found.keys()
        return found

    def _announce(self, verdict: Verdict) -> None:
        if not self.place.launched:  # nobody would start this process again, and a person may see to it
            self._said = self._stillness.where
            say(verdict.text)
            return
        verdict = verdict_of(self._board.first(f"{self._name}/verdict", verdict.as_note()))
        if self.place.reports is None:  # else whoever started the ranks says it
            say(verdict.text)
        end(verdict, self.place)

    # Of the others

    def _follow(self, leader: int, asked: int) -> None:
        """Answer the leader, look after those it misses, and wait for what it makes of the answers."""
        self._answered = leader, asked
        question = f"{leader}/{asked}"
        self._tell(question, self._witness.own())
        looked: set[int] = set()
        deadline = time.monotonic() + ANSWER + LOOK + SILENT
        while time.monotonic() < deadline and not self._closing.wait(SOON):
            if verdict := self._read("verdict"):
                end(verdict_of(verdict), self.place)
            if self._read(f"over/{question}"):
                return
            for rank in set(self._read(f"look/{question}") or ()) - looked:
                looked.add(rank)
                self._look_after(question, rank)

    def _look_after(self, question: str, rank: int) -> None:
        """Speak for a rank that does not answer, if it is on this host, and nobody else there does."""
        note = self._read(f"rank/{rank}")
        here = note is not None and note["sign"]["host"] == self.place.host
        if here and self._board.first(f"{self._name}/looks/{question}/{rank}", self.place.rank) == self.place.rank:
            self._tell(question, self._witness.of(rank, note))

    def _tell(self, question: str, told: Statement) -> None:
        self._post(f"told/{question}/{told.rank}", told.as_note())

    def _post(self, name: str, note: Any) -> None:
        self._board.post(f"{self._name}/{name}", note)

    def _read(self, name: str) -> Any:
        return self._board.read(f"{self._name}/{name}")
