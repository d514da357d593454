"""`evenstep.train` and its relatives: what the command line does, for Python."""

import contextlib
import functools
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from evenstep import weights as kept_weights
from evenstep import world
from evenstep.config import DECISIVE, Config, checked, read_yaml
from evenstep.errors import UserError, unknown
from evenstep.failure import Failure
from evenstep.files import RunFiles, find_run, locked, replacing
from evenstep.launch import local
from evenstep.launch.blame import UNGUARDED, RankFailed, leave_if_read_again
from evenstep.progress import Values
from evenstep.records import record
from evenstep.records.events import Events, losses_of
from evenstep.snapshots import abroad
from evenstep.tasks import catalog, files
from evenstep.tasks.task import Task
from evenstep.training import Run, load_task, make_folder, run_evaluation, run_training
from evenstep.watch import stopping
from evenstep.watch.stopping import Stopped
from evenstep.world import Meeting, World

T = TypeVar("T")

SPLITS = ("train", "validation", "test")
WEIGHTS = ("best", "last")
RESTARTS = 3  # where nothing else is said


@dataclass(frozen=True)
class Result:
    """A run that has ended, as its folder tells it."""

    folder: Path

    @property
    def record(self) -> dict[str, Any]:
        """What ran, where, when, and what came of it."""
        return record.read(RunFiles(self.folder))

    @property
    def losses(self) -> list[float]:
        """The mean loss of each step."""
        return losses_of(RunFiles(self.folder).events(0))

    @property
    def best_weights(self) -> Path:
        """The weights of the best epoch: `safetensors.torch.load_file` reads them."""
        return RunFiles(self.folder).weights("best")


def train(task: Task, **options: Any) -> Result:
    """Train a task; the options are those of `evenstep train`, with underscores."""
    leave_if_read_again()
    if files.loading() is not None:
        raise UserError(UNGUARDED)
    for name in ("task", "model", "set", "data"):
        if name in options:
            raise UserError(f"{name} belongs to the task: give it to {type(task).__name__}(...)")
    name, fields = catalog.describe(task)
    config = Config(
        task=name,
        model=fields.pop("model_name", None),
        data=fields.pop("data_dir", None),
        set=fields,
        **checked(options, "evenstep.train()"),
    )
    return train_config(config, sys.argv)


def train_config(config: Config, command: Sequence[str]) -> Result:
    """Train what the options name, in as many processes as they say."""
    makes_it = world.from_launcher() is None and _leads(config)
    with stopping.resumable(), contextlib.ExitStack() as held:
        load_task(config)  # what is wrong with it is said before any process starts
        folder = make_folder(config) if makes_it else None
        if folder is not None:
            held.enter_context(locked(RunFiles(folder)))
        return _train(config, command, folder, folder)


def resume(run: str | Path, *, runs: str = "runs", **options: Any) -> Result:
    """Go on with a run where its newest snapshot is, in the same folder, on as many processes as is said now.

    What decides the result, the options of the run, stays as it was; where it computes may change.
    """
    if changed := DECISIVE & options.keys():
        raise UserError(
            f"{', '.join(sorted(changed))} cannot change when a run goes on: the result would be another; "
            "begin a run with evenstep train"
        )
    if abroad.is_address(run):
        found = abroad.adopt(str(run), Path(runs))
        options.setdefault("to", str(run).rstrip("/").rpartition("/")[0])
    else:
        found = find_run(run, Path(runs))
    kept = read_yaml(found.config)
    if not {"procs", "nodes", "strategy"}.isdisjoint(options):
        kept["strategy"] = None
    kept["allow_drift"] = False  # what was allowed once is not for ever
    config = Config(**{**kept, **checked(options, "evenstep.resume()")})
    if not _leads(config):
        return _train(config, sys.argv, found.folder if world.from_launcher() else None, None)
    with stopping.resumable(), _for_us_alone(found):
        found.stop.unlink(missing_ok=True)
        return _train(config, sys.argv, found.folder, found.folder)


@contextlib.contextmanager
def _for_us_alone(run: RunFiles) -> Iterator[None]:
    """A run that has not finished, and that nobody else trains."""
    told = record.read(run)
    where = f"pid {told['process']['pid']} on {told['process']['host']}"
    with contextlib.ExitStack() as held:
        try:
            sure = held.enter_context(locked(run))
        except UserError:
            raise UserError(f"{run.folder} is running ({where}), or about to") from None
        told = record.read(run)
        if told["state"] == "finished":
            raise UserError(f"{run.folder} has finished: there is nothing to go on with")
        if told["state"] == "running" and not sure:
            raise UserError(f"{run.folder} is running ({where}), as far as can be told from here")
        yield


def _train(config: Config, command: Sequence[str], folder: Path | None, ours: Path | None) -> Result:
    """Train in a folder, or in one that another process of this run knows or makes; see to ours."""
    entry = functools.partial(run_training, Run(config=config, command=command, folder=folder))
    with stopping.resumable():
        try:
            ended = _start(entry, config, _restarts(config), functools.partial(_note_loss, ours))
        except BaseException as error:
            if ours is not None and _close_folder(RunFiles(ours), error) and isinstance(error, Stopped):
                raise Stopped(f"{error}; to go on: evenstep resume {ours}", error.code) from None
            raise
    if ended.stopped:
        raise Stopped()
    return Result(ended.folder)


def evaluate(
    run: str | Path, *, split: str = "test", weights: str = "best", runs: str = "runs", **options: Any
) -> Values:
    """Measure a run's weights on its task's data."""
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    with abroad.located(run, Path(runs), "config.yaml", f"weights/{weights}.safetensors") as found:
        kept = read_yaml(found.config)
        if kept.get("strategy") in ("one", "dp"):
            kept["strategy"] = None  # more processes than one may measure what one has trained
        config = Config(**{**kept, "nodes": 1, **checked(options, "evenstep.evaluate()")})
        path = _weights(found, weights)
        with stopping.interruptible():
            return _start(functools.partial(run_evaluation, config, path, split), config)


def export(run: str | Path, file: str | Path, *, weights: str = "best", runs: str = "runs") -> None:
    """Write a run's weights to a file of their own: `.safetensors`, or `.pt` for `torch.load`."""
    target = Path(file)
    if target.suffix not in (".safetensors", ".pt"):
        raise UserError(f"{target.name} should end in .safetensors or .pt, which says how it is written")
    with abroad.located(run, Path(runs), f"weights/{weights}.safetensors") as found:
        kept = kept_weights.read(_weights(found, weights))
    write = torch.save if target.suffix == ".pt" else save_file
    try:
        with replacing(target) as temporary:
            write(kept, temporary)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{target} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def _weights(found: RunFiles, which: str) -> Path:
    if which not in WEIGHTS:
        raise unknown("weights", which, WEIGHTS)
    if not found.weights(which).is_file():
        raise UserError(f"{found.folder} holds no {which} weights: it ended before its first epoch did")
    return found.weights(which)


def _start(
    entry: Callable[[World], T],
    config: Config,
    restarts: int = 0,
    tell: Callable[[Failure], None] = lambda _: None,
) -> T:
    """Run as the rank that a launcher made this process, or alone, or in processes of our own."""
    place = world.from_launcher()
    if place is not None:
        return entry(place)
    if not config.several and not restarts:
        return entry(world.alone())
    return local.launch(
        entry, config.procs, nodes=config.node_range, meeting=_meeting(config), restarts=restarts, tell=tell
    )


def _restarts(config: Config) -> int:
    """A process that is alone is watched by another one only where restarts are asked for."""
    return RESTARTS * config.several if config.max_restarts is None else config.max_restarts


def _leads(config: Config) -> bool:
    """Whether this process sees to what is common to all: as rank 0, or as what starts it."""
    place, meeting = world.from_launcher(), _meeting(config)
    return place.leads if place is not None else meeting is None or meeting.node == 0


def _meeting(config: Config) -> Meeting | None:
    """Where this node meets the others; None where there is one only."""
    least, most = config.node_range
    if most == 1:
        return None
    found = world.meeting()
    if found is None:
        raise UserError(
            f"--nodes {config.nodes}: run the same line on each, with MASTER_ADDR and MASTER_PORT (an address "
            "of the first node, and a free port there) and NODE_RANK (0, 1, ...) set"
        )
    count = " to ".join(str(nodes * config.procs) for nodes in sorted({least, most}))
    if found.world not in (None, *range(least, most + 1), *range(least * config.procs, most * config.procs + 1)):
        raise UserError(
            f"WORLD_SIZE is {found.world}, but --nodes {config.nodes} of --procs {config.procs} "
            f"make {count} processes"
        )
    if least == most <= found.node:
        raise UserError(f"NODE_RANK is {found.node}, but --nodes {config.nodes} are 0 to {most - 1}")
    return found


def _note_loss(folder: Path | None, failure: Failure) -> None:
    """Keep with the run that a rank was lost, and that all were started again."""
    if folder is not None:
        with Events(RunFiles(folder).launcher_events(0)) as events:
            events.instant("lost", **failure.as_dict())


def _close_folder(run: RunFiles, error: BaseException) -> bool:
    """Say in the record how the run ended; without a record, it ended before it began, and leaves nothing. Whether
    there is something to go on with."""
    if not run.record.is_file():
        shutil.rmtree(run.folder)
        return False
    with contextlib.suppress(OSError):  # a full disk may be why it ends; the reason is what counts
        _close_record(run, error)
    return bool(record.read(run)["state"] != "finished")


def _close_record(run: RunFiles, error: BaseException) -> None:
    failed = error if isinstance(error, RankFailed) else error.__cause__
    if isinstance(failed, RankFailed):
        culprit = failed.culprit
        record.close_record(run, "failed", error=f"{culprit.trace}{failed}", rank=culprit.rank)
    elif record.read(run)["state"] in ("running", "killed"):  # no rank was left to say so
        stopped = isinstance(error, KeyboardInterrupt | Stopped)
        why = str(error) or "stopped by SIGINT" if stopped else "".join(traceback.format_exception(error))
        record.close_record(run, "stopped" if stopped else "failed", error=why)
