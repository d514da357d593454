"""What a session is opened with: the plan of its order, and how it is handed out."""

import math
import re
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from evenstep.errors import UserError
from evenstep.order.plan import Plan

MOST = 1 << 62  # what SQLite's integers hold, with room for sums
MOST_LANES = 4096
MOST_RANKS = 1 << 16
SHORTEST, LONGEST = 0.1, 86_400.0  # seconds of a lease
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def checked_name(kind: str, name: str) -> str:
    """A session's or a worker's name, if it can be one."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name[:100]!r} cannot be a {kind}'s name: take 1 to 100 letters, digits, dots, underscores and "
            "hyphens, a letter or a digit first"
        )
    return name


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A session's options."""

    size: int
    """Samples in the data set."""
    block: int = 256
    """Samples in a block: a worker's batch; of a lockstep session, the global batch."""
    seed: int = 0
    """Fixes the order."""
    policy: str = "shuffle"
    """How data is dealt out: shuffle, sequential, shards or blocks."""
    block_size: int = 1000
    """Samples in a block of policy blocks."""
    deal: str = "round_robin"
    """How policy blocks deals: round_robin or random."""
    dealt_to: int = 1
    """Lanes among which shards and blocks are dealt; of a dynamic session, 1."""
    epochs: int = 1
    """Times through the data."""
    world: int = 0
    """Ranks that read in lockstep; 0 for workers that take blocks as they are ready."""
    lease_seconds: float = 60.0
    """How long a worker may make no progress before its blocks go to others."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("size", 1, MOST),
            ("block", 1, MOST),
            ("seed", 0, MOST),
            ("block_size", 1, MOST),
            ("dealt_to", 1, MOST_LANES),
            ("epochs", 1, MOST),
            ("world", 0, MOST_RANKS),
        ):
            if not least <= getattr(self, name) <= most:
                raise UserError(f"{name} must be from {least} to {most}, not {getattr(self, name)}")
        if not (math.isfinite(self.lease_seconds) and SHORTEST <= self.lease_seconds <= LONGEST):
            raise UserError(f"a lease lasts from {SHORTEST} to {LONGEST:.0f} seconds, not {self.lease_seconds}")
        if not self.lockstep and self.plan.lanes > 1:
            raise UserError(
                "a dynamic session deals to whoever is ready, so it has one lane, not "
                f"{self.plan.lanes}: leave out dealt_to, or declare a world to read in lockstep"
            )

    @property
    def lockstep(self) -> bool:
        """Whether ranks read in lockstep; else workers take leases."""
        return self.world > 0

    @cached_property
    def plan(self) -> Plan:
        """The order: a block is a global step of it."""
        return Plan(
            size=self.size,
            global_batch=self.block,
            seed=self.seed,
            policy=self.policy,
            block_size=self.block_size,
            deal=self.deal,
            workers=self.dealt_to,
        )

    def values(self) -> dict[str, Any]:
        """The options by name; `Spec(**it)` is the same again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


_DECIDE = {"shards": ("dealt_to",), "blocks": ("dealt_to", "block_size", "deal")}


def differences(wanted: Spec, found: Spec, *others: str) -> str:
    """Where two specs differ in what decides the order, or in other options: in words, none where they do not."""
    names = ("size", "block", "seed", "policy", *_DECIDE.get(wanted.policy, ()), *others)
    return ", ".join(
        f"{name} {getattr(found, name)} instead of {getattr(wanted, name)}"
        for name in names
        if getattr(found, name) != getattr(wanted, name)
    )
