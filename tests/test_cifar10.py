"""The images: safely read, augmented by the sample, and models of every name."""

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep import world
from evenstep.errors import UserError
from evenstep.tasks import catalog, cifar10, resnet
from evenstep.tasks.cifar10 import PADDING, Cifar10, crop_and_flip, normalise, read_batch
from evenstep.tasks.task import Columns, Draw

CPU = torch.device("cpu")
PARAMETERS = {
    "resnet18": 11_173_962,
    "resnet34": 21_282_122,
    "resnet50": 23_520_842,
    "resnet101": 42_512_970,
    "resnet152": 58_156_618,
}


@pytest.fixture(scope="module")
def splits() -> dict[str, Columns]:
    return {split: Cifar10().data(split) for split in ("train", "validation", "test")}


@pytest.fixture(scope="module")
def published() -> tuple[np.ndarray, np.ndarray]:
    folder = world.data_home() / "cifar-10-batches-py"
    assert folder.is_dir(), f"{folder} is not there: tests on real data need EVENSTEP_DATA"
    read = [read_batch(folder / name) for name in cifar10.BATCHES]
    return np.concatenate([images for images, _ in read]), np.concatenate([labels for _, labels in read])


def sample(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (size, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


# The data


def test_every_image_is_in_one_part(splits: dict[str, Columns], published: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = published
    assert {name: len(part) for name, part in splits.items()} == {
        "train": 45_000,
        "validation": 5_000,
        "test": 10_000,
    }
    assert np.array_equal(splits["test"].columns["image"], images[50_000:]), "the test batch as it was published"
    assert np.array_equal(splits["test"].columns["label"], labels[50_000:])
    learnt = [splits[name] for name in ("train", "validation")]
    dealt = {(image.numpy().tobytes(), int(label)) for part in learnt
             for image, label in zip(part.columns["image"], part.columns["label"], strict=True)}  # fmt: skip
    assert dealt == {(image.tobytes(), int(label)) for image, label in zip(images[:50_000], labels, strict=False)}
    assert len(dealt) == 50_000, "an image is in two parts"


def test_labels_are_even(splits: dict[str, Columns]) -> None:
    for name, part in splits.items():
        counts = torch.bincount(part.columns["label"], minlength=10)
        assert len(counts) == 10 and counts.min() > 0.08 * len(part), f"{name}: {counts.tolist()}"


def test_images_stay_bytes_and_are_shared(splits: dict[str, Columns]) -> None:
    assert all(part.columns["image"].dtype == torch.uint8 for part in splits.values())
    assert splits["train"].gather(np.array([3, 1]))["image"].dtype == torch.uint8


def test_normalised_images_have_mean_0_and_variance_1(splits: dict[str, Columns]) -> None:
    images = normalise(splits["train"].columns["image"][:10_000])
    assert images.mean(dim=(0, 2, 3)).abs().max() < 0.02
    assert (images.std(dim=(0, 2, 3)) - 1).abs().max() < 0.02


# Augmentation


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 40), st.data())
def test_augmentation_belongs_to_the_sample(size: int, data: st.DataObject) -> None:
    task = Cifar10()
    images = sample(size)
    rows = np.array(data.draw(st.lists(st.integers(0, 10**12), min_size=size, max_size=size, unique=True)))
    batch = {"image": images, "label": torch.zeros(size, dtype=torch.int64)}

    def prepared(order: np.ndarray, epoch: int = 0) -> torch.Tensor:
        part = {name: column[torch.from_numpy(order)] for name, column in batch.items()}
        return task.prepare(part, Draw(7, epoch, rows[order], CPU))["image"]

    whole = prepared(np.arange(size))
    order = np.array(data.draw(st.permutations(range(size))))
    assert torch.equal(prepared(order), whole[torch.from_numpy(order)]), (
        "another order changed what an image becomes"
    )
    cut = data.draw(st.integers(1, size - 1))
    pieces = [prepared(np.arange(cut)), prepared(np.arange(cut, size))]
    assert torch.equal(torch.cat(pieces), whole), "another batch changed what an image becomes"


def test_augmentation_differs_between_epochs_and_samples() -> None:
    task = Cifar10()
    same = sample(1).expand(200, -1, -1, -1)
    batch = {"image": same, "label": torch.zeros(200)}
    rows = np.arange(200)
    first, second = (task.prepare(batch, Draw(0, epoch, rows, CPU))["image"] for epoch in (0, 1))
    assert not torch.equal(first, second)
    kinds = len(torch.unique(first.flatten(1), dim=0))
    assert kinds > 80, f"only {kinds} of 162 crops and flips among 200"


@given(st.integers(0, 2 * PADDING), st.integers(0, 2 * PADDING), st.booleans())
def test_crop_and_flip_by_hand(down: int, right: int, flip: bool) -> None:
    image = sample(1)[0]
    found = crop_and_flip(
        image[None], down=torch.tensor([down]), right=torch.tensor([right]), flip=torch.tensor([flip])
    )[0]
    expected = torch.zeros(3, 32 + 2 * PADDING, 32 + 2 * PADDING, dtype=torch.uint8)
    expected[:, PADDING:-PADDING, PADDING:-PADDING] = image
    expected = expected[:, down : down + 32, right : right + 32]
    assert torch.equal(found, expected.flip(2) if flip else expected)


def test_evaluation_sees_images_as_they_are() -> None:
    images = sample(4)
    found = Cifar10().prepare({"image": images, "label": torch.zeros(4)}, None)["image"]
    assert torch.equal(found, normalise(images))
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_images_are_resized_to_what_the_model_takes() -> None:
    task = Cifar10(model_name="vit_base_patch32_224")
    grey = torch.full((2, 3, 32, 32), 200, dtype=torch.uint8)
    found = task.prepare({"image": grey, "label": torch.zeros(2)}, None)["image"]
    assert found.shape == (2, 3, 224, 224)
    torch.testing.assert_close(found, normalise(grey)[:, :, :1, :1].expand_as(found))


# Models


@pytest.mark.parametrize("name", resnet.NAMES)
def test_residual_networks(name: str) -> None:
    with torch.device("meta"):
        model = Cifar10(model_name=name).model()
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_block_adds_nothing_to_begin_with(name: str) -> None:
    model = resnet.resnet(name, 10).eval()
    block = next(part for part in model.modules() if isinstance(part, resnet.Block) and not len(part.kept))
    x = torch.rand(2, block.width_out, 4, 4)
    torch.testing.assert_close(block(x), x)


def test_fsdp_gathers_block_by_block() -> None:
    task = Cifar10()
    units = list(task.units(task.model()) or ())
    assert len(units) == 8 and all(isinstance(unit, resnet.Block) for unit in units)
    assert task.units(torch.nn.Linear(2, 2)) is None


def test_vit_base_takes_224() -> None:
    task = Cifar10(model_name="vit_base_patch32_224")
    with torch.device("meta"):
        model = task.model()
        assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 10)


@pytest.mark.parametrize("name", ["resnet18", "test_vit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_on_real_images(splits: dict[str, Columns], name: str, dtype: torch.dtype) -> None:
    task = Cifar10(model_name=name)
    model = task.model().to(dtype)
    rows = np.array([5, 17])
    batch = task.prepare(splits["train"].gather(rows), Draw(0, 0, rows, CPU))
    losses = task.losses(model, batch)
    assert losses.shape == (2,) and losses.dtype == dtype
    losses.mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    metrics = task.metrics()
    task.measure(metrics, model, batch)
    assert metrics["accuracy"].compute() <= metrics["top_5"].compute()


def test_accuracy_and_top_5_by_hand() -> None:
    metrics = Cifar10().metrics()
    scores = torch.arange(10.0, 0.0, -1.0).expand(4, 10)  # 0 is likeliest, 4 the fifth
    for metric in metrics.values():
        metric.update(scores, torch.tensor([0, 4, 5, 9]))
    assert (metrics["accuracy"].compute(), metrics["top_5"].compute()) == (0.25, 0.5)


def test_an_unknown_model_is_named_with_those_there_are() -> None:
    with pytest.raises(UserError) as caught:
        catalog.load("cifar10", {"model_name": "resnet19"})
    message = str(caught.value)
    assert message.startswith("no model resnet19 for cifar10; there are resnet18, resnet34, resnet50, ")
    assert "any model of timm, such as vit_base_patch32_224" in message and "did you mean resnet18" in message
    with pytest.raises(UserError, match="did you mean vit_base_patch32_224"):
        Cifar10(model_name="vit_base_patch32_22")


def test_without_timm_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"pip install 'evenstep\[vision\]'"):
        Cifar10(model_name="vit_base_patch32_224")
    assert Cifar10(model_name="resnet34").model_name == "resnet34"


# Reading pickles


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_planted_pickle_is_refused(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "it went off"
    hidden = np.empty(1, dtype=object)
    hidden[0] = Bomb(mark)
    for planted in (Bomb(mark), {b"data": Bomb(mark)}, {b"data": hidden, b"labels": []}):
        path = tmp_path / "data_batch_1"
        path.write_bytes(pickle.dumps(planted, protocol=protocol))
        with pytest.raises(UserError, match=r"not one of the published batches.*evenstep data get cifar10"):
            read_batch(path)
        assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark), protocol=protocol))
    assert mark.exists(), "the bomb is a dud, so this test shows nothing"


@pytest.mark.parametrize(
    "content", [b"", b"<html>", pickle.dumps([1]), pickle.dumps({b"data": np.zeros(3), b"labels": []})]
)
def test_a_damaged_batch_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not one of the published batches"):
        read_batch(path)
