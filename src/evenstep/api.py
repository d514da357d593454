"""`evenstep.train` and its relatives: what the command line does, for Python."""

import functools
import multiprocessing
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from evenstep import world
from evenstep.config import Config, checked, read_yaml
from evenstep.errors import UserError, unknown
from evenstep.files import RunFiles, find_run, replacing
from evenstep.launch import local
from evenstep.progress import Values
from evenstep.records import record
from evenstep.records.events import losses_of
from evenstep.tasks import catalog, files
from evenstep.tasks.task import Task
from evenstep.training import Run, load_task, make_folder, run_evaluation, run_training
from evenstep.world import Meeting, World

T = TypeVar("T")

SPLITS = ("train", "validation", "test")
WEIGHTS = ("best", "last")
RESTARTS = 3  # where nothing else is said

UNGUARDED = (
    "this script is being read by another process to find the task in it, and would start the training again: "
    'put evenstep.train(...) under  if __name__ == "__main__":'
)


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
    # so multiprocessing marks a process that is still reading the script it was started from
    if getattr(multiprocessing.current_process(), "_inheriting", False) or files.loading() is not None:
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
    load_task(config)  # what is wrong with it is said before any process starts
    place, meeting = world.from_launcher(), _meeting(config)
    ours = place is None and (meeting is None or meeting.node == 0)
    with local.stoppable():
        return _train(config, command, make_folder(config) if ours else None)


def _train(config: Config, command: Sequence[str], folder: Path | None) -> Result:
    """Train in a folder, or in one that rank 0 makes."""
    run = Run(config=config, command=command, folder=folder)
    with local.stoppable():
        try:
            return Result(_start(functools.partial(run_training, run), config, _restarts(config)))
        except BaseException as error:
            if folder is not None:
                _close_folder(RunFiles(folder), error)
            raise


def resume(run: str | Path, *, runs: str = "runs", **options: Any) -> Result:
    """Go on with a run where its newest snapshot is, in the same folder, on as many processes as is said now.

    What decides the result, the options of the run, stays as it was; where it computes may change.
    """
    found = find_run(run, Path(runs))
    told = record.read(found)
    if told["state"] == "finished":
        raise UserError(f"{found.folder} has finished: there is nothing to go on with")
    if told["state"] == "running":
        raise UserError(f"{found.folder} is running (pid {told['process']['pid']} on {told['process']['host']})")
    kept = read_yaml(found.config)
    if not {"procs", "nodes", "strategy"}.isdisjoint(options):
        kept["strategy"] = None
    kept["allow_drift"] = False  # what was allowed once is not for ever
    config = Config(**{**kept, **checked(options, "evenstep.resume()")})
    found.stop.unlink(missing_ok=True)
    return _train(config, sys.argv, found.folder)


def evaluate(
    run: str | Path, *, split: str = "test", weights: str = "best", runs: str = "runs", **options: Any
) -> Values:
    """Measure a run's weights on its task's data."""
    found = find_run(run, Path(runs))
    kept = read_yaml(found.config)
    if kept.get("strategy") in ("one", "dp"):
        kept["strategy"] = None  # more processes than one may measure what one has trained
    config = Config(**{**kept, "nodes": 1, **checked(options, "evenstep.evaluate()")})
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    path = _weights(found, weights)
    with local.stoppable():
        return _start(functools.partial(run_evaluation, config, path, split), config)


def export(run: str | Path, file: str | Path, *, weights: str = "best", runs: str = "runs") -> None:
    """Write a run's weights to a file of their own: `.safetensors`, or `.pt` for `torch.load`."""
    path, target = _weights(find_run(run, Path(runs)), weights), Path(file)
    if target.suffix not in (".safetensors", ".pt"):
        raise UserError(f"{target.name} should end in .safetensors or .pt, which says how it is written")
    try:
        with replacing(target) as temporary:
            if target.suffix == ".pt":
                torch.save(load_file(path), temporary)
            else:
                shutil.copyfile(path, temporary)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from None


def _weights(found: RunFiles, which: str) -> Path:
    if which not in WEIGHTS:
        raise unknown("weights", which, WEIGHTS)
    if not found.weights(which).is_file():
        raise UserError(f"{found.folder} holds no {which} weights: it ended before its first epoch did")
    return found.weights(which)


def _start(entry: Callable[[World], T], config: Config, restarts: int = 0) -> T:
    """Run as the rank that a launcher made this process, or alone, or in processes of our own."""
    place = world.from_launcher()
    if place is not None:
        return entry(place)
    if config.procs * config.nodes == 1 and not restarts:
        return entry(world.alone())
    return local.launch(entry, config.procs, nodes=config.nodes, meeting=_meeting(config), restarts=restarts)


def _restarts(config: Config) -> int:
    """A process that is alone is watched by another one only where restarts are asked for."""
    several = config.procs * config.nodes > 1
    return RESTARTS * several if config.max_restarts is None else config.max_restarts


def _meeting(config: Config) -> Meeting | None:
    """Where this node meets the others; None where there is one only."""
    if config.nodes == 1:
        return None
    found = world.meeting()
    if found is None:
        raise UserError(
            f"--nodes {config.nodes}: run the same line on each, with MASTER_ADDR and MASTER_PORT (an address "
            "of the first node, and a free port there) and NODE_RANK (0, 1, ...) set"
        )
    if found.world not in (None, config.nodes, config.nodes * config.procs):
        raise UserError(
            f"WORLD_SIZE is {found.world}, but --nodes {config.nodes} of --procs {config.procs} "
            f"make {config.nodes * config.procs} processes"
        )
    return found


def _close_folder(run: RunFiles, error: BaseException) -> None:
    """Say in the record how the run ended; without a record, it ended before it began, and leaves nothing."""
    if not run.record.is_file():
        shutil.rmtree(run.folder)
        return
    failed = error if isinstance(error, local.RankFailed) else error.__cause__
    if isinstance(failed, local.RankFailed):
        culprit = failed.culprit
        record.close_record(run, "failed", error=f"{culprit.trace}{failed}", rank=culprit.rank)
    elif isinstance(error, KeyboardInterrupt | local.Stopped):
        record.close_record(run, "stopped", error=str(error) or "stopped by SIGINT")
    elif record.read(run)["state"] == "running":
        record.close_record(run, "failed", error="".join(traceback.format_exception(error)))
