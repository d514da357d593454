"""What a user types, word for word where that takes seconds: what comes of it, and of what is mistyped."""

import os
import re
import shutil
import signal
import socket
import subprocess
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import commands
from commands import Ran
from evenstep import __version__
from evenstep.cli import main
from evenstep.files import RunFiles
from evenstep.records import record
from evenstep.records.events import losses_of, read_events

HERE = Path(__file__).parent
TINY = str(HERE / "tiny.py")
SHORT = ("--global-batch", "8", "--epochs", "2")  # 12 steps of Tiny

Evenstep = Callable[..., Ran]


def said(ran: Ran) -> Ran:
    """A command that went well, and said nothing on stderr."""
    assert ran.code == 0, ran.err
    assert not ran.err, ran.err
    return ran


# The lines of the README


@pytest.mark.usefixtures("real_data")
def test_fraud(evenstep: Evenstep) -> None:
    words = "train fraud --procs 2 --strategy ddp --model ff --batch-size 128 --epochs 4 --sample 20000 --note"
    ran = said(evenstep(*words.split(), "first try"))
    told = ran.record()
    assert told["state"] == "finished" and told["note"] == "first try" and told["model"] == "ff"
    assert told["strategy"] == "ddp" and told["world"]["processes"] == 2
    assert told["plan"]["size"] == 20_000 and told["plan"]["global_batch"] == 256
    assert told["epochs"] == 4 and told["steps"] == 4 * 79 and told["samples"] == 80_000
    assert told["test"].keys() == {
        *("loss", "average_precision", "roc_auc", "precision", "recall", "f1", "confusion_matrix"),
    }
    assert sum(map(sum, told["test"]["confusion_matrix"])) == 284_807 // 5, "each payment of the test part once"
    assert told["test"]["roc_auc"] > 0.8, "even this little teaches something"


def test_digits(evenstep: Evenstep) -> None:
    told = said(evenstep("train", "digits", "--epochs", "2")).record()
    assert told["test"]["accuracy"] > 0.6 and told["strategy"] == "one" and told["plan"]["global_batch"] == 64


def test_synthetic(evenstep: Evenstep) -> None:
    told = said(evenstep("train", "synthetic", "--set", "size=3000", "--set", "hidden=32")).record()
    assert told["final"]["loss"] < 1 and told["epochs"] == 3 and told["samples"] == 9000


@pytest.mark.usefixtures("real_data")
def test_movielens(evenstep: Evenstep) -> None:
    told = said(evenstep("train", "movielens", "--procs", "2", "--max-steps", "30")).record()
    assert told["test"]["rmse"] < 1.1 and {"hit_rate_10", "ndcg_10"} <= told["test"].keys()


@pytest.mark.usefixtures("real_data")
@pytest.mark.parametrize(
    "words",
    [
        "train cifar10 --model resnet18 --strategy fsdp --procs 4 --global-batch 256 --sample 16",
        "train cifar10 --model vit_base_patch32_224 --precision bf16 --global-batch 2 --sample 200",
    ],
)
def test_cifar10(tmp_path: Path, words: str) -> None:
    """Until the first step is taken: to look at all 15,000 images for validation and test takes minutes."""
    command = commands.start(*words.split(), folder=tmp_path, shared=False)
    events = command.until(lambda: next(tmp_path.glob("runs/*/events/rank-0.jsonl"), None), "its run")
    loss = command.until(lambda: losses_of(events), "its first step")[0]
    assert 0.5 < loss < 6, "about as good as guessing among ten"
    command.send(signal.SIGKILL)
    command.wait()


@pytest.mark.parametrize("spelled", ["my_task.py", "my_task.py:Tiny"])
def test_a_task_of_ones_own(evenstep: Evenstep, tmp_path: Path, spelled: str) -> None:
    shutil.copy(TINY, tmp_path / "my_task.py")
    ran = said(evenstep("train", spelled, "--procs", "2", *SHORT))
    told = ran.record()
    assert told["task"] == spelled and told["steps"] == 12 and told["world"]["processes"] == 2
    assert ran.one_run().folder.name.endswith("-my_task")


SCRIPT = """
    import evenstep
    from tiny import Tiny

    class MyTask(Tiny):
        pass

    def run():
        result = evenstep.train(MyTask(size=30), procs=PROCS, global_batch=8, epochs=2, note="from a script")
        print(result.record["state"], result.record["world"]["processes"], len(result.losses), result.best_weights)
"""


@pytest.mark.parametrize("procs", [1, 2])
def test_a_script(tmp_path: Path, procs: int) -> None:
    text = SCRIPT.replace("PROCS", str(procs)) + '\n    if __name__ == "__main__":\n        run()\n'
    (tmp_path / "my_script.py").write_text(textwrap.dedent(text))
    ran = commands.run("my_script.py", folder=tmp_path, environment={"PYTHONPATH": python_path()}, cold=procs > 1)
    assert ran.code == 0, ran.err
    told = ran.record()
    state, processes, losses, best = ran.out.splitlines()[-1].split()
    assert (state, int(processes), int(losses)) == ("finished", procs, 8)
    assert load_file(tmp_path / best).keys() == load_file(ran.one_run().weights("last")).keys()
    assert told["note"] == "from a script" and told["task"].endswith("my_script.py:MyTask")
    assert [Path(word).name for word in told["command"]] == ["my_script.py"]


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    """Its ranks read it to find the task in it, and would start the training again."""
    text = SCRIPT.replace("PROCS", "2") + "\n    run()\n"
    (tmp_path / "my_script.py").write_text(textwrap.dedent(text))
    ran = commands.run("my_script.py", folder=tmp_path, environment={"PYTHONPATH": python_path()})
    assert ran.code == 1 and not ran.runs
    assert ran.err.splitlines()[-1].endswith('put evenstep.train(...) under  if __name__ == "__main__":')
    assert "starting all ranks again" not in ran.err


def test_a_rank_of_a_script_that_fails_shows_its_traceback(tmp_path: Path) -> None:
    text = SCRIPT.replace("PROCS", "2").replace(
        "pass", "defaults = {'epochs': 2}\n\n        def losses(self, *_):\n            return 1 / 0"
    )
    text += '\n    if __name__ == "__main__":\n        run()\n'
    (tmp_path / "my_script.py").write_text(textwrap.dedent(text))
    ran = commands.run("my_script.py", folder=tmp_path, environment={"PYTHONPATH": python_path()})
    assert ran.code == 1
    assert re.search(
        r"RankFailed: rank \d on \S+ \(pid \d+\) failed with ZeroDivisionError: division by zero\n", ran.err
    )
    assert "return 1 / 0" in ran.err and ran.err.endswith("ZeroDivisionError: division by zero\n")


def test_a_script_that_is_given_to_the_command_is_told_so(evenstep: Evenstep, tmp_path: Path) -> None:
    (tmp_path / "my_script.py").write_text(textwrap.dedent(SCRIPT.replace("PROCS", "1") + "\n    run()\n"))
    complaint = evenstep("train", "my_script.py", environment={"PYTHONPATH": python_path()}).complaint()
    assert complaint.endswith('put evenstep.train(...) under  if __name__ == "__main__":')


def python_path() -> str:
    return os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", "")))


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    words = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "evenstep",
        "train",
        "digits",
    )
    ran = commands.run(*words, "--epochs", "1", folder=tmp_path, cold=True, environment={"TMPDIR": str(tmp_path)})
    assert ran.code == 0, ran.err
    told = ran.record()
    assert told["world"]["processes"] == 2 and told["strategy"] == "ddp" and told["state"] == "finished"
    assert told["plan"]["global_batch"] == 64
    assert ran.out.count("epoch 1/1") == 1, "one rank speaks"


def test_a_mistake_of_a_rank_under_torchrun_is_one_line(evenstep: Evenstep) -> None:
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert "no task digts; there are digits, fraud" in evenstep("train", "digts", environment=place).complaint()


def machines(*words: str, numbers: tuple[int, ...], folders: Sequence[Path]) -> list[Ran]:
    """The same line on machines of these numbers, started in this order, each in a folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    count = {"WORLD_SIZE": str(len(numbers))}
    started = [
        commands.start(*words, folder=folder, environment={**meeting, **count, "NODE_RANK": str(number)})
        for number, folder in zip(numbers, folders, strict=True)
    ]
    return [command.wait() for command in started]


def test_two_machines(tmp_path: Path) -> None:
    first, second = machines("train", TINY, *SHORT, "--nodes", "2", numbers=(0, 1), folders=(tmp_path, tmp_path))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    told = first.record()
    assert told["world"] == {"processes": 2, "nodes": 2, "device": "cpu"} and told["state"] == "finished"
    assert told["steps"] == 12 and len(losses_of(first.one_run().events(0))) == 12


def test_two_machines_that_share_no_disk(tmp_path: Path) -> None:
    """Rank 0, and with it the run, is on the one that is called 0; each keeps what its own ranks have to say."""
    folders = (tmp_path / "second", tmp_path / "first")
    for folder in folders:
        folder.mkdir()
    second, first = machines("train", TINY, *SHORT, "--nodes", "2", numbers=(1, 0), folders=folders)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    here, there = first.one_run(), second.one_run()
    assert first.record()["state"] == "finished" and here.folder.name == there.folder.name
    assert sum(event["name"] == "trained" for event in read_events(there.events(1))) >= 2
    assert not there.record.exists() and not there.events(0).exists() and not here.events(1).exists()


def test_two_machines_of_one_number_are_told_so(tmp_path: Path) -> None:
    ended = machines("train", TINY, "--nodes", "3", numbers=(0, 1, 1), folders=[tmp_path] * 3)
    for ran in ended:
        assert ran.complaint() == "two nodes have the NODE_RANK 1; number them 0, 1, ..."
    assert not ended[0].runs


@pytest.mark.parametrize(
    ("environment", "words", "says"),
    [
        ({}, "--nodes 2", "--nodes 2: run the same line on each, with MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_ADDR": "h"}, "--nodes 2", "with MASTER_ADDR and MASTER_PORT"),
        ({"NODE_RANK": "2"}, "--nodes 2", "NODE_RANK is 2, but --nodes 2 are 0 to 1"),
        ({"NODE_RANK": "x"}, "--nodes 2", "NODE_RANK in the environment must be a whole number, not 'x'"),
        ({"NODE_RANK": ""}, "--nodes 2", "NODE_RANK in the environment must be a whole number, not ''"),
        (
            {"MASTER_PORT": "http"},
            "--nodes 2",
            "MASTER_PORT in the environment must be a whole number, not 'http'",
        ),
        ({"MASTER_PORT": "70000"}, "--nodes 2", "MASTER_PORT in the environment must be a port, not 70000"),
        (
            {"WORLD_SIZE": "5"},
            "--nodes 2 --procs 2",
            "WORLD_SIZE is 5, but --nodes 2 of --procs 2 make 4 processes",
        ),
    ],
)
def test_a_mistake_about_machines_is_one_line(
    evenstep: Evenstep, environment: dict[str, str], words: str, says: str
) -> None:
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400", "NODE_RANK": "0"} if len(environment) == 1 else {}
    if "MASTER_ADDR" in environment:
        given = {}
    ran = evenstep("train", TINY, *words.split(), environment={**given, **environment})
    assert says in ran.complaint() and not ran.runs


# What a run leaves is usable


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run with test data, on one process."""
    folder = tmp_path_factory.mktemp("trained")
    return commands.run(
        "train", "synthetic", "--set", "size=500", "--set", "hidden=8", "--epochs", "3", folder=folder
    )


def figures(ran: Ran) -> dict[str, str]:
    return dict(line.split() for line in ran.out.splitlines())


def test_evaluate_says_what_training_said(trained: Ran) -> None:
    run = trained.one_run()
    told = record.read(run)
    expected = {name: f"{value:.4f}" for name, value in told["test"].items()}
    for words in (
        [str(run.folder)],
        [run.folder.name],
        [run.folder.name, "--procs", "2"],
        [run.folder.name, "--split", "test"],
    ):
        assert figures(said(commands.run("evaluate", *words, folder=trained.folder))) == expected
    last = said(
        commands.run(
            "evaluate", run.folder.name, "--weights", "last", "--split", "validation", folder=trained.folder
        )
    )
    assert figures(last) == {name: f"{value:.4f}" for name, value in told["final"].items()}
    assert record.read(run) == told and trained.runs == [run.folder], "to measure leaves no trace"


def test_export_writes_weights_that_load(trained: Ran, tmp_path: Path) -> None:
    run = trained.one_run()
    runs = str(trained.folder / "runs")
    for name in ("model.safetensors", "model.pt"):
        said(commands.run("export", run.folder.name, name, "--runs", runs, folder=tmp_path))
    import torch

    found = torch.load(tmp_path / "model.pt", weights_only=True)
    torch.testing.assert_close(found, load_file(run.weights("best")))
    torch.testing.assert_close(found, load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("evaluate RUN --split tests", "no split tests; there are train, validation, test"),
        ("evaluate RUN --weights first", "no weights first; there are best, last"),
        ("evaluate RUN --procs 0", "procs must be at least 1, not 0"),
        ("evaluate RUN --device tpu", "no device tpu; there are auto, cpu, cuda, mps"),
        ("evaluate RUN --device cuda", "device cuda: torch finds no CUDA device here; take --device cpu"),
        ("evaluate nothing", "no run nothing; the last ones in runs are "),
        ("evaluate", "the following arguments are required: RUN; evenstep evaluate --help says what there is"),
        ("export RUN model.onnx", "model.onnx should end in .safetensors or .pt, which says how it is written"),
        ("export RUN no/such/model.pt", "no/such/model.pt cannot be written: No such file or directory"),
        ("resume RUN", "has finished: there is nothing to go on with"),
        ("resume RUN --procs two", "argument --procs: invalid int value: 'two'"),
        ("audit", "the following arguments are required: RUN"),
    ],
)
def test_a_mistake_about_a_run_is_one_line(trained: Ran, words: str, says: str) -> None:
    name = trained.one_run().folder.name
    complaint = commands.run(*words.replace("RUN", name).split(), folder=trained.folder).complaint()
    assert says in complaint


def test_audit_finds_each_sample_once(trained: Ran) -> None:
    ran = said(commands.run("audit", trained.one_run().folder.name, folder=trained.folder))
    assert ran.out.splitlines()[-1] == "0 repeated, 0 lost"


# A file of options


def test_options_from_a_file_and_the_line_wins(evenstep: Evenstep, tmp_path: Path) -> None:
    given = {
        "task": TINY,
        "global-batch": 8,
        "epochs": 5,
        "lr": "1e-2",
        "set": {"size": 20, "norm": True},
        "note": "file",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
    ran = said(evenstep("train", "--config", "run.yaml", "--epochs", "2", "--set", "size=30"))
    kept = yaml.safe_load(ran.one_run().config.read_text())
    assert kept["set"] == {"size": "30", "norm": True} and kept["note"] == "file"
    assert (kept["global_batch"], kept["epochs"], kept["lr"], kept["optimizer"]) == (8, 2, 0.01, "adam")
    again = said(evenstep("train", "--config", str(ran.one_run().config)))
    one, other = (RunFiles(folder) for folder in again.runs)
    assert losses_of(other.events(0)) == losses_of(one.events(0))
    assert yaml.safe_load(other.config.read_text()) == kept


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("epoch: 3", "no option epoch for run.yaml; there are task, model, set"),
        ("epochs: many", "epochs in run.yaml must be a whole number or nothing, not 'many'"),
        ("epochs: 3.5", "epochs in run.yaml must be a whole number or nothing, not 3.5"),
        ("epochs: true", "epochs in run.yaml must be a whole number or nothing, not True"),
        ("compile: 1", "compile in run.yaml must be true or false, not 1"),
        ("set: 5", "set in run.yaml must be a mapping of name to value, not 5"),
        ("set: {5: 1}", "no option 5 for digits; there are model_name (str)"),
        ("strategy: ddpp", "no strategy ddpp; there are one, dp, ddp, fsdp"),
        ("strategy: [ddp]", "strategy in run.yaml must be a text or nothing, not ['ddp']"),
        ("- a\n- b", "the configuration run.yaml must be lines of name: value"),
        ("a: b: c", "the configuration run.yaml is not YAML: "),
        ("task: digits\ntask: [", "the configuration run.yaml is not YAML: "),
        ("!!python/object/apply:os.system [ls]", "the configuration run.yaml is not YAML: "),
        ("\xff", "the configuration run.yaml is not text"),
        ("x: &a [*a]", "no option x for run.yaml"),
        ("runs: null", "runs in run.yaml must be a text, not None"),
        ("config: other.yaml", "no option config for run.yaml"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(tmp_path: Path, text: str, says: str, typed: Any) -> None:
    (tmp_path / "run.yaml").write_bytes(text.encode("latin-1"))
    assert says in typed("train", "digits", "--config", "run.yaml")


def test_an_empty_file_says_nothing(tmp_path: Path, typed: Any) -> None:
    (tmp_path / "run.yaml").write_text("# nothing yet\n")
    assert "train what? there are digits" in typed("train", "--config", "run.yaml")
    assert "run.yam cannot be read: No such file or directory" in typed("train", "--config", "run.yam")
    assert "cannot be read: Is a directory" in typed("train", "--config", ".")


# What is mistyped


@pytest.fixture
def typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What the command, run in this process, complains of in its one line."""
    monkeypatch.chdir(tmp_path)

    def complaint(*words: str) -> str:
        with pytest.raises(SystemExit) as left:
            main(words)
        out, err = capsys.readouterr()
        assert left.value.code == 2 and not out, (left.value.code, out, err)
        assert err.startswith("evenstep: ") and err.count("\n") == 1, err
        assert not list(tmp_path.glob("runs/*")), "a mistake leaves no run"
        return err.removeprefix("evenstep: ")

    return complaint


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("trian digits", "invalid choice: 'trian' (choose from"),
        (
            "train",
            "train what? there are digits, fraud, cifar10, movielens, synthetic, or a file of yours ending in .py",
        ),
        (
            "train digit",
            "no task digit; there are digits, fraud, cifar10, movielens, synthetic, or a file ending in .py",
        ),
        (
            "train cifar10 --model resnet19",
            "no model resnet19 for cifar10; there are resnet18, resnet34, resnet50",
        ),
        ("train digits --model rnn", "no model rnn for digits; there are cnn, mlp"),
        ("train synthetic --model big", "synthetic has one model only; leave --model out"),
        ("train digits fraud", "fraud is one word too many"),
        ("train digits --epoch 3", "no option --epoch; there are --epochs"),
        ("train digits --strategy=xyz", "no strategy xyz; there are one, dp, ddp, fsdp"),
        ("train digits --xyz", "no option --xyz; there are "),
        ("train digits -p 2", "no option -p; there are "),
        ("train digits --epochs", "argument --epochs: expected one argument"),
        ("train digits --epochs many", "argument --epochs: invalid whole number value: 'many'"),
        ("train digits --epochs 0", "epochs must be at least 1, not 0"),
        ("train digits --epochs -1", "epochs must be at least 1, not -1"),
        ("train digits --lr fast", "argument --lr: invalid number value: 'fast'"),
        ("train digits --lr nan", "lr must be at least 0 and below 2^63, not nan"),
        ("train digits --lr -0.1", "lr must be at least 0, not -0.1"),
        ("train digits --lr inf", "lr must be at least 0 and below 2^63, not inf"),
        ("train digits --clip 0", "clip must be above 0, not 0.0; leave it out for no clipping"),
        ("train digits --clip nan", "clip must be above 0, not nan"),
        ("train digits --seed 9223372036854775808", "seed must be at least 0 and below 2^63"),
        ("train digits --precision fp8", "no precision fp8; there are fp32, bf16, fp16, fp64"),
        ("train digits --optimizer lion", "no optimizer lion; there are adam, adamw, sgd"),
        ("train digits --schedule step", "no schedule step; there are constant, cosine, linear"),
        ("train digits --device tpu", "no device tpu; there are auto, cpu, cuda, mps"),
        ("train digits --device cuda", "device cuda: torch finds no CUDA device here; take --device cpu"),
        ("train digits --device mps", "device mps: torch finds none here; take --device cpu"),
        ("train digits --policy shufle", "no policy shufle; there are shuffle, sequential, shards, blocks"),
        ("train digits --deal fair", "no deal fair; there are round_robin, random"),
        ("train digits --batch-size 8 --global-batch 16", "give --batch-size (per process) or --global-batch"),
        ("train digits --strategy one --procs 2", "strategy one is a single process, not 2; take ddp or fsdp"),
        ("train digits --strategy dp --procs 2", "strategy dp drives all devices from one process"),
        ("train digits --procs 0", "procs must be at least 1, not 0"),
        ("train digits --policy shards --dealt-to 9 --global-batch 8", "the global batch of 8 is too small"),
        ("train digits --set width", "--set takes name=value, not width"),
        ("train digits --set =3", "--set takes name=value, not =3"),
        ("train digits --set width=3", "no option width for digits; there are model_name (str)"),
        ("train synthetic --set size=none", "size=none will not do: size is int"),
        ("train digits --runs /dev/null", "no run can be kept in /dev/null: "),
        ("train fraud --data .", "fraud needs "),
        ("train no.py", "no file no.py to take a task from; here is "),
        ("train digits --snapshot-minutes -1", "snapshot_minutes must be at least 0, not -1.0"),
        ("train digits --workers -1", "workers must be at least 0, not -1"),
        ("data get mnist", "no data set mnist; there are cifar10, fraud, movielens"),
        ("data get", "the following arguments are required: NAME"),
        ("data lst", "invalid choice: 'lst' (choose from"),
    ],
)
def test_a_mistake_is_one_line_with_what_is_valid(typed: Callable[..., str], words: str, says: str) -> None:
    assert says in typed(*words.split())


def test_a_mistake_that_the_ranks_find_is_one_line(evenstep: Evenstep) -> None:
    """And is no reason to start them again."""
    assert (
        "is too small: each needs a sample a step; take 9 or more"
        in evenstep(
            "train", TINY, "--procs", "2", "--policy", "shards", "--dealt-to", "9", "--global-batch", "8"
        ).complaint()
    )


WRONG_GOAL = """
    from tiny import Tiny

    class Mine(Tiny):
        goal = "max acuracy"
"""
WRONG_LOSS = """
    from tiny import Tiny

    class Mine(Tiny):
        def losses(self, model, batch):
            return super().losses(model, batch).mean()
"""


@pytest.mark.parametrize("procs", ["1", "2"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (WRONG_GOAL, "the goal names acuracy, which is not measured; there are loss, error, precision"),
        (WRONG_LOSS, "losses() of Mine must return one loss per sample, a tensor of shape ("),
    ],
)
def test_a_mistake_in_a_task_of_ones_own_is_one_line(
    evenstep: Evenstep, tmp_path: Path, text: str, says: str, procs: str
) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(text))
    ran = evenstep("train", "mine.py", "--procs", procs, environment={"PYTHONPATH": python_path()})
    assert says in ran.err and ran.code == 2 and "Traceback" not in ran.err
    assert len(ran.runs) == (1 if text == WRONG_LOSS else 0), "there is a run from its first step on"


@pytest.mark.parametrize("procs", ["1", "2"])
def test_an_error_in_the_users_own_code_comes_with_its_traceback(
    evenstep: Evenstep, tmp_path: Path, procs: str
) -> None:
    text = WRONG_LOSS.replace(".mean()", "[batch['nothing']]")
    (tmp_path / "mine.py").write_text(textwrap.dedent(text))
    ran = evenstep("train", "mine.py", "--procs", procs, environment={"PYTHONPATH": python_path()})
    assert ran.code == 1
    lines = ran.err.splitlines()
    if procs == "2":
        assert lines.pop().startswith("evenstep: rank ")
    assert lines[-1] == "KeyError: 'nothing'" and 'mine.py", line' in ran.err
    assert ran.record()["state"] == "failed" and "KeyError: 'nothing'" in ran.record()["error"]


# Help, lists


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        ((), "train a model; the run gets a folder of its own"),
        (("--help",), "evaluate"),
        (("train", "--help"), "--micro-batch N"),
        (("data",), "download one from its publisher"),
        (("--version",), f"evenstep {__version__}"),
    ):
        with pytest.raises(SystemExit) as left:
            main(words)
        out, err = capsys.readouterr()
        assert not left.value.code and expected in out and not err


@pytest.mark.usefixtures("real_data")
def test_data_list(evenstep: Evenstep, tmp_path: Path) -> None:
    for words, where in (((), "here: "), (("--data", str(tmp_path)), "not here: ")):
        lines = said(evenstep("data", "list", *words)).out.splitlines()
        assert [line.split()[0] for line in lines] == ["cifar10", "fraud", "movielens"]
        assert all(where in line for line in lines)
    assert "https://files.grouplens.org/datasets/movielens/ml-latest-small.zip" in lines[2]


def test_data_get_of_what_is_here_says_where(evenstep: Evenstep, real_data: Path) -> None:
    assert said(evenstep("data", "get", "movielens")).out.startswith(
        f"movielens is in {real_data}/ml-latest-small; "
    )


def test_data_get_without_a_network_says_what_to_do(evenstep: Evenstep, tmp_path: Path) -> None:
    closed = {"https_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}  # nobody listens there
    complaint = evenstep("data", "get", "movielens", "--data", "here", environment=closed).complaint()
    assert f"fetch it elsewhere and put it at {tmp_path / 'here' / 'ml-latest-small.zip'}" in complaint


def test_a_reader_who_leaves_is_no_error(tmp_path: Path) -> None:
    """evenstep data list | head -1"""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [commands.EVENSTEP, "data", "list"],
            cwd=tmp_path,
            stdout=pipe,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 128 + signal.SIGPIPE and not done.stderr


# The trainer that was seen to hang


def test_blocks_dealt_at_random_to_two_workers(evenstep: Evenstep) -> None:
    """5,000 samples in blocks of 1,000 dealt at random to 2 workers, batch 64: an existing trainer hangs."""
    words = "--procs 2 --policy blocks --deal random --block-size 1000 --batch-size 64 --epochs 3"
    options = ("--set", "size=5000", "--set", "hidden=8")
    ran = said(evenstep("train", "synthetic", *options, *words.split(), shared=False))
    dealt = [event for event in read_events(ran.one_run().events(0)) if event["name"] == "dealt"]
    one, other = dealt[0]["samples"]
    assert f"samples of the first epoch by worker: 0: {one:,}, 1: {other:,}" in ran.out.splitlines()
    assert [event["epoch"] for event in dealt] == [0, 1, 2]
    assert all(sum(event["samples"]) == 5000 for event in dealt)
    assert any(one != other for one, other in (event["samples"] for event in dealt)), "unequal amounts, on purpose"
    told = ran.record()
    assert told["samples"] == 15_000 and told["state"] == "finished"
    assert told["steps"] == sum(-(-max(event["samples"]) // 64) for event in dealt)
