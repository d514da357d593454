"""N ranks compute what one process computes: the same losses in each step, the same weights, the same metrics."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evenstep.api import Result
from evenstep.config import Config
from evenstep.launch import local
from evenstep.training import Run, choose_device, load_task, together, train_here
from evenstep.world import World, alone

TINY = f"{Path(__file__).parent / 'tiny.py'}:Tiny"
SIZES = {
    "neither the world nor the batch divides the size": {"set": {"size": 47}, "global_batch": 10},
    "fewer samples than ranks": {"set": {"size": 3}, "global_batch": 2},
    "a batch larger than the data": {"set": {"size": 11}, "global_batch": 64},
    "accumulation": {"set": {"size": 47}, "global_batch": 16, "micro_batch": 3},
    "accumulation with fewer samples than ranks in the last step": {
        "set": {"size": 33},
        "global_batch": 16,
        "micro_batch": 1,
    },
    "one sample": {"set": {"size": 1}, "global_batch": 5},
}
POLICIES = {
    "sequential": {"policy": "sequential"},
    "shards": {"policy": "shards", "dealt_to": 2},
    "blocks in turn": {"policy": "blocks", "block_size": 5, "dealt_to": 3},
    "blocks at random": {"policy": "blocks", "block_size": 5, "dealt_to": 3, "deal": "random"},
}
OTHERS = {
    "clipping, momentum, warm-up, schedule": {
        "optimizer": "sgd",
        "lr": 0.1,
        "clip": 0.5,
        "schedule": "cosine",
        "warmup_steps": 3,
        "global_batch": 10,
    },
    # not with Adam: the bias before a BatchNorm has no gradient but rounding errors, which Adam makes large
    "BatchNorm": {"set": {"norm": True}, "global_batch": 12, "sync_batchnorm": True, "optimizer": "sgd"},
    "BatchNorm and a rank without samples": {
        "set": {"norm": True, "size": 26},
        "global_batch": 8,
        "sync_batchnorm": True,
        "optimizer": "sgd",
    },
    "read row by row": {"set": {"row_by_row": True}, "global_batch": 10, "micro_batch": 2},
    "single precision": {"precision": "fp32", "global_batch": 10},
    "single precision, accumulation": {"precision": "fp32", "global_batch": 16, "micro_batch": 3},
}
CASES: dict[str, dict[str, Any]] = {**SIZES, **POLICIES, **OTHERS}
WORLDS = (
    ("dp", 1),
    ("ddp", 1),
    ("fsdp", 1),
    ("ddp", 2),
    ("fsdp", 2),
    ("ddp", 3),
    ("fsdp", 3),
    ("ddp", 5),
    ("fsdp", 5),
)


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    weights: dict[str, torch.Tensor]
    metrics: dict[str, Any]


def config_of(case: str, strategy: str, runs: Path) -> Config:
    given = {"global_batch": 10, "precision": "fp64", "epochs": 3, "lr": 1e-2, "log_every": 4, **CASES[case]}
    return Config(task=TINY, strategy=strategy, runs=str(runs), **given)


def train_all(strategies: tuple[str, ...], runs: Path, place: World) -> dict[str, dict[str, Path]]:
    """Every case under each strategy, among ranks that meet once: what this test would otherwise wait for."""
    folders: dict[str, dict[str, Path]] = {}
    meeting = config_of("sequential", "ddp", runs).complete({}, place)
    with together(meeting, place, torch.device("cpu")):
        for strategy in strategies:
            folders[strategy] = {}
            for case in CASES:
                config = config_of(case, strategy, runs)
                task = load_task(config)
                settled = config.complete(task.defaults, place)
                run = Run(config=config, command=["test"], folder=None)
                folders[strategy][case] = train_here(run, settled, task, place, choose_device("cpu", place)).folder
    return folders


def read(folder: Path) -> Trained:
    result = Result(folder)
    assert result.record["state"] == "finished"
    weights = load_file(folder / "weights" / "last.safetensors")
    return Trained(result.losses, weights, result.record["final"])


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """Every case in one process."""
    folders = train_all(("one",), tmp_path_factory.mktemp("one"), alone())["one"]
    return {case: read(folder) for case, folder in folders.items()}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Every case for a world, trained when first asked for."""

    @functools.cache
    def trained(world: int) -> dict[str, dict[str, Path]]:
        runs = tmp_path_factory.mktemp(f"world-{world}")
        strategies = ("dp", "ddp", "fsdp") if world == 1 else ("ddp", "fsdp")
        return local.launch(functools.partial(train_all, strategies, runs), world)

    yield trained


@pytest.mark.parametrize(("strategy", "world"), WORLDS, ids=lambda value: str(value))
def test_computes_what_one_process_computes(
    strategy: str, world: int, one: dict[str, Trained], several: Any
) -> None:
    for case, folder in several(world)[strategy].items():
        found, expected = read(folder), one[case]
        close = 1e-12 if CASES[case].get("precision", "fp64") == "fp64" else 1e-5
        torch.testing.assert_close(
            torch.tensor(found.losses, dtype=torch.float64),
            torch.tensor(expected.losses, dtype=torch.float64),
            rtol=close,
            atol=0.0,
            msg=lambda text, case=case: f"losses of each step, {case}: {text}",
        )
        torch.testing.assert_close(
            found.weights,
            expected.weights,
            rtol=1e-10 if close == 1e-12 else 1e-4,
            atol=close,
            msg=lambda text, case=case: f"final weights, {case}: {text}",
        )
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-6), case


def test_one_process_learns_something(one: dict[str, Trained]) -> None:
    """Or else agreement would prove nothing."""
    for case, trained in one.items():
        assert min(trained.losses) < trained.losses[0], case
