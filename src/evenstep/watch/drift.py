"""Whether all ranks run the same, and the same as before: if not, what differs, and where."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from evenstep.errors import UserError
from evenstep.watch import words
from evenstep.watch.fingerprint import Fingerprint, together
from evenstep.world import World

SHOWN = 3  # differences at most in a line: one machine with another checkout has dozens
ABSENT = "absent"
MAY_LACK = ("file", "package")  # a rank may have imported more than another one
DECIDES = ("data", "model")  # what another one cannot go on with

Summary = Mapping[str, Mapping[str, str]]


class Rank(NamedTuple):
    """What a rank runs, and where."""

    host: str
    fingerprint: Fingerprint


def compare(own: Fingerprint, place: World, *, allow: bool) -> list[str]:
    """What differs between ranks; UserError unless that is allowed. Every rank has to ask."""
    found = differences(_exchanged(own, place))
    if found and not allow:
        raise UserError(
            f"the ranks do not run the same: {shown(found)}; make them alike, or go on with --allow-drift"
        )
    return found


def _exchanged(own: Fingerprint, place: World) -> list[Rank]:
    """What each rank runs; nothing where it is all the same, which is found out with a few bytes."""
    if place.size == 1:
        return []
    mine = torch.frombuffer(bytearray(bytes.fromhex(together(own))), dtype=torch.uint8)
    all_of_them = [torch.empty_like(mine) for _ in range(place.size)]
    dist.all_gather(all_of_them, mine)
    if all(torch.equal(each, mine) for each in all_of_them):
        return []
    told: list[str] = [""] * place.size
    dist.all_gather_object(told, json.dumps([place.host, own]))
    return [Rank(*json.loads(each)) for each in told]


def differences(ranks: Sequence[Rank]) -> list[str]:
    """What differs, a text each, in the order in which ranks look at things."""
    names = dict.fromkeys(name for rank in ranks for name in rank.fingerprint)
    return [text for name in names if (text := _difference(name, ranks))]


def _difference(name: str, ranks: Sequence[Rank]) -> str:
    kind, _, which = name.partition(" ")
    values: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        value = rank.fingerprint.get(name, ABSENT)
        if value != ABSENT or kind not in MAY_LACK:
            values.setdefault(value, []).append(number)
    if len(values) < 2:
        return ""
    groups = (
        f"{value} on {words.ranks(numbers)} ({', '.join(dict.fromkeys(ranks[number].host for number in numbers))})"
        for value, numbers in sorted(values.items(), key=lambda found: found[1])
    )
    return f"{kind} {which}: {', '.join(groups)}"


def since(before: Summary, now: Summary) -> list[str]:
    """What has changed since a run began."""
    return [
        f"{kind} {which}: {was} then, {now[kind][which]} now"
        for kind, known in before.items()
        for which, was in known.items()
        if which in now.get(kind, {}) and now[kind][which] != was
    ]


def forbids(changed: Sequence[str]) -> list[str]:
    """Those changes under which a run cannot go on to the result it was begun for."""
    return [text for text in changed if text.startswith(DECIDES)]


def shown(found: Sequence[str]) -> str:
    """In a line."""
    more = f"; and {len(found) - SHOWN} more differences" if len(found) > SHOWN else ""
    return f"{'; '.join(found[:SHOWN])}{more}"
