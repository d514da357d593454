"""What to run: one frozen value, from the command line, a YAML file or Python, checked with the valid choices.

Options whose default is None are the task's to choose; `complete` fills them in, once, before anything
starts, and the result is what is kept with the run.
"""

import dataclasses
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from evenstep.errors import UserError, unknown
from evenstep.order.plan import DEALS, POLICIES, Plan
from evenstep.world import World

STRATEGIES = ("one", "dp", "ddp", "fsdp")
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("constant", "cosine", "linear")
DEVICES = ("auto", "cpu", "cuda", "mps")
ON_NAN = ("stop", "skip")
SPOT = ("aws",)

CHOICES = {
    "strategy": STRATEGIES,
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "device": DEVICES,
    "policy": tuple(POLICIES),
    "deal": tuple(DEALS),
    "on_nan": ON_NAN,
    "spot": SPOT,
}

# what decides the result: a run that goes on keeps them
DECISIVE = {
    *("task", "model", "set", "sample", "epochs", "max_steps", "patience", "best", "seed"),
    *("batch_size", "global_batch", "policy", "block_size", "deal", "dealt_to", "precision", "sync_batchnorm"),
    *("optimizer", "lr", "weight_decay", "momentum", "schedule", "warmup_steps", "clip"),
}

MOST = 1 << 63  # what arrays and torch can count to

# what a task leaves unsaid
FALLBACK: Mapping[str, Any] = {
    "epochs": 5,
    "global_batch": 128,
    "optimizer": "adam",
    "lr": 1e-3,
    "weight_decay": 0.0,
    "momentum": 0.9,
    "schedule": "constant",
    "warmup_steps": 0,
    "precision": "fp32",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of `evenstep train`."""

    # what is trained
    task: str
    """A task that comes with evenstep, or a file of yours: my_task.py or my_task.py:MyTask."""
    model: str | None = None
    """One of the task's models."""
    set: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the task, as name=value."""
    data: str | None = None
    """The folder of data sets (default: EVENSTEP_DATA, or ./data)."""
    sample: int | None = None
    """Train on this many samples only, chosen at random by the seed."""

    # how long, and what is best
    epochs: int | None = None
    """Times through the data."""
    max_steps: int | None = None
    """Stop after this many steps."""
    patience: int | None = None
    """Stop when this many epochs in a row brought no better validation."""
    best: str | None = None
    """Which validation is the best: 'max f1', 'min loss', say (default: as the task has it)."""
    seed: int = 0
    """Fixes the initial weights, the order and the augmentation."""

    # how much at a time
    batch_size: int | None = None
    """Samples a process takes per step; the global batch is this times the processes."""
    global_batch: int | None = None
    """Samples in a step over all processes; stays as it is when their number changes."""
    micro_batch: int | None = None
    """Most samples a process computes at once; a step accumulates as many as it needs."""

    # how a step is taken
    optimizer: str | None = None
    """adam, adamw or sgd."""
    lr: float | None = None
    """Learning rate."""
    weight_decay: float | None = None
    """Weight decay."""
    momentum: float | None = None
    """Momentum of sgd."""
    schedule: str | None = None
    """Of the learning rate: constant, cosine or linear, the latter two down to 0."""
    warmup_steps: int | None = None
    """Steps over which the learning rate grows to its value."""
    clip: float | None = None
    """Largest norm of the gradient; larger ones are scaled down to it."""
    precision: str | None = None
    """fp32, bf16, fp16 (with a loss scaler, on CUDA) or fp64."""
    compile: bool = False
    """Compile the model with torch.compile."""
    sync_batchnorm: bool = False
    """BatchNorm over the samples of all processes, as if one process had computed them."""

    # in which order
    policy: str = "shuffle"
    """How data is dealt out: shuffle, sequential, shards or blocks."""
    block_size: int = 1000
    """Samples in a block of policy blocks."""
    deal: str = "round_robin"
    """How policy blocks deals: round_robin or random."""
    dealt_to: int | None = None
    """Workers among whom shards and blocks are dealt (default: the processes at launch)."""

    # on what
    strategy: str | None = None
    """one, dp, ddp or fsdp (default: one for a single process, else ddp)."""
    procs: int = 1
    """Processes on this machine."""
    nodes: str | int = 1
    """Machines (1:4 if they come and go); run this on each, with MASTER_ADDR, MASTER_PORT and NODE_RANK set."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    workers: int = 0
    """Data loading processes per rank, for data sets that are read sample by sample."""

    # what survives
    snapshot_every: int | None = None
    """Steps between two snapshots."""
    snapshot_minutes: float | None = 5.0
    """Minutes between two snapshots; 0 for none by the clock."""
    keep: int = 3
    """Snapshots that are kept; older ones are taken away."""
    to: str | None = None
    """Keep the run there as well: s3://bucket/prefix, another address that fsspec knows, or a folder."""
    max_restarts: int | None = None
    """Times that all ranks are started again when one is killed or fails (default: 3; 0 for a single process)."""

    stall_timeout: float | None = None
    """Seconds without a step until whoever is stuck is named and ended (default: 10 usual steps, at least 30)."""
    on_nan: str = "stop"
    """Where a loss is not finite: stop, or skip that step (each step then waits for the device)."""
    allow_drift: bool = False
    """Go on where ranks differ in code, options, packages, data or model, or differ from the run's beginning."""
    spot: str | None = None
    """aws: stop, with a snapshot, when EC2 gives notice that it takes this spot instance back."""

    # what is kept
    runs: str = "runs"
    """The folder that gets a folder for each run."""
    note: str = ""
    """A line about this run, kept with it."""
    log_every: int = 50
    """Steps between two points of the curves in TensorBoard."""

    def __post_init__(self) -> None:
        for name, valid in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in valid:
                raise unknown(name, value, valid)
        for name in ("epochs", "sample", "max_steps", "patience", "batch_size", "global_batch", "micro_batch"):
            _at_least(name, getattr(self, name), 1)
        for name in ("block_size", "dealt_to", "procs", "log_every", "snapshot_every", "keep"):
            _at_least(name, getattr(self, name), 1)
        for name in (
            "lr",
            "weight_decay",
            "momentum",
            "warmup_steps",
            "workers",
            "seed",
            "snapshot_minutes",
            "max_restarts",
            "stall_timeout",
        ):
            _at_least(name, getattr(self, name), 0)
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"clip must be above 0, not {self.clip}; leave it out for no clipping")
        if self.batch_size and self.global_batch:
            raise UserError("give --batch-size (per process) or --global-batch (over all processes), not both")
        self._check_processes(self.procs * self.node_range[1])

    @property
    def node_range(self) -> tuple[int, int]:
        """How many nodes there have to be, and may be."""
        least, elastic, most = str(self.nodes).partition(":")
        numbers = (least, most if elastic else least)
        if not all(number.isascii() and number.isdecimal() for number in numbers):
            raise UserError(f"nodes must be a number, or a range such as 1:4, not {self.nodes}")
        _at_least("nodes", int(least), 1)
        _at_least(f"the most of nodes {self.nodes}", int(numbers[1]), int(least))
        return int(least), int(numbers[1])

    @property
    def several(self) -> bool:
        """Whether there may be more than one process."""
        return self.procs * self.node_range[1] > 1

    def _check_processes(self, count: int) -> None:
        if self.strategy == "one" and count > 1:
            raise UserError(f"strategy one is a single process, not {count}; take ddp or fsdp")
        if self.strategy == "dp" and count > 1:
            raise UserError("strategy dp drives all devices from one process; leave out --procs, or take ddp")

    def complete(self, defaults: Mapping[str, Any], place: World) -> "Settled":
        """Everything settled: the user's word, else the task's, else the fallback."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        choose = {**FALLBACK, **defaults}
        settled = {name: value for name, value in choose.items() if given[name] is None}
        self._check_processes(place.size)
        if self.batch_size:
            settled["global_batch"] = self.batch_size * place.size
            settled["batch_size"] = None
        if self.strategy is None:
            settled["strategy"] = "one" if place.size == 1 else "ddp"
        if self.dealt_to is None:
            settled["dealt_to"] = place.size
        settled["procs"] = place.local_size
        if ":" not in str(self.nodes):
            settled["nodes"] = place.size // place.local_size
        return Settled(**{**given, **settled})

    def as_dict(self) -> dict[str, Any]:
        """The options as plain values, by name."""
        return {**dataclasses.asdict(self), "set": dict(self.set)}

    def as_yaml(self) -> str:
        """A file that `--config` takes."""
        return yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True)


@dataclass(frozen=True, kw_only=True)
class Settled(Config):
    """The options with nothing left open."""

    epochs: int
    global_batch: int
    optimizer: str
    lr: float
    weight_decay: float
    momentum: float
    schedule: str
    warmup_steps: int
    precision: str
    strategy: str
    dealt_to: int

    def plan(self, size: int) -> Plan:
        """The order of the training."""
        return Plan(
            size=size,
            global_batch=self.global_batch,
            seed=self.seed,
            policy=self.policy,
            block_size=self.block_size,
            deal=self.deal,
            workers=self.dealt_to,
        )


class _Loader(yaml.SafeLoader):
    """Plain values only, and 1:4 is a text, as it is on a command line: YAML counts it to the base of 60."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and ":" in value:
            return self.DEFAULT_SCALAR_TAG
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]


def read_yaml(path: Path) -> dict[str, Any]:
    """The options in a YAML file, checked by name and kind."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"the configuration {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the configuration {path} is not text") from None
    try:
        given = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"the configuration {path} is not YAML: {' '.join(str(error).split())}") from None
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UserError(f"the configuration {path} must be lines of name: value")
    return checked({str(name).replace("-", "_"): value for name, value in given.items()}, str(path))


def checked(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Options from elsewhere than the command line, with names and kinds made sure of."""
    hints = get_type_hints(Config)
    result = {}
    for name, value in given.items():
        if name not in hints:
            raise unknown("option", name, hints, source)
        kinds = tuple(k for k in get_args(hints[name]) if isinstance(k, type)) or (hints[name],)
        result[name] = _of_kind(name, value, kinds, source)
    return result


def _of_kind(name: str, value: Any, kinds: tuple[type, ...], source: str) -> Any:
    if name == "set":
        if not isinstance(value, Mapping):
            raise UserError(f"set in {source} must be a mapping of name to value, not {reprlib.repr(value)}")
        return dict(value)
    if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
        return value
    if float in kinds and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML takes 1e-3 for text
        except ValueError:
            pass
    if str in kinds and isinstance(value, os.PathLike):
        return os.fspath(value)
    expected = " or ".join(_KINDS[kind] for kind in kinds)
    raise UserError(f"{name} in {source} must be {expected}, not {reprlib.repr(value)}")


_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "nothing",
}


def _at_least(name: str, value: float | None, least: int) -> None:
    if value is not None and not least <= value < MOST:
        raise UserError(f"{name} must be at least {least}{'' if value < MOST else ' and below 2^63'}, not {value}")
