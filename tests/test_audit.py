"""An audit finds each sample once where it was so, and never where it was not: however restarts, changes of the
number of ranks, gone snapshots and damaged records lie."""

import dataclasses
import functools
import itertools
import json
import shutil
import socket
import tracemalloc
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from evenstep.errors import UserError
from evenstep.files import RunFiles
from evenstep.order import digest
from evenstep.order.digest import Digest
from evenstep.order.plan import Plan
from evenstep.records import audit as auditing
from evenstep.records.audit import audit
from evenstep.records.coverage import Coverage
from evenstep.records.events import Events

Place = tuple[int, int]


@dataclass(frozen=True)
class Snapshot:
    """What a session can go on from."""

    place: Place
    session: str


@dataclass
class Trained:
    """A training as its ranks would record it, without the training."""

    files: RunFiles
    plan: Plan
    epochs: int
    snapshots: list[Snapshot] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)

    def session(self, world: int, windows: Sequence[int], since: Snapshot | None, *, behind: int = 0) -> None:
        """All ranks take so many steps between two notes, and a snapshot after each; the last `behind` ranks are
        killed before they have noted the last of them."""
        name = f"{len(self.sessions):032x}"
        self.sessions.append(name)
        place = since.place if since else (0, 0)
        ranks = [Events(self.files.events(rank)) for rank in range(world)]
        for rank, events in enumerate(ranks):
            events.instant("started", rank=rank, host="here", pid=1, world=world, session=name)
            if since:
                epoch, step = place
                number = self.number(place)
                events.instant(
                    "resumed", session=name, of=since.session, snapshot="s", epoch=epoch, step=step, number=number
                )
        for last, wanted in enumerate(windows, start=1):
            epoch, step = place
            if step == self.plan.steps(epoch):
                epoch, step = epoch + 1, 0
            if epoch == self.epochs:
                break
            steps = min(wanted, self.plan.steps(epoch) - step)
            place = epoch, step + steps
            noting = ranks[: world - behind] if last == len(windows) else ranks
            for rank, events in enumerate(noting):
                found = self.digest(epoch, step, steps, rank, world)
                events.instant("trained", session=name, epoch=epoch, step=step, steps=steps, digest=found)
            if len(noting) == world:
                self.snapshots.append(Snapshot(place, name))
                for events in ranks:
                    events.instant(
                        "saved", session=name, snapshot="s", step=self.number(place), error=None, size=1
                    )
        for events in ranks:
            events.close()

    def digest(self, epoch: int, step: int, steps: int, rank: int, world: int) -> Digest:
        found = Digest()
        for share in islice(self.plan.shares(epoch, step, rank, world), steps):
            found = found.plus(share.digest)
        return found

    def number(self, place: Place) -> int:
        return sum(self.plan.steps(epoch) for epoch in range(place[0])) + place[1]

    def ended(self, state: str, **facts: Any) -> None:
        """Write the record."""
        here = {"host": socket.gethostname(), "pid": 1 << 30, "created": 0.0}
        told = {"state": state, "process": here, "plan": dataclasses.asdict(self.plan), **facts}
        self.files.record.write_text(json.dumps(told))
        self.files.config.write_text(f"task: none\nepochs: {self.epochs}\n")


plans = st.builds(
    Plan,
    size=st.integers(1, 90),
    global_batch=st.integers(4, 40),
    seed=st.integers(0, 3),
    policy=st.sampled_from(["shuffle", "sequential", "shards", "blocks"]),
    block_size=st.integers(1, 9),
    deal=st.sampled_from(["round_robin", "random"]),
    workers=st.integers(1, 4),
)
worlds = st.integers(1, 4)
windows = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], RunFiles]:
    count = itertools.count()
    parent = tmp_path_factory.mktemp("runs")

    def make() -> RunFiles:
        files = RunFiles(parent / str(next(count)))
        (files.folder / "events").mkdir(parents=True)
        return files

    return make


def make_training(data: st.DataObject, files: RunFiles, *, whole: bool) -> tuple[Trained, Place]:
    """A training of several sessions, each from any snapshot there has been, or from nothing; where it came to."""
    trained = Trained(files, data.draw(plans), epochs=data.draw(st.integers(1, 3)))
    for _ in range(data.draw(st.integers(0, 4))):
        since = data.draw(st.sampled_from([None, *trained.snapshots]))
        world = data.draw(worlds)
        trained.session(world, data.draw(windows), since, behind=data.draw(st.integers(0, world - 1)))
    since = data.draw(st.sampled_from([None, *trained.snapshots]))
    trained.session(data.draw(worlds), [1000] * trained.epochs if whole else data.draw(windows), since)
    taken = [snapshot.place for snapshot in trained.snapshots if snapshot.session == trained.sessions[-1]]
    return trained, taken[-1] if taken else since.place if since else (0, 0)


@given(st.data())
@settings(deadline=None, max_examples=80)
def test_through_any_restarts_each_sample_counts_once(
    folders: Callable[[], RunFiles], data: st.DataObject
) -> None:
    whole = data.draw(st.booleans())
    trained, place = make_training(data, folders(), whole=whole)
    steps = trained.number(place)
    trained.ended("finished", steps=steps) if whole else trained.ended("running")
    found = audit(trained.files)
    assert found.sound, found
    assert sum(epoch.steps for epoch in found.epochs) == steps
    plan = trained.plan
    assert sum(epoch.once for epoch in found.epochs) == sum(
        plan.samples(epoch.epoch, 0, epoch.steps) for epoch in found.epochs
    )
    told = sum(
        event["digest"][0]
        for path in trained.files.all_events().values()
        for event in map(json.loads, path.read_text().splitlines())
        if event["name"] == "trained"
    )
    assert sum(epoch.once + epoch.undone for epoch in found.epochs) == told
    shutil.rmtree(trained.files.folder)


Lines = list[dict[str, Any]]


def drop(lines: Lines, at: int, _: st.DataObject) -> None:
    del lines[at]


def repeat(lines: Lines, at: int, data: st.DataObject) -> None:
    lines.insert(data.draw(st.integers(at, len(lines))), lines[at])


def shift(lines: Lines, at: int, data: st.DataObject) -> None:
    lines[at] = {**lines[at], "step": lines[at]["step"] + data.draw(st.sampled_from([-1, 1]))}


def stretch(lines: Lines, at: int, data: st.DataObject) -> None:
    lines[at] = {**lines[at], "steps": lines[at]["steps"] + data.draw(st.sampled_from([-1, 1]))}


def other_epoch(lines: Lines, at: int, data: st.DataObject) -> None:
    lines[at] = {**lines[at], "epoch": lines[at]["epoch"] + data.draw(st.sampled_from([-1, 1, 1 << 40]))}


def other_samples(lines: Lines, at: int, data: st.DataObject) -> None:
    changed = list(lines[at]["digest"])
    changed[data.draw(st.integers(0, 3))] += data.draw(st.sampled_from([-1, 1]))
    lines[at] = {**lines[at], "digest": changed}


def other_session(lines: Lines, at: int, _: st.DataObject) -> None:
    lines[at] = {**lines[at], "session": "f" * 32}


def cut_off(lines: Lines, at: int, _: st.DataObject) -> None:
    del lines[at:]


DAMAGE = (drop, repeat, shift, stretch, other_epoch, other_samples, other_session, cut_off)


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_what_is_wrong_with_committed_steps_is_found(folders: Callable[[], RunFiles], data: st.DataObject) -> None:
    trained, place = make_training(data, folders(), whole=True)
    trained.ended("finished", steps=trained.number(place))
    rank, path = data.draw(st.sampled_from(sorted(trained.files.all_events().items())))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    committed = [at for at, line in enumerate(lines) if line["name"] == "trained" and counts(trained, line)]
    assume(committed)
    damage = data.draw(st.sampled_from(DAMAGE))
    damage(lines, data.draw(st.sampled_from(committed)), data)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = audit(trained.files)
    assert not found.sound, f"{damage.__name__} on rank {rank}: {found}"
    shutil.rmtree(trained.files.folder)


def counts(trained: Trained, line: dict[str, Any]) -> bool:
    return auditing.read_lineage(trained.files, ended=True).counts(
        auditing.Noted(line["session"], 0, line["epoch"], line["step"], line["step"] + line["steps"], Digest())
    )


def drawn(data: st.DataObject, most: int) -> int:
    """A number from 0 to `most`, which may differ from run to run by a digit of the time of day."""
    return int(data.draw(st.integers(0, 1 << 30))) % (most + 1)


def drop_any(text: bytes, data: st.DataObject) -> bytes:
    lines = text.splitlines(keepends=True)
    del lines[drawn(data, len(lines) - 1)]
    return b"".join(lines)


def move_any(text: bytes, data: st.DataObject) -> bytes:
    lines = text.splitlines(keepends=True)
    line = lines.pop(drawn(data, len(lines) - 1))
    lines.insert(drawn(data, len(lines)), line)
    return b"".join(lines)


def repeat_any(text: bytes, data: st.DataObject) -> bytes:
    lines = text.splitlines(keepends=True)
    lines.insert(drawn(data, len(lines)), lines[drawn(data, len(lines) - 1)])
    return b"".join(lines)


def change_a_letter(text: bytes, data: st.DataObject) -> bytes:
    at = drawn(data, len(text) - 1)
    return text[:at] + data.draw(st.binary(min_size=1, max_size=1)) + text[at + 1 :]


def truncate(text: bytes, data: st.DataObject) -> bytes:
    return text[: drawn(data, len(text))]


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_no_damage_makes_an_audit_claim_what_was_not(folders: Callable[[], RunFiles], data: st.DataObject) -> None:
    whole = data.draw(st.booleans())
    trained, place = make_training(data, folders(), whole=whole)
    steps = trained.number(place)
    trained.ended("finished", steps=steps) if whole else trained.ended("running")
    truth = audit(trained.files)
    path = data.draw(st.sampled_from(sorted(trained.files.all_events().values())))
    harm = data.draw(st.sampled_from([drop_any, move_any, repeat_any, change_a_letter, truncate]))
    path.write_bytes(harm(path.read_bytes(), data))
    try:
        found = audit(trained.files)
    except UserError:
        return
    for before, after in itertools.zip_longest(truth.epochs, found.epochs):
        if found.sound and (whole or after is not None):
            assert before is not None and (after.once, after.steps) <= (before.once, before.steps), harm.__name__
            assert not whole or after.once == before.once, harm.__name__
    shutil.rmtree(trained.files.folder)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_a_rank_without_records_is_missed(folders: Callable[[], RunFiles], data: st.DataObject) -> None:
    trained, place = make_training(data, folders(), whole=True)
    trained.ended("finished", steps=trained.number(place))
    paths = trained.files.all_events()
    assume(len(paths) > 1)
    rank = data.draw(st.sampled_from(sorted(paths)))
    paths[rank].unlink()
    found = audit(trained.files)
    assert not found.sound
    shutil.rmtree(trained.files.folder)


def test_epochs_that_were_left_too_early_are_missed(folders: Callable[[], RunFiles]) -> None:
    """Gaps in which no rank noted anything: at the end of a run that says it finished, and between epochs."""
    trained = Trained(folders(), Plan(size=40, global_batch=8), epochs=3)
    trained.session(2, [2, 2], None)
    trained.ended("finished", steps=15)
    found = audit(trained.files)
    assert not found.sound and [epoch.lost for epoch in found.epochs] == [8, 40, 40]
    first = trained.files.folder
    trained = Trained(folders(), Plan(size=40, global_batch=8), epochs=3)
    trained.session(1, [2, 2], Snapshot((2, 0), "0" * 32))
    trained.ended("running")
    found = audit(trained.files)
    assert [epoch.lost for epoch in found.epochs] == [40, 40, 0]
    assert "left no records" in found.odd[0] or "began after" in found.odd[0]
    shutil.rmtree(first)


def test_what_one_rank_noted_before_all_were_killed_is_not_lost(folders: Callable[[], RunFiles]) -> None:
    trained = Trained(folders(), Plan(size=40, global_batch=8), epochs=1)
    trained.session(3, [2, 2], None, behind=1)
    trained.ended("running")
    found = audit(trained.files)
    assert found.sound and (found.epochs[0].steps, found.epochs[0].undone) == (2, 10)
    for path in trained.files.all_events().values():  # but a snapshot had been taken of it
        with Events(path) as events:
            events.instant("saved", session=trained.sessions[0], step=4, error=None)
    found = audit(trained.files)
    assert not found.sound and found.epochs[0].lost == 16


def test_a_thousand_billion_samples_take_no_longer(folders: Callable[[], RunFiles]) -> None:
    plan = Plan(size=10**12 + 7, global_batch=64)
    trained = Trained(folders(), plan, epochs=2)
    of = plan.steps(0)
    with Events(trained.files.events(0)) as events:
        name = {"session": "0" * 32}
        events.instant("started", rank=0, world=1, **name)
        events.instant("trained", epoch=0, step=0, steps=of, digest=digest.of_all(plan.size), **name)
        events.instant("trained", epoch=1, step=0, steps=100, digest=plan.digest(1, 0, 100), **name)
    trained.ended("finished", steps=of + 100)
    tracemalloc.start()
    found = audit(trained.files)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.sound and [epoch.once for epoch in found.epochs] == [plan.size, 6400]
    assert memory < 2e6, f"{memory:,} bytes"


def test_too_much_to_work_out_is_looked_at_here_and_there(
    folders: Callable[[], RunFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditing, "WORKED_OUT", 400)
    trained = Trained(folders(), Plan(size=10_000, global_batch=10), epochs=1)
    trained.session(2, [1] * 200, None)
    trained.ended("running")
    found = audit(trained.files)
    assert found.sound and 0.1 < found.epochs[0].proven < 0.4
    path = trained.files.events(1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    noted = [line for line in lines if line["name"] == "trained"]
    for one, other in zip(noted[::2], noted[1::2], strict=True):  # what they add up to stays the same
        one["digest"], other["digest"] = other["digest"], one["digest"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = audit(trained.files)
    assert not found.sound and found.epochs[0].proven == 0 and found.lost == found.repeated == 0


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 9), st.integers(1, 4)), max_size=12)
)
@settings(deadline=None, max_examples=200)
def test_coverage_counts_as_a_list_of_all_steps_would(noted: list[tuple[int, int, int, int]]) -> None:
    coverage = Coverage()
    counts = {session: [[0] * 20 for _ in range(3)] for session in ("a", "b")}
    for number, rank, first, steps in noted:
        session = "ab"[number]
        coverage.add(session, rank, first, first + steps)
        for step in range(first, first + steps):
            counts[session][rank][step] += 1
    found = {}
    for first, last, least, most in coverage.ranges(12, {"a": 3, "b": 3}):
        assert first == max(found, default=-1) + 1
        found |= dict.fromkeys(range(first, last), (least, most))
    assert max(found) >= 11
    for step, (least, most) in found.items():
        ranks = [[rank[step] for rank in session] for session in counts.values()]
        assert (least, most) == (sum(map(min, ranks)), sum(map(max, ranks)))


def test_the_command_says_so_by_its_exit_code(folders: Callable[[], RunFiles], evenstep: Any) -> None:
    trained = Trained(folders(), Plan(size=40, global_batch=8), epochs=1)
    trained.session(2, [2, 3], None)
    trained.ended("finished", steps=5)
    ran = evenstep("audit", str(trained.files.folder))
    assert ran.code == 0 and ran.out.splitlines()[-1] == "0 repeated, 0 lost" and not ran.err
    trained.files.events(1).unlink()
    ran = evenstep("audit", str(trained.files.folder))
    assert ran.code == 1 and "NOT each sample exactly once" in ran.out and "from ranks [1]" in ran.out
    trained.files.events(0).write_text('{"kind": "instant", "name": "trained"}\n')
    assert "not those of a run" in evenstep("audit", str(trained.files.folder)).complaint()


# Steps that were left out


def leave_out(trained: Trained, chosen: Collection[Place], ranks: Collection[int]) -> None:
    """As if these ranks had noted that the updates of these steps were left out."""
    for rank, path in trained.files.all_events().items():
        lines, world = [], 0
        for event in map(json.loads, path.read_text().splitlines()):
            world = event.get("world", world)
            if event["name"] == "trained" and rank in ranks:
                first, epoch, kept = event["step"], event["epoch"], Digest(*event["digest"])
                event["left_out"] = [s for s in range(first, first + event["steps"]) if (epoch, s) in chosen]
                parts = (trained.digest(epoch, step, 1, rank, world) for step in event["left_out"])
                left_out = functools.reduce(Digest.plus, parts, Digest())
                event |= {"digest": kept.minus(left_out), "left_out_digest": left_out}
            lines.append(json.dumps(event) + "\n")
        path.write_text("".join(lines))


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_steps_that_were_left_out_are_counted_apart(folders: Callable[[], RunFiles], data: st.DataObject) -> None:
    """Through any restarts, and the proof holds for them as well."""
    trained, place = make_training(data, folders(), whole=True)
    trained.ended("finished", steps=trained.number(place))
    plan = trained.plan
    places = [(epoch, step) for epoch in range(trained.epochs) for step in range(plan.steps(epoch))]
    chosen = data.draw(st.sets(st.sampled_from(places)))
    leave_out(trained, chosen, range(4))
    found = audit(trained.files)
    assert found.sound, found
    for epoch in found.epochs:
        left_out = sum(plan.samples(each, step, step + 1) for each, step in chosen if each == epoch.epoch)
        assert (epoch.left_out, epoch.once, epoch.lost) == (left_out, plan.size - left_out, 0)
    shutil.rmtree(trained.files.folder)


def test_ranks_that_do_not_agree_on_what_was_left_out_are_found(folders: Callable[[], RunFiles]) -> None:
    for ranks, sound in (([0, 1], True), ([0], False), ([1], False)):
        trained = Trained(folders(), Plan(size=40, global_batch=8), epochs=1)
        trained.session(2, [1, 4], None)
        trained.ended("finished", steps=5)
        leave_out(trained, [(0, 3)], ranks)
        assert audit(trained.files).sound is sound


@pytest.mark.parametrize("claimed", [[1], [4], [1, 1], [-1]])
def test_what_was_not_left_out_cannot_be_said_to_be(folders: Callable[[], RunFiles], claimed: list[int]) -> None:
    """A step that was trained on, or one that lies elsewhere."""
    trained = Trained(folders(), Plan(size=40, global_batch=8), epochs=1)
    trained.session(1, [3, 2], None)
    trained.ended("finished", steps=5)
    path = trained.files.events(0)
    lines = path.read_text().replace('"steps": 3, ', f'"steps": 3, "left_out": {claimed}, ')
    path.write_text(lines)
    assert not audit(trained.files).sound
