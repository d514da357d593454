"""Ranks that do not run the same are found before the first step, and so is a run that is not what it was."""

import json
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from commands import Ran, run, start
from evenstep.config import Config
from evenstep.tasks import samples
from evenstep.tasks.task import Columns
from evenstep.training import load_task
from evenstep.watch import drift, fingerprint
from evenstep.watch.drift import Rank
from evenstep.watch.fingerprint import Fingerprint
from evenstep.world import World, alone

TASK = """
from dataclasses import dataclass
import torch
import torch.nn.functional as F
from torch import nn
from evenstep import Columns, Task
import beside

@dataclass(frozen=True)
class Mine(Task):
    size: int = 40

    def data(self, split):
        x = torch.arange(self.size * 3.0).view(-1, 3)
        return Columns(x=x, y=x.sum(1)) if split == "train" else None

    def model(self):
        return nn.Linear(3, 1)

    def losses(self, model, batch):
        return F.mse_loss(model(batch["x"]).squeeze(1), batch["y"], reduction="none") * beside.SCALE
"""


@pytest.fixture(autouse=True)
def nothing_imported() -> Iterator[None]:
    """Each folder of a test has modules of the same names."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop("beside", None)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A file with a task, and one beside it that it imports."""
    return written(tmp_path / "first")


def written(folder: Path, beside: str = "SCALE = 1e-6\n", text: str = TASK) -> Path:
    folder.mkdir()
    (folder / "beside.py").write_text(beside)
    (folder / "mine.py").write_text(text)
    return folder / "mine.py"


def own(task: Path, **options: Any) -> Fingerprint:
    """What a rank finds that trains this."""
    config = Config(task=str(task), **options).complete({}, alone())
    loaded = load_task(config)
    return fingerprint.taken(config, loaded, loaded.data("train"), loaded.model())


def differing(*fingerprints: Fingerprint) -> list[str]:
    return drift.differences([Rank(f"h{rank}", found) for rank, found in enumerate(fingerprints)])


# What is found


def test_the_same_gives_the_same(task: Path) -> None:
    assert own(task) == own(task)
    assert differing(own(task), own(task)) == []


def test_each_kind_of_difference_is_named(task: Path) -> None:
    plain = own(task)
    assert differing(plain, own(task, lr=0.5)) == ["setting lr: 0.001 on rank 0 (h0), 0.5 on rank 1 (h1)"]
    data, content, size = differing(plain, own(task, set={"size": 41}))
    assert size == "setting set size: absent on rank 0 (h0), 41 on rank 1 (h1)"
    assert data == "data size: 40 on rank 0 (h0), 41 on rank 1 (h1)"
    assert content.startswith("data samples: ")
    wider = {**plain, **fingerprint.of_model(nn.Linear(4, 1))}
    assert differing(plain, wider) == [
        "parameter weight: (1, 3) float32 on rank 0 (h0), (1, 4) float32 on rank 1 (h1)"
    ]
    assert differing({**plain, "package torch": "1"}, plain)[0].startswith("package torch: ")


def test_files_are_named_by_where_they_lie_beside_the_task(tmp_path: Path) -> None:
    """Each machine may have the same files in another place."""
    first = own(written(tmp_path / "first"))
    assert {"file mine.py", "file evenstep/loop.py"} <= first.keys()
    sys.modules.pop("beside")  # each of these stands for a process of its own
    assert differing(first, own(written(tmp_path / "second"))) == []
    sys.modules.pop("beside")
    edited = own(written(tmp_path / "third", beside="SCALE = 2e-6\n"))
    assert [text.partition(":")[0] for text in differing(first, edited)] == ["file beside.py"]


def test_what_is_each_machines_own_affair_is_no_difference(task: Path) -> None:
    plain = own(task)
    assert differing(plain, own(task, runs="elsewhere", data=None, workers=3, note="mine", log_every=7)) == []
    more = {**plain, "file another.py": "1", "package numpy_financial": "2"}
    assert differing(plain, more) == [], "a rank may have imported more than another one"


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["data size", "setting lr", "file x"]), st.sampled_from("ab")), min_size=1
    )
)
def test_there_is_a_difference_where_two_ranks_differ(found: list[dict[str, str]]) -> None:
    named = {text.partition(":")[0] for text in differing(*found)}
    for name in ("data size", "setting lr", "file x"):
        values = {each.get(name) for each in found}
        if name == "file x":
            values.discard(None)
        assert (name in named) == (len(values) > 1)


# Of data


def test_data_is_told_by_its_size_and_its_content() -> None:
    x = torch.randn(100, 3)
    told = fingerprint.of_data(Columns(x=x))
    assert told["data size"] == "100"
    assert fingerprint.of_data(Columns(x=x.clone())) == told
    other = x.clone()
    other[0, 0] += 1e-6
    assert fingerprint.of_data(Columns(x=other))["data samples"] != told["data samples"]


def test_data_that_differs_each_time_it_is_read_is_told_by_its_size_alone() -> None:
    class Noisy:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            return np.random.default_rng().random(3)

    assert fingerprint.of_data(Noisy()) == {"data size": "5"}


def test_data_of_unknown_kinds_is_told_by_its_size_alone() -> None:
    assert fingerprint.of_data([object(), object()]) == {"data size": "2"}


def test_files_that_a_data_set_opens_at_its_first_sample_stay_closed() -> None:
    """Open ones could not be handed to data loading processes."""

    class Lazy:
        def __init__(self) -> None:
            self.file: Any = None

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            self.file = self.file or "open"
            return index

    class Around:
        def __init__(self) -> None:
            self.inner = Lazy()

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return self.inner[index]

    data = Around()
    assert "data samples" in fingerprint.of_data(data)
    assert data.inner.file is None


leaf = st.one_of(st.integers(), st.floats(allow_nan=False), st.text(), st.booleans(), st.none(), st.binary())
sample = st.recursive(leaf, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(sample, sample)
def test_samples_have_the_same_hash_if_they_are_the_same(one: Any, other: Any) -> None:
    assert samples.digest(one) == samples.digest(one) is not None
    if list(map(repr, samples.leaves(one))) != list(map(repr, samples.leaves(other))):
        assert samples.digest(one) != samples.digest(other)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_is_found_wherever_it_is(number: float) -> None:
    good = {"x": torch.ones(3), "y": (np.ones(2), 1.5, "text", None, 3)}
    assert samples.finite(good)
    assert not samples.finite({**good, "z": number})
    assert not samples.finite({**good, "x": torch.tensor([1.0, number])})
    assert not samples.finite([good, np.array([[number]])])


# Since the beginning


def test_what_has_changed_since_the_beginning_is_told_and_data_and_model_forbid_to_go_on(task: Path) -> None:
    before = json.loads(json.dumps(fingerprint.summary(own(task))))
    assert drift.since(before, fingerprint.summary(own(task))) == []
    code = drift.since(before, fingerprint.summary({**own(task), "file mine.py": "0"}))
    assert len(code) == 1 and code[0].startswith("code mine.py: ") and drift.forbids(code) == []
    data = drift.since(before, fingerprint.summary(own(task, set={"size": 41})))
    assert drift.forbids(data) == data and data[0] == "data size: 40 then, 41 now"
    model = drift.since(before, fingerprint.summary({**own(task), **fingerprint.of_model(nn.Linear(4, 1))}))
    assert len(drift.forbids(model)) == 1 and model[0].startswith("model parameters: ")
    assert drift.since({}, fingerprint.summary(own(task))) == [], "a run of which nothing is known"


def test_one_rank_has_nobody_to_differ_from(task: Path) -> None:
    assert drift.compare(own(task), World(), allow=False) == []


# Real ranks


def two_nodes(folder: Path, tasks: Mapping[int, Path], *more: str, **options: tuple[str, ...]) -> list[Ran]:
    """One rank on each of two nodes, with files and options of their own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    commands = []
    for node, task in tasks.items():
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(node)}
        place = folder / f"node-{node}"
        place.mkdir()
        words = (
            "--nodes",
            "2",
            "--epochs",
            "1",
            "--runs",
            str(folder / "runs"),
            *more,
            *options.get(f"node_{node}", ()),
        )
        commands.append(start("train", str(task), *words, folder=place, environment=variables))
    return [command.wait() for command in commands]


@pytest.mark.slow
def test_nodes_with_other_files_and_options_do_not_begin(tmp_path: Path) -> None:
    tasks = {0: written(tmp_path / "here"), 1: written(tmp_path / "there", beside="SCALE = 2e-6\n")}
    first, second = two_nodes(tmp_path, tasks, node_1=("--lr", "0.5"))
    assert first.code == second.code == 2, first.err + second.err
    complaint = first.err.splitlines()[-1]  # torch may have words of its own about nodes that leave
    assert complaint == second.err.splitlines()[-1]
    host = socket.gethostname()
    assert complaint.startswith("evenstep: the ranks do not run the same: file beside.py: ")
    assert f"setting lr: 0.001 on rank 0 ({host}), 0.5 on rank 1 ({host})" in complaint
    assert complaint.endswith("make them alike, or go on with --allow-drift")
    assert not list((tmp_path / "runs").glob("*/record.json")), "there is no run"


@pytest.mark.slow
def test_nodes_that_may_differ_go_on_and_the_record_says_so(tmp_path: Path) -> None:
    tasks = {0: written(tmp_path / "here"), 1: written(tmp_path / "there", beside="SCALE = 2e-6\n")}
    first, second = two_nodes(tmp_path, tasks, "--allow-drift")
    assert first.code == second.code == 0, first.err + second.err
    (record,) = (json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/record.json"))
    ((found,),) = (drifted["between_ranks"] for drifted in record["drift"])
    assert found.startswith("file beside.py: ")


@pytest.mark.slow
def test_a_run_goes_on_with_other_code_and_says_so_but_not_with_other_data(tmp_path: Path) -> None:
    task = written(tmp_path / "first")
    (tmp_path / "first" / "beside.py").write_text("import os\nSCALE = 1e-6\n")
    begun = run("train", str(task), "--epochs", "1", "--max-steps", "1", folder=tmp_path)
    files = begun.one_run()
    record = json.loads(files.record.read_text())
    assert record["fingerprint"]["data"]["size"] == "40" and "mine.py" in record["fingerprint"]["code"]
    files.record.write_text(json.dumps({**record, "state": "stopped"}))

    task.write_text(TASK.replace("size: int = 40", "size: int = 41"))
    refused = run("resume", str(files.folder), folder=tmp_path).complaint()
    assert "was begun with other data size: 40 then, 41 now" in refused and refused.endswith("--allow-drift")

    task.write_text(TASK + "# another line\n")
    went_on = run("resume", str(files.folder), folder=tmp_path)
    assert went_on.code == 0, went_on.err
    assert "changed since the run began: code mine.py: " in went_on.out
    changed = json.loads(files.record.read_text())["changed"]
    assert [text.partition(":")[0] for entry in changed for text in entry["what"]] == ["code mine.py"]
