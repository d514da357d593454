"""What is said of a training that has come to a standstill, and of whom: a note that all ranks read alike."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenstep.watch import words
from evenstep.watch.culprits import Condition, Finding, Helper, Statement
from evenstep.watch.pulse import Where
from evenstep.watch.stacks import Frame, Stack, as_text, from_the_loop_on


@dataclass(frozen=True, kw_only=True)
class Accused:
    """A rank that is to blame, or that only waits."""

    rank: int
    host: str
    pid: int
    created: float
    answers: bool
    """Whether it can end itself."""
    victim: bool
    what: str
    trace: str

    @property
    def sentence(self) -> str:
        """Who, where, what."""
        return f"rank {self.rank} on {self.host} (pid {self.pid}) {self.what}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The end of a try."""

    ranks: tuple[Accused, ...]

    @property
    def culprits(self) -> list[Accused]:
        """Those to blame; where nobody is, the first rank speaks for all."""
        return [told for told in self.ranks if not told.victim] or list(self.ranks[:1])

    @property
    def text(self) -> str:
        """What a person reads: how each rank to blame came where it is, and a line about it."""
        return "".join(f"{told.trace}evenstep: {told.sentence}\n" for told in self.culprits)

    def as_note(self) -> dict[str, Any]:
        """As the board takes it."""
        return dataclasses.asdict(self)


def verdict_of(note: Mapping[str, Any]) -> Verdict:
    """A verdict from the board."""
    return Verdict(ranks=tuple(Accused(**told) for told in note["ranks"]))


def statement_of(note: Mapping[str, Any]) -> Statement:
    """A statement from the board."""
    helpers = tuple(Helper(**{**helper, "stack": _stack(helper["stack"])}) for helper in note["helpers"])
    taken = {
        "condition": Condition(note["condition"]),
        "where": Where(*note["where"]),
        "stack": _stack(note["stack"]),
        "helpers": helpers,
    }
    return Statement(**{**note, **taken})


def _stack(note: Iterable[Sequence[Any]]) -> Stack:
    return tuple(Frame(*frame) for frame in note)


# In words


def pronounce(statements: Sequence[Statement], finding: Finding) -> Verdict:
    """What is said of each rank."""
    named = [told for told in statements if told.rank in finding.culprits]
    rest = [told for told in statements if told.rank not in finding.culprits]
    return Verdict(
        ranks=tuple(
            Accused(
                rank=told.rank,
                host=told.host,
                pid=told.pid,
                created=told.created,
                answers=told.condition is Condition.ANSWERS,
                victim=told not in named,
                what=_what(told, rest, apart=finding.apart) if told in named else _victim(told, named),
                trace=_trace(told),
            )
            for told in statements
        )
    )


def _what(told: Statement, rest: Sequence[Statement], *, apart: bool) -> str:
    at = f", at {told.line.in_words}" if told.line else ""
    seen = f"last seen in {told.where.in_words}"
    match told.condition:
        case Condition.GONE:
            return f"has gone without a word, {seen}{_waiting(rest)}"
        case Condition.DONE:
            return f"has come to its end while others have not, {seen}{_waiting(rest)}"
        case Condition.STOPPED:
            return f"does not answer: it is stopped, as by SIGSTOP, {seen}{_waiting(rest)}"
        case Condition.SILENT if told.stack:
            held = f"is stuck in {told.where.in_words}, where some code keeps the interpreter to itself"
            return f"{held}{at}{_waiting(rest)}"
        case Condition.SILENT:
            return f"does not answer, nor can it be looked at, {seen}{_waiting(rest)}"
    if apart:
        other = rest[0]
        there = f", at {other.line.in_words}" if other.line else ""
        return (
            f"is in {told.where.in_words}{at}, and left out the exchange in which {_ranks(rest)} wait{_s(rest)}: "
            f"{other.where.in_words}{there}"
        )
    return f"is stuck in {told.where.in_words}{_helpers(told) or at}{_waiting(rest)}"


def _victim(told: Statement, named: Sequence[Statement]) -> str:
    if named:
        return f"waits for {_ranks(named)} in {told.where.in_words}"
    at = f", at {told.line.in_words}" if told.line else ""
    return (
        f"is in {told.where.in_words}{at}, and so are all ranks: is what connects them, or feeds them, all right?"
    )


def _waiting(rest: Sequence[Statement]) -> str:
    return f"; {_ranks(rest)} wait{_s(rest)} for it" if rest else ""


def _s(ranks: Sequence[Statement]) -> str:
    return "s" if len(ranks) == 1 else ""


def _ranks(told: Sequence[Statement]) -> str:
    return words.ranks([one.rank for one in told])


def _helpers(told: Statement) -> str:
    """Which of the processes that read data for a rank is to blame."""
    for helper in told.helpers:
        if helper.stopped:
            return f": its data loading process {helper.pid} is stopped, as by SIGSTOP"
        if helper.line:
            return f": its data loading process {helper.pid} is at {helper.line.in_words}"
    return ""


def _trace(told: Statement) -> str:
    stacks = [(f"rank {told.rank}", told.stack)]
    stacks += [(f"its data loading process {helper.pid}", helper.stack) for helper in told.helpers]
    return "".join(
        f"{who} is here (most recent call last):\n{as_text(from_the_loop_on(stack))}"
        for who, stack in stacks
        if stack
    )
