"""What of a training outlives it: found again at its start, kept meanwhile, here and where `--to` says."""

import dataclasses
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from evenstep import weights
from evenstep.config import Settled
from evenstep.errors import UserError
from evenstep.files import RunFiles
from evenstep.order.plan import Plan
from evenstep.progress import Progress
from evenstep.ranks import agreed, board
from evenstep.records import record, screen
from evenstep.records.recorder import Recorder
from evenstep.snapshots.home import Home, Say, at_home, try_out
from evenstep.snapshots.keeper import Keeper, Unkept
from evenstep.snapshots.manifest import Damaged, Manifest
from evenstep.snapshots.mirror import Mirror
from evenstep.snapshots.restore import take_over
from evenstep.snapshots.saver import Saver, Saving
from evenstep.snapshots.state import State
from evenstep.watch import drift, fingerprint
from evenstep.watch.fingerprint import Fingerprint
from evenstep.world import World


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start of a training: the first in its run, or one that goes on."""

    home: Home
    run: str
    """What no other run has."""
    session: str
    """What no other start has."""
    fresh: bool
    found: Manifest | None
    """The snapshot to go on from."""
    plan: Plan

    @contextmanager
    def mirrored(self, config: Settled) -> Iterator[Mirror | None]:
        """Meanwhile, and in the end, the run is kept where `--to` says too."""
        place = self.home.place
        owner = {"run": self.run, "session": self.session, "host": place.host, "since": record.now()}
        notes, say = board(place), _say(place)
        with self.home.mirrored(notes, self.found, owner, keep=config.keep, fresh=self.fresh, say=say) as mirror:
            yield mirror

    def go_on(self, state: State, recorder: Recorder) -> Progress:
        """Take over the snapshot that was found; how far the training has come. Every rank has to ask."""
        place = self.home.place
        if self.found is None:
            progress = Progress()
            if not self.fresh:
                recorder.resumed(progress, None)
            return progress
        take_over(state, self.home.folder, self.found, place.size)
        progress = Progress.of(self.found.progress)
        recorder.resumed(progress, self.found.snapshot)
        best = self.home.files.weights("best")
        if progress.epoch > 0 and not agreed(lambda: weights.intact(best), place):
            recorder.say(f"the best weights so far are lost ({best}): from now on the best since are kept")
            progress.without_best(Progress())
        return progress

    def keeper(
        self, state: State, config: Settled, mirror: Mirror | None, recorder: Recorder, progress: Progress
    ) -> Keeper | Unkept:
        """Who takes the snapshots."""
        if not self.home.keeps:
            return Unkept()
        place, shared = self.home.place, self.home.shared

        def records() -> None:
            recorder.flush()
            if mirror is not None and not shared:
                mirror.send_records()

        saving = Saving(
            shelf=self.home.shelf,
            keep=config.keep,
            run=self._facts(config),
            session=self.session,
            records=records,
            mirror=mirror if shared else None,
        )
        found = [] if self.found is None else [self.found.snapshot]
        return Keeper(
            Saver(state, saving, board(place), place, good=found),
            mirror,
            place,
            recorder,
            minutes=config.snapshot_minutes,
            over_network=not shared,
            newest=progress.number if found else -1,
        )

    def _facts(self, config: Settled) -> Mapping[str, Any]:
        """Whose training it is, kept with each snapshot; rank 0 writes it."""
        code = record.read(self.home.files).get("code") if self.home.place.leads else None
        return {
            "id": self.run,
            "plan": dataclasses.asdict(self.plan),
            "config": config.as_dict(),
            "code": code,
        }


def begin(files: RunFiles, config: Settled, plan: Plan, epochs: int, place: World) -> Start:
    """Find out where the run is kept, and what of it there is. Every rank has to ask."""
    say = _say(place)
    fresh, run, session = agreed(lambda: _named(files), place)
    try_out(config.to, place, say, fresh=fresh)
    home = at_home(files, config.to, place)
    if not home.keeps:
        _do_without(files, config, say)

    def sound(manifest: Manifest) -> None:
        _check(manifest, run, plan, epochs)

    found = None if fresh else home.newest(sound, say)
    return Start(home=home, run=run, session=session, fresh=fresh, found=found, plan=plan)


def changed(files: RunFiles, own: Fingerprint, place: World, *, allow: bool) -> list[str]:
    """What is not as it was when the run began; UserError where that forbids to go on. Every rank has to ask."""
    found = agreed(lambda: drift.since(record.kept_fingerprint(files), fingerprint.summary(own)), place)
    forbidding = drift.forbids(found)
    if forbidding and not allow:
        raise UserError(
            f"{files.folder} was begun with other {drift.shown(forbidding)}; bring back what it was, or go on "
            "with --allow-drift"
        )
    return found


def _do_without(files: RunFiles, config: Settled, say: Say) -> None:
    why = (
        f"the run's folder {files.folder} is not the same on all hosts, so no snapshot in it would be whole; "
        "name a folder that is with --runs, or a place for them with --to, such as s3://bucket/prefix"
    )
    if config.snapshot_every is not None:
        raise UserError(why)
    say(f"NO snapshots are taken: {why}")


def _named(files: RunFiles) -> tuple[bool, str, str]:
    return not files.record.is_file(), record.identity(files), uuid.uuid4().hex


def _check(manifest: Manifest, run: str, plan: Plan, epochs: int) -> None:
    """Damaged where it cannot be a snapshot of this run; a UserError where the run has been changed since."""
    if manifest.run.get("id") != run:
        raise Damaged("it is of another run")
    then, now = manifest.run.get("plan"), dataclasses.asdict(plan)
    if not isinstance(then, dict) or then.keys() != now.keys():
        raise Damaged("it has no plan that this evenstep knows")
    if changed := [f"{name} was {then[name]!r:.40} and is {now[name]}" for name in now if then[name] != now[name]]:
        raise UserError(
            f"snapshot {manifest.snapshot} was taken in another order of samples: {', '.join(changed)}; go on "
            "with the data and the options that the run had"
        )
    try:
        progress = Progress.of(manifest.progress)
    except ValueError as error:
        raise Damaged(f"it says of its progress: {error}") from None
    if progress.epoch >= epochs or progress.step > plan.steps(progress.epoch):
        raise Damaged("it is of beyond the training's end")


def _say(place: World) -> Say:
    return screen.say if place.leads else _say_nothing


def _say_nothing(line: str) -> None:
    del line
