"""Who am I: rank, node, world and device. The only reader of the environment."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evenstep.errors import UserError

_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # torch counts them on each node for itself, so we put a name there
# what torch tells each rank of its place
_OF_A_RANK = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_")


@dataclass(frozen=True)
class World:
    """This process's place among those that train together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    host: str = ""
    launched: bool = False
    """Somebody started this process to train, and may start it again."""
    reports: Path | None = None
    """Where whoever started this rank looks for its report when it has failed."""

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


@dataclass(frozen=True)
class Surroundings:
    """What a forkserver's children do not inherit from the process that asks for them."""

    folder: str
    environment: Mapping[str, str]

    def enter(self, attempt: str) -> None:
        """Make them this process's own, but for its place among the ranks of this attempt."""
        os.chdir(self.folder)
        for name in set(os.environ) | set(self.environment):
            if not name.startswith(_OF_A_RANK):
                if name in self.environment:
                    os.environ[name] = self.environment[name]
                else:
                    del os.environ[name]
        os.environ[_ATTEMPT] = attempt


def surroundings() -> Surroundings:
    """The folder and the environment of this process, as they are now."""
    return Surroundings(str(Path.cwd()), dict(os.environ))


def from_launcher() -> World | None:
    """The place that torchrun, or our own launcher, gave this process; None if nobody launched it."""
    env = os.environ
    if "RANK" not in env or "LOCAL_RANK" not in env or "WORLD_SIZE" not in env:
        return None
    return World(
        rank=_number("RANK"),
        size=_number("WORLD_SIZE"),
        local_rank=_number("LOCAL_RANK"),
        local_size=_number("LOCAL_WORLD_SIZE", "1"),
        node=_number("GROUP_RANK", env.get("NODE_RANK", "0")),
        host=socket.gethostname(),
        launched=True,
    )


def alone() -> World:
    """The place of a process that trains by itself."""
    return World(host=socket.gethostname())


def meeting() -> Meeting | None:
    """What MASTER_ADDR, MASTER_PORT, NODE_RANK and WORLD_SIZE say, for one agent on each node."""
    env = os.environ
    if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
        return None
    port = _number("MASTER_PORT")
    if port >= 1 << 16:
        raise UserError(f"MASTER_PORT in the environment must be a port, not {port}")
    return Meeting(
        address=env["MASTER_ADDR"],
        port=port,
        node=_number("NODE_RANK", env.get("GROUP_RANK", "")),
        world=_number("WORLD_SIZE") if "WORLD_SIZE" in env else None,
    )


def store() -> tuple[str, int]:
    """Host and port of the store at which the ranks have met."""
    return os.environ["MASTER_ADDR"], _number("MASTER_PORT")


def store_stays() -> bool:
    """Whether a launcher keeps that store, so that it outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt() -> str:
    """The name of this start of the ranks, among all that their launcher may need."""
    return os.environ.get(_ATTEMPT, "0")


def restarted() -> bool:
    """Whether the launcher has started these ranks before, in this run of it."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _number(name: str, default: str = "") -> int:
    text = os.environ.get(name, default)
    if not text.isdecimal():
        raise UserError(f"{name} in the environment must be a whole number, not {text!r}")
    return int(text)


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_wanted() -> int | None:
    """Threads for each process where the user has said so by OMP_NUM_THREADS."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() else None


def metadata_service() -> str:
    """Where an EC2 instance asks about itself."""
    return os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254"


def data_home() -> Path:
    """The folder of data sets: EVENSTEP_DATA, or `data` here."""
    return Path(os.environ.get("EVENSTEP_DATA") or "data")


def cache_home() -> Path:
    """The user's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
