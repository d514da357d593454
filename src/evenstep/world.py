"""Who am I: rank, node, world and device. The only reader of the environment."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class World:
    """This process's place among those that train together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    host: str = ""

    @property
    def leads(self) -> bool:
        """Rank 0 alone writes what is common to all."""
        return self.rank == 0


@dataclass(frozen=True)
class Meeting:
    """Where the nodes of a run meet, as people give it in MASTER_ADDR and its relatives."""

    address: str
    port: int
    node: int
    world: int | None


def from_launcher() -> World | None:
    """The place that torchrun, or our own launcher, gave this process; None if nobody launched it."""
    env = os.environ
    if "RANK" not in env or "LOCAL_RANK" not in env or "WORLD_SIZE" not in env:
        return None
    return World(
        rank=int(env["RANK"]),
        size=int(env["WORLD_SIZE"]),
        local_rank=int(env["LOCAL_RANK"]),
        local_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
        node=int(env.get("GROUP_RANK", env.get("NODE_RANK", "0"))),
        host=socket.gethostname(),
    )


def alone() -> World:
    """The place of a process that trains by itself."""
    return World(host=socket.gethostname())


def meeting() -> Meeting | None:
    """What MASTER_ADDR, MASTER_PORT, NODE_RANK and WORLD_SIZE say, for one agent on each node."""
    env = os.environ
    if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
        return None
    return Meeting(
        address=env["MASTER_ADDR"],
        port=int(env["MASTER_PORT"]),
        node=int(env.get("NODE_RANK", env.get("GROUP_RANK", "0"))),
        world=int(env["WORLD_SIZE"]) if "WORLD_SIZE" in env else None,
    )


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_wanted() -> int | None:
    """Threads for each process where the user has said so by OMP_NUM_THREADS."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() else None


def data_home() -> Path:
    """The folder of data sets: EVENSTEP_DATA, or `data` here."""
    return Path(os.environ.get("EVENSTEP_DATA") or "data")
