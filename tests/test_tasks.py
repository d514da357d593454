"""The contract of a task, run by every task there is; and tasks by name, from files, and back to a name."""

import hashlib
import math
import sys
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep import Columns, Draw, Task
from evenstep.batches import on_device
from evenstep.config import Config
from evenstep.errors import UserError
from evenstep.loop import Score
from evenstep.order.permutation import Permutation
from evenstep.tasks import catalog
from evenstep.tasks.task import Optimizing
from tiny import Tiny

CPU = torch.device("cpu")
TINY = f"{Path(__file__).with_name('tiny.py')}:Tiny"
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("digits", {}),
    "digits mlp": ("digits", {"model_name": "mlp"}),
    "fraud": ("fraud", {}),
    "fraud cnn": ("fraud", {"model_name": "cnn"}),
    "cifar10": ("cifar10", {}),
    "cifar10 by timm": ("cifar10", {"model_name": "test_vit"}),
    "movielens": ("movielens", {}),
    "synthetic": ("synthetic", {"size": 3000, "hidden": 16}),
    "a user's own": (TINY, {"size": 200}),
    "a user's own, row by row": (TINY, {"size": 200, "row_by_row": True}),
}
AUGMENTED = ("digits", "digits mlp", "cifar10", "cifar10 by timm", "movielens", "a user's own")
SPLITS = ("train", "validation", "test")

every_task = pytest.mark.parametrize("name", TASKS)


@cache
def task_of(name: str) -> Task:
    return catalog.load(*TASKS[name])


@cache
def data_of(name: str, split: str) -> Any:
    return task_of(name).data(split)


def gathered(data: Any, rows: np.ndarray) -> dict[str, Tensor]:
    if hasattr(data, "gather"):
        return data.gather(rows)
    return torch.utils.data.default_collate([data[int(row)] for row in rows])


def batch_of(name: str, count: int, split: str = "train", epoch: int | None = 0) -> dict[str, Tensor]:
    """So many samples, ready for the model; augmented as in this epoch, or as in evaluation."""
    data = data_of(name, split)
    rows = Permutation(len(data), 5).block(0, min(count, len(data)))
    draw = None if epoch is None else Draw(3, epoch, rows, CPU)
    return task_of(name).prepare(on_device(gathered(data, rows), CPU, torch.float32), draw)


def fingerprints(data: Any, columns: list[str]) -> list[bytes]:
    """A hash for each sample's values."""
    found = []
    for start in range(0, len(data), 4096):
        batch = gathered(data, np.arange(start, min(start + 4096, len(data))))
        parts = [batch[column].numpy().reshape(len(batch[column]), -1).view(np.uint8) for column in columns]
        found += [hashlib.blake2b(row, digest_size=16).digest() for row in np.concatenate(parts, axis=1)]
    return found


def made_model(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return task_of(name).model()


def whole(batch: dict[str, Tensor], rows: Any) -> dict[str, Tensor]:
    return {column: values[rows] for column, values in batch.items()}


# The contract


@every_task
def test_no_sample_is_in_two_splits(name: str) -> None:
    parts = {split: data for split in SPLITS if (data := data_of(name, split)) is not None}
    assert {"train", "validation"} <= parts.keys() and all(len(data) > 0 for data in parts.values())
    columns = list(gathered(parts["train"], np.arange(1)))
    found = {split: set(fingerprints(data, columns)) for split, data in parts.items()}
    assert sum(map(len, found.values())) == len(set().union(*found.values())), "a sample is in two splits"


@every_task
def test_splits_are_the_same_each_time(name: str) -> None:
    again = catalog.load(*TASKS[name])
    for split in SPLITS:
        data, other = data_of(name, split), again.data(split)
        if data is None:
            assert other is None
            continue
        rows = Permutation(len(data), 1).block(0, 100 if len(data) > 100 else len(data))
        torch.testing.assert_close(gathered(other, rows), gathered(data, rows), rtol=0, atol=0)
        assert len(other) == len(data)


@every_task
def test_a_sample_is_the_row_that_a_batch_gathers(name: str) -> None:
    for split in SPLITS:
        data = data_of(name, split)
        if data is not None:
            rows = np.array([len(data) - 1, 0, len(data) // 2])
            one_by_one = torch.utils.data.default_collate([data[int(row)] for row in rows])
            torch.testing.assert_close(gathered(data, rows), one_by_one, rtol=0, atol=0)


@every_task
def test_a_model_follows_from_the_seed(name: str) -> None:
    first, again, other = (made_model(name, seed).state_dict() for seed in (0, 0, 1))
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@every_task
def test_losses_are_one_per_sample_whatever_the_batch(name: str) -> None:
    task, model = task_of(name), made_model(name).eval()
    batch = batch_of(name, 3)
    losses = task.losses(model, batch)
    assert losses.shape == (3,) and losses.is_floating_point() and losses.requires_grad
    alone = torch.cat([task.losses(model, whole(batch, slice(row, row + 1))) for row in (2, 1, 0)])
    torch.testing.assert_close(alone.flip(0), losses, rtol=1e-4, atol=1e-5)


@every_task
def test_every_parameter_learns(name: str) -> None:
    """Those that a step leaves out would make DDP wait, unless the task says so."""
    task, model = task_of(name), made_model(name)
    task.losses(model, batch_of(name, 2)).sum().backward()
    left_out = [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not left_out or task.unused_parameters


@every_task
def test_what_prepare_makes_of_a_sample_depends_on_nothing_else(name: str) -> None:
    """On its seed and epoch alone: not on the batch, a rank, or a worker (PL#20412)."""
    task, data = task_of(name), data_of(name, "train")
    rows = Permutation(len(data), 5).block(0, 12)
    for epoch in (0, 3):
        together = task.prepare(gathered(data, rows), Draw(3, epoch, rows, CPU))
        for part in (slice(0, 5), slice(5, 12), np.array([7, 2, 11])):
            alone = task.prepare(gathered(data, rows[part]), Draw(3, epoch, rows[part], CPU))
            torch.testing.assert_close(alone, whole(together, part), rtol=0, atol=0)


@pytest.mark.parametrize("name", AUGMENTED)
def test_augmentation_is_new_in_each_epoch_and_for_each_seed(name: str) -> None:
    task, data = task_of(name), data_of(name, "train")
    rows = Permutation(len(data), 5).block(0, 32)
    kinds = [
        task.prepare(gathered(data, rows), draw)
        for draw in (None, Draw(0, 0, rows, CPU), Draw(0, 1, rows, CPU), Draw(1, 0, rows, CPU))
    ]
    assert all(same(kinds[0], task.prepare(gathered(data, rows), None)) for _ in range(2))
    assert not any(same(kinds[i], kinds[j]) for i in range(4) for j in range(i))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@every_task
def test_metrics_measure_and_the_goal_is_among_them(name: str) -> None:
    task, model = task_of(name), made_model(name).eval()
    split = "validation" if data_of(name, "test") is None else "test"
    metrics = task.metrics()
    with torch.no_grad():
        batch = batch_of(name, 12 if name.startswith("cifar10") else 1000, split, epoch=None)  # frauds are rare
        for part in (slice(0, 8), slice(8, None)):
            task.measure(metrics, model, whole(batch, part))
    values = {"loss": 1.0, **{key: metric.compute() for key, metric in metrics.items()}}
    assert all(torch.as_tensor(value).isfinite().all() for value in values.values()), values
    Score(task.goal, values)


@every_task
def test_what_a_task_says_of_itself_is_usable(name: str) -> None:
    task, model = task_of(name), made_model(name)
    config = Config(task=name, **task.defaults)
    assert all(getattr(config, option) == value for option, value in task.defaults.items())
    settings = Optimizing(optimizer="adam", lr=0.1, weight_decay=0.0, momentum=0.0)
    assert task.optimizer(model, settings) is None or isinstance(
        task.optimizer(model, settings), torch.optim.Optimizer
    )
    parts = set(model.modules())
    assert all(unit in parts for unit in task.units(model) or ())


@every_task
def test_a_task_can_be_made_again_from_what_is_recorded(name: str) -> None:
    place, options = catalog.describe(task_of(name))
    again = catalog.load(place, options)
    assert again == task_of(name) and type(again) is type(task_of(name))
    as_words = {key: str(value) for key, value in options.items()}
    assert catalog.load(place, as_words) == task_of(name), "as the command line has them"


@pytest.mark.parametrize("name", catalog.BUILT_IN)
def test_built_in_tasks_are_listed(name: str) -> None:
    assert name in {place for place, _ in TASKS.values()} and catalog.ABOUT[name]


# Draws


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
def test_a_draw_belongs_to_the_sample(seed: int, epoch: int, rows: list[int]) -> None:
    indices = np.array(rows)
    drawn = Draw(seed, epoch, indices, CPU)
    numbers, integers = drawn.uniform("a"), drawn.integers("b", -3, 4)
    assert (numbers >= 0).all() and (numbers < 1).all() and numbers.dtype == torch.float32
    assert (integers >= -3).all() and (integers < 4).all()
    for place in range(len(rows)):
        alone = Draw(seed, epoch, indices[place : place + 1], CPU)
        assert alone.uniform("a") == numbers[place] and alone.integers("b", -3, 4) == integers[place]


def test_draws_are_evenly_spread_and_unlike_each_other() -> None:
    rows = np.arange(20_000)
    drawn = [Draw(seed, epoch, rows, CPU).uniform(name) for seed in (0, 1) for epoch in (0, 1) for name in "ab"]
    deviation = 1 / math.sqrt(12 * len(rows))
    for numbers in drawn:
        assert abs(numbers.double().mean() - 0.5) < 5 * deviation
    corners = torch.corrcoef(torch.stack(drawn)).fill_diagonal_(0.0)
    assert corners.abs().max() < 5 / math.sqrt(len(rows)), "two kinds of draws go together"
    counts = torch.bincount(Draw(0, 0, rows, CPU).integers("c", 0, 7), minlength=7)
    assert (counts - len(rows) / 7).abs().max() < 5 * math.sqrt(len(rows) / 7)


def test_columns_belong_together() -> None:
    with pytest.raises(ValueError, match="at least one column"):
        Columns()
    with pytest.raises(ValueError, match=r"columns differ in length: \{'x': 3, 'y': 2\}"):
        Columns(x=torch.zeros(3), y=np.zeros(2))


# From names and files


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user's, that is gone from the modules and the path when the test is over."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    monkeypatch.setattr(sys, "modules", sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


WHOLE = """
    from dataclasses import dataclass
    from torch import nn
    from evenstep import Columns, Task
    import numpy as np

    @dataclass(frozen=True, kw_only=True)
    class Mine(Task):
        width: int = 3

        def data(self, split):
            return Columns(x=np.ones((4, 3), dtype=np.float32))

        def model(self):
            return nn.Linear(3, self.width)

        def losses(self, model, batch):
            return model(batch["x"]).sum(1)
"""


def test_a_file_with_one_task_needs_no_more_than_its_name(here: Path) -> None:
    write(here / "my_task.py", WHOLE)
    task = catalog.load("my_task.py", {"width": "5"})
    assert type(task).__name__ == "Mine" and task.width == 5  # type: ignore[attr-defined]
    assert catalog.load("my_task.py:Mine", {}) == catalog.load(str(here / "my_task.py"), {})
    assert catalog.describe(task) == (f"{here / 'my_task.py'}:Mine", {"width": 5})


def test_a_file_is_run_once(here: Path) -> None:
    write(here / "my_task.py", WHOLE + "\n    import pathlib\n    pathlib.Path('ran').open('x').close()\n")
    for spelled in ("my_task.py", "./my_task.py:Mine", str(here / "my_task.py")):
        catalog.load(spelled, {})


def test_a_file_may_have_any_name_and_neighbours(here: Path) -> None:
    write(here / "helper_of_mine.py", "WIDTH = 7\n")
    for name in ("random.py", "my task-1.py", "größe.py"):
        write(
            here / name,
            "import helper_of_mine\n" + textwrap.dedent(WHOLE).replace("= 3", "= helper_of_mine.WIDTH"),
        )
        assert catalog.load(name, {}).width == 7  # type: ignore[attr-defined]
    import random

    assert random.random() < 1


def test_two_files_of_one_name_are_two_tasks(here: Path) -> None:
    for folder, width in (("a", 1), ("b", 2)):
        write(here / folder / "my_task.py", WHOLE.replace("= 3", f"= {width}"))
    assert [catalog.load(f"{folder}/my_task.py", {}).width for folder in "ab"] == [1, 2]  # type: ignore[attr-defined]


def test_a_module_is_as_good_as_a_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(here / "package_of_mine" / "__init__.py", "")
    write(here / "package_of_mine" / "tasks.py", WHOLE)
    monkeypatch.syspath_prepend(here)
    task = catalog.load("package_of_mine.tasks:Mine", {})
    assert catalog.describe(task) == ("package_of_mine.tasks:Mine", {"width": 3})


ABSTRACT = """
    from evenstep import Task

    class Half(Task):
        def model(self): ...
"""
TWO = WHOLE + "\n    class Other(Mine): ...\n"
BAD_OPTION = WHOLE.replace("width: int = 3", "width: int")
NO_DATACLASS = WHOLE.replace("@dataclass(frozen=True, kw_only=True)", "").replace("width: int = 3", "width = 3")
ARGUMENTS = NO_DATACLASS + "\n        def __init__(self, width): ...\n"


@pytest.mark.parametrize(
    ("task", "options", "says"),
    [
        (
            "digit",
            {},
            "no task digit; there are digits, fraud, cifar10, movielens, synthetic, or a file ending in .py",
        ),
        ("nowhere.py", {}, "no file nowhere.py to take a task from; here is "),
        ("x" * 300 + ".py", {}, "to take a task from"),
        ("whole.py:Yours", {}, "no class Yours for whole.py; there are Mine"),
        ("whole.py:np", {}, "in whole.py is not a subclass of evenstep.Task"),
        ("whole.py:nn.Linear", {}, "no class nn.Linear for whole.py; there are Mine"),
        ("two.py", {}, "two.py has 2 tasks; say which: two.py:Mine, two.py:Other"),
        ("none.py", {}, "none.py defines no subclass of evenstep.Task"),
        ("half.py", {}, "Half in half.py lacks the methods data, losses"),
        ("no.such.module:Mine", {}, "no module no.such.module to take a task from; is it installed?"),
        ("whole.py", {"depth": "1"}, "no option depth for whole.py; there are width (int)"),
        ("whole.py", {"width": "wide"}, "width=wide will not do: width is int"),
        ("whole.py", {"width": "1.5"}, "width=1.5 will not do: width is int"),
        ("whole.py", {"model_name": "big"}, "whole.py has one model only; leave --model out"),
        ("needs.py", {}, "needs.py needs a value for width: --set width=..."),
        (
            "plain.py",
            {"width": "1"},
            "plain.py has no option width: its class has no dataclass fields, so it takes none",
        ),
        ("arguments.py", {}, "Mine wants arguments nobody here can give; make it a dataclass, for --set"),
        ("digits", {"model_name": "rnn"}, "no model rnn for digits; there are cnn, mlp"),
        ("synthetic", {"size": "0"}, "size of synthetic must be at least 1, not 0"),
        ("movielens", {"width": "-1"}, "width of movielens must be at least 1, not -1"),
        ("", {}, "no task ; there are digits"),
        (":", {}, "to take a task from"),
        ("whole.py:", {}, "no class  for whole.py; there are Mine"),
    ],
)
def test_a_mistake_is_one_line(here: Path, task: str, options: dict[str, Any], says: str) -> None:
    texts = {
        "whole": WHOLE,
        "two": TWO,
        "none": "x = 1",
        "half": ABSTRACT,
        "needs": BAD_OPTION,
        "plain": NO_DATACLASS,
    }
    for name, text in {**texts, "arguments": ARGUMENTS}.items():
        write(here / f"{name}.py", text)
    with pytest.raises(UserError) as caught:
        catalog.load(task, options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("import nowhere_to_be_found", ModuleNotFoundError), ("1 / 0", ZeroDivisionError), ("def :", SyntaxError)],
)
def test_a_mistake_in_the_users_own_file_is_seen_as_it_is(here: Path, text: str, kind: type[Exception]) -> None:
    write(here / "my_task.py", text)
    with pytest.raises(kind):
        catalog.load("my_task.py", {})
    write(here / "package" / "__init__.py", text)
    with pytest.raises(kind):
        catalog.load(f"{here / 'package' / '__init__.py'}:Mine", {})


@dataclass(frozen=True, kw_only=True)
class Optioned(Tiny):
    """With options of all kinds."""

    number: float = 1.0
    flag: bool = False
    maybe: int | None = 5
    place: Path = Path()
    text: str = ""
    way: Literal["left", "right", 3] = "left"


OPTIONED = f"{__file__}:Optioned"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("size=1e3", 1000),
        ("size=-2", -2),
        ("number=3", 3.0),
        ("number=1e-3", 1e-3),
        ("flag=yes", True),
        ("flag=OFF", False),
        ("maybe=none", None),
        ("maybe=7", 7),
        ("place=a/b c", Path("a/b c")),
        ("text=", ""),
        ("text=a=b", "a=b"),
        ("text=none", "none"),
        ("way=right", "right"),
        ("way=3", 3),
    ],
)
def test_a_word_is_read_as_its_field_is_declared(word: str, value: Any) -> None:
    name, _, text = word.partition("=")
    task = catalog.load(OPTIONED, {name: text})
    assert getattr(task, name) == value and type(getattr(task, name)) is type(value)
    assert catalog.load(*catalog.describe(task)) == task


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("flag=maybe", "flag=maybe will not do: flag is bool"),
        ("size=1e400", "size=1e400 will not do: size is int"),
        ("size=nan", "size=nan will not do"),
        ("size=", "size= will not do"),
        ("way=up", "no way up; there are left, right, 3"),
        ("maybe=x", "maybe=x will not do: maybe is int | None"),
    ],
)
def test_a_word_that_will_not_do_is_one_line(word: str, says: str) -> None:
    name, _, text = word.partition("=")
    with pytest.raises(UserError) as caught:
        catalog.load(OPTIONED, {name: text})
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_what_other_processes_could_not_find_is_refused() -> None:
    class Local(Tiny):
        pass

    with pytest.raises(UserError, match="Local is defined inside a function"):
        catalog.describe(Local())

    made: dict[str, Any] = {"__name__": "__console__"}
    exec("from tiny import Tiny\nclass Typed(Tiny): ...", made)
    with pytest.raises(UserError, match="Typed is not defined in a file"):
        catalog.describe(made["Typed"]())


def test_what_cannot_be_recorded_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"Optioned.text holds a list, which cannot be recorded; an option is a number"
    ):
        catalog.describe(Optioned(text=["a"]))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="Argued takes arguments that cannot be recorded; make it a dataclass"):
        catalog.describe(Argued(3))


class Argued(Task):
    """Takes an argument that nobody can tell from the outside."""

    def __init__(self, width: int) -> None:
        self.width = width

    def data(self, split: str) -> Any:
        del split

    def model(self) -> nn.Module:
        return nn.Identity()

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch)
