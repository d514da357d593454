"""One contract, and every strategy at several worlds has to keep it."""

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from evenstep import strategies
from evenstep.batches import Batches, Micro, Step
from evenstep.optimizing import make_optimizer
from evenstep.order.digest import Digest
from evenstep.order.plan import Plan
from evenstep.precision import HALF, stored
from evenstep.step import SCALE, Stepper
from evenstep.strategies.batchnorm import EvenBatchNorm, even
from evenstep.strategies.strategy import Strategy
from evenstep.tasks.task import Optimizing
from evenstep.weights import keep
from evenstep.world import World, alone
from on_ranks import CPU, gathered, outcomes
from tiny import Tiny

ON_ONE = ("one", "dp", "ddp", "fsdp")
ON_MANY = ("ddp", "fsdp")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class Model(nn.Module):
    """What models have: blocks that repeat, a BatchNorm, a buffer, a frozen weight, tied weights."""

    steady: Tensor

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = norm(8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(2)])
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.last.weight
        self.register_buffer("steady", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return (self.tied(self.last(self.frozen(x))) * self.steady).sum(dim=1)


def made(seed: int = 0, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**options).double()


def strategy_of(name: str, model: nn.Module, place: World, **options: Any) -> Strategy:
    return strategies.make(name, model, place, CPU, **options)


def samples(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mine(x: Tensor, place: World) -> Tensor:
    """This rank's part of the samples: the ranks' parts differ in size."""
    cuts = [*np.cumsum([0, *range(2, place.size + 1)]).tolist(), len(x)]
    return x[cuts[place.rank] : cuts[place.rank + 1]]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole, whoever has which part of them."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad: Any = parameter.grad
            found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
    return found


def whole(strategy: Strategy) -> dict[str, Tensor]:
    """The weights that rank 0 gets, on every rank."""
    return gathered({name: tensor.clone() for name, tensor in strategy.weights().items()})[0]


def same(found: Any, expected: Any, **tolerance: float) -> None:
    torch.testing.assert_close(found, expected, **({"rtol": 1e-10, "atol": 1e-12} | tolerance))


# The checks, each run by every strategy


def weights_have_the_models_names(name: str, place: World, folder: Path) -> None:
    del folder
    expected = copy.deepcopy(made().state_dict())
    strategy = strategy_of(name, made(), place)
    found = strategy.weights()
    kept = gathered(len(found))
    if place.leads:
        assert list(found) == list(expected)
        same(found, dict(expected), rtol=0.0, atol=0.0)
        assert all(tensor.device == CPU and type(tensor) is Tensor for tensor in found.values())
    assert kept[0] == len(expected)
    assert strategy.parameters == sum(p.numel() for p in made().parameters())


def weights_travel_between_strategies_and_worlds(name: str, place: World, folder: Path) -> None:
    """What others have written is loaded; what is then trained a little further is written for others."""
    written = sorted(folder.glob("*.safetensors"))
    x = samples(place.size * 7)
    for path in written:
        strategy = strategy_of(name, made(seed=5), place)
        strategy.load(load_file(path) if place.leads else {})
        reference = made(seed=6)
        reference.load_state_dict(load_file(path))
        same(whole(strategy), dict(reference.state_dict()), rtol=0.0, atol=0.0)
        same(strategy.called.eval()(x), reference.eval()(x))
    dist.barrier()
    strategy = strategy_of(name, made(seed=place.size), place)
    optimizer = torch.optim.SGD([p for p in strategy.model.parameters() if p.requires_grad], lr=0.1)
    strategy.called(mine(x, place)).sum().backward()
    optimizer.step()
    strategy.settle()
    weights = whole(strategy)
    same(weights["tied.weight"], weights["last.weight"], rtol=0.0, atol=0.0)
    if place.leads:
        assert weights["norm.num_batches_tracked"] == 1
    keep(strategy, folder / f"{name}-{place.size}.safetensors")
    dist.barrier()


def the_gradient_is_clipped_by_its_true_norm(name: str, place: World, folder: Path) -> None:
    del folder
    x = samples(place.size * 5)
    reference = made(norm=nn.Identity)
    reference(x).mean().backward()
    expected = gradients(reference)
    norm = torch.cat([grad.flatten() for grad in expected.values()]).norm()
    strategy = strategy_of(name, made(norm=nn.Identity), place)
    (strategy.called(mine(x, place)).sum() * place.size / len(x)).backward()
    untouched = strategy.clip(float(norm) * 2)
    before = gradients(strategy.model)
    scaled = strategy.clip(float(norm) / 3)
    after = gradients(strategy.model)
    same(before, expected)
    same(untouched, norm)
    same(scaled, norm)
    for key, grad in expected.items():
        same(after[key], grad / 3, rtol=1e-5, atol=1e-12)  # torch adds 1e-6 to the norm
    assert "frozen.weight" not in expected


def gradients_that_are_not_synced_are_kept(name: str, place: World, folder: Path) -> None:
    del folder
    x = samples(place.size * 5)
    reference = made(norm=nn.Identity)
    reference(x).mean().backward()
    strategy = strategy_of(name, made(norm=nn.Identity), place)
    pieces = mine(x, place).chunk(2)
    for _ in range(2):  # a second time, as the first leaves nothing behind
        strategy.model.zero_grad()
        for piece, part in enumerate(pieces):
            with strategy.syncing(piece == len(pieces) - 1):
                (strategy.called(part).sum() * place.size / len(x)).backward()
        same(gradients(strategy.model), gradients(reference))


def settled_buffers_are_the_same(name: str, place: World, folder: Path) -> None:
    del folder
    model = nn.Sequential(made().norm, EvenBatchNorm(8).double(), nn.Linear(8, 1).double())
    strategy = strategy_of(name, model, place)
    for norm in (model[0], model[1]):
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.fill_(place.rank)
        norm.running_var.fill_(place.rank + 1)
        norm.num_batches_tracked.fill_(5 + place.rank)
    strategy.settle()
    buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
    ranks = gathered(buffers)
    middle = (place.size - 1) / 2
    for other in ranks:
        same(other, ranks[0], rtol=0.0, atol=0.0)
    same(buffers["0.running_mean"], torch.full((8,), middle).double())
    same(buffers["0.running_var"], torch.full((8,), middle + 1).double())
    same(buffers["1.running_mean"], torch.zeros(8).double())  # the ranks agree by themselves; else it is rank 0's
    assert buffers["0.num_batches_tracked"] == 5


def ranks_that_start_apart_end_together(name: str, place: World, folder: Path) -> None:
    """A model that draws its weights from a generator that nobody seeded."""
    del folder
    model = made(seed=100 + place.rank)
    first = gathered(dict(model.state_dict()) if place.leads else None)[0]
    strategy = strategy_of(name, model, place)
    start = whole(strategy)
    optimizer = torch.optim.Adam([p for p in strategy.model.parameters() if p.requires_grad], lr=0.1)
    x = samples(place.size * 5)
    strategy.called(mine(x, place)).sum().backward()
    optimizer.step()
    answers = gathered(strategy.called.eval()(x).detach())
    buffers = gathered(model.steady)
    same(start, dict(first), rtol=0.0, atol=0.0)
    strategy.settle()
    for answer, buffer in zip(gathered(strategy.called(x).detach()), buffers, strict=True):
        same(answer, strategy.called(x).detach(), rtol=0.0, atol=0.0)
        same(buffer, buffers[0], rtol=0.0, atol=0.0)
    assert len(answers) == place.size


def a_sample_that_does_not_count_leaves_no_trace(name: str, place: World, folder: Path) -> None:
    """A rank without samples computes on a single one; a BatchNorm must neither refuse it nor learn from it."""
    del folder
    model = made()
    model.blocks.eval()  # what the user put to rest stays so
    strategy = strategy_of(name, model, place)
    idle = place.rank == 0
    before = {key: buffer.clone() for key, buffer in model.named_buffers()}
    x = samples(4)
    strategy.count(not idle)
    (strategy.called(x[:1] if idle else x).sum() * (0.0 if idle else 1.0)).backward()
    after = {key: buffer.clone() for key, buffer in model.named_buffers()}
    strategy.count(True)
    if idle:
        same(after, before, rtol=0.0, atol=0.0)
    else:
        assert after["norm.num_batches_tracked"] == 1
    assert model.norm.training and not model.blocks[0].training


def an_optimizer_takes_the_same_steps(name: str, place: World, folder: Path) -> None:
    del folder
    for optimizer in ("adam", "adamw", "sgd"):
        reference = taken("one", alone(), optimizer=optimizer)
        found = taken(name, place, optimizer=optimizer)
        same(found, reference, rtol=1e-9)
        assert reference[-1] < reference[0], f"{optimizer} learns nothing"


def half_precision_is_close(name: str, place: World, folder: Path) -> None:
    del folder
    for clip in (None, 1.0):
        reference = taken("one", alone(), precision="fp32", clip=clip)
        for precision in ("bf16", "fp16"):
            found = taken(name, place, precision=precision, clip=clip)
            same(found, reference, rtol=0.02)
            assert found[-1] < found[0], f"{precision} learns nothing"


def fp16_skips_a_step_on_all_ranks(name: str, place: World, folder: Path) -> None:
    """Where one rank's gradients overflow, all ranks leave the step out, and all halve the scale."""
    del folder
    strategy, stepper = stepping(name, place, precision="fp16")
    before = whole(strategy)
    batch = {"x": samples(3).float(), "y": samples(3)[:, 0].float()}
    last = place.rank == place.size - 1
    batch["y"] = batch["y"] * (float("inf") if last else 1.0)
    micro = Micro(batch, np.arange(3), True)
    stepper.take(Step(iter([micro]), 1, 3 * place.size, Digest()), 0)
    after = whole(strategy)
    scales = gathered(stepper.scaler.get_scale())
    same(after, before, rtol=0.0, atol=0.0)
    assert scales == pytest.approx([SCALE / place.size / 2] * place.size)


def a_step_that_is_not_finite_is_left_out_on_all_ranks(name: str, place: World, folder: Path) -> None:
    """Weights, buffers and the optimizer's state are as if it had never been; all know whose losses it was."""
    del folder
    last = place.rank == place.size - 1
    good = {"x": samples(3).float(), "y": samples(3)[:, 0].float()}
    bad = {**good, "y": good["y"] * (float("inf") if last else 1.0)}
    found = {}
    for spoilt in ("losses", "gradients"):
        strategy, stepper = stepping(name, place, precision="fp32", norm=True, skips=True)
        stepper.take(one_step(good, place), 0)
        before, state = whole(strategy), copy.deepcopy(stepper.optimizer.state_dict()["state"])
        if spoilt == "gradients":
            stepper.task = Steep(norm=True)
        losses = stepper.take(one_step(bad if spoilt == "losses" else good, place), 1)
        kept = [parameter.grad for parameter in strategy.model.parameters()]
        found[spoilt] = (before, whole(strategy), state, stepper, losses, kept)
    for spoilt, (before, after, state, stepper, losses, kept) in found.items():
        same(after, before, rtol=0.0, atol=0.0)
        same(stepper.optimizer.state_dict()["state"], state, rtol=0.0, atol=0.0)
        assert losses.isnan() and kept == [None] * len(kept)
        assert stepper.guard.left_out == [[place.size - 1] if spoilt == "losses" else []]


def what_is_not_finite_is_seen_by_all(name: str, place: World, folder: Path) -> None:
    """In what training changes, on whichever rank it is; a mask of a model's author may be infinite."""
    del folder
    model = Tiny(norm=True).model()
    model.register_buffer("mask", torch.full((3,), float("-inf")))
    strategy = strategy_of(name, model, place)
    assert strategy.finite()
    if place.rank == place.size - 1:
        next(part for part in model.modules() if isinstance(part, nn.BatchNorm1d)).running_var[0] = float("inf")
    assert not strategy.finite()


class Steep(Tiny):
    """Its losses are finite, their gradients are not."""

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = super().losses(model, batch)
        return losses + (losses * 0.0).sqrt()


def one_step(batch: dict[str, Tensor], place: World) -> Step:
    return Step(iter([Micro(batch, np.arange(3), True)]), 1, 3 * place.size, Digest())


def tied_weights_stay_tied(name: str, place: World, folder: Path) -> None:
    del folder
    strategy = strategy_of(name, made(), place)
    assert strategy.model.get_submodule("tied").weight is strategy.model.get_submodule("last").weight
    weights = strategy.weights()
    strategy.load(weights if place.leads else {})
    assert strategy.model.get_submodule("tied").weight is strategy.model.get_submodule("last").weight


CHECKS: dict[str, Callable[[str, World, Path], None]] = {
    check.__name__.replace("_", " "): check
    for check in (
        weights_have_the_models_names,
        weights_travel_between_strategies_and_worlds,
        the_gradient_is_clipped_by_its_true_norm,
        gradients_that_are_not_synced_are_kept,
        settled_buffers_are_the_same,
        ranks_that_start_apart_end_together,
        a_sample_that_does_not_count_leaves_no_trace,
        an_optimizer_takes_the_same_steps,
        half_precision_is_close,
        fp16_skips_a_step_on_all_ranks,
        a_step_that_is_not_finite_is_left_out_on_all_ranks,
        what_is_not_finite_is_seen_by_all,
        tied_weights_stay_tied,
    )
}


def stepping(
    name: str,
    place: World,
    precision: str,
    optimizer: str = "adam",
    clip: float | None = None,
    norm: bool = False,
    skips: bool = False,
) -> Any:
    torch.manual_seed(0)
    model = Tiny(norm=norm).model().to(stored(precision))
    strategy = strategy_of(name, model, place, gathered=HALF.get(precision))
    settings = Optimizing(optimizer=optimizer, lr=0.02, weight_decay=0.1, momentum=0.9)
    made = make_optimizer(model, settings, CPU)
    return strategy, Stepper(
        Tiny(), strategy, made, precision=precision, clip=clip, lr_factor=lambda _: 1.0, skips=skips
    )


def taken(name: str, place: World, precision: str = "fp64", **options: Any) -> list[float]:
    """The losses of a few steps, over all ranks' samples."""
    _, stepper = stepping(name, place, precision, **options)
    task = Tiny()
    batches = Batches(
        task.data("train"),
        task,
        Plan(size=47, global_batch=16),
        rank=place.rank,
        world=place.size,
        device=CPU,
        micro_batch=3,
        dtype=stored(precision),
    )
    losses = []
    for epoch in range(4):
        for number, step in enumerate(batches.epoch(epoch)):
            total = stepper.take(step, number).double()
            if place.size > 1:
                dist.all_reduce(total)
            losses.append(total.item() / step.total)
    return losses


# The checks of single parts that want several ranks


def a_model_may_leave_parameters_out(place: World) -> None:
    """Each rank leaves another one out; the weights stay the same on all."""

    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ways = nn.ModuleList([nn.Linear(6, 1) for _ in range(place.size + 1)])

        def forward(self, x: Tensor) -> Tensor:
            return self.ways[place.rank](x).squeeze(1)

    torch.manual_seed(0)
    model = Choosing().double()
    start = model.ways[place.size].weight.clone()
    strategy = strategy_of("ddp", model, place, unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        strategy.called(samples(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = gathered(dict(model.state_dict()))
    for other in found:
        same(other, found[0], rtol=0.0, atol=0.0)
    same(model.ways[place.size].weight, start, rtol=0.0, atol=0.0)
    assert not torch.equal(model.ways[0].weight, start)


def batch_norm_over_ranks_is_that_of_one_process(place: World) -> None:
    """Values, gradients and running statistics, with ranks of different sizes, one of them without samples."""
    for shape in ((11, 4), (11, 4, 3), (11, 4, 3, 2), (11, 4, 2, 2, 2)):
        for momentum in (0.1, None):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3 + 5
            reference = KINDS[len(shape)](4, momentum=momentum).double()
            shared = even(copy.deepcopy(reference))
            assert isinstance(shared, EvenBatchNorm)
            whole_x = x.clone().requires_grad_()
            expected = reference(whole_x)
            (expected * x.cos()).sum().backward()
            idle = place.rank == 1
            cut = 11 if place.size == 2 else 6
            lows, highs = [0, 0, cut], [cut, 1, 11]
            part = x[lows[place.rank] : highs[place.rank]].clone().requires_grad_()
            shared.counts = not idle
            found = shared(part)
            weight = 0.0 if idle else 1.0
            (found * part.detach().cos() * weight).sum().backward()
            for parameter in shared.parameters():
                dist.all_reduce(parameter.grad)
            if not idle:
                same(found, expected[lows[place.rank] : highs[place.rank]])
                assert whole_x.grad is not None
                same(part.grad, whole_x.grad[lows[place.rank] : highs[place.rank]])
            else:
                same(part.grad, torch.zeros_like(part))
            same(dict(shared.state_dict()), dict(reference.state_dict()))
            for mine_, theirs in zip(shared.parameters(), reference.parameters(), strict=True):
                same(mine_.grad, theirs.grad)


ON_RANKS = {
    check.__name__.replace("_", " "): check
    for check in (a_model_may_leave_parameters_out, batch_norm_over_ranks_is_that_of_one_process)
}
KINDS: dict[int, type[nn.Module]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], dict[str, str]]]:
    """What all checks found at a world, once; a world reads what the smaller ones have written."""
    folder = tmp_path_factory.mktemp("weights")

    @functools.cache
    def at(world: int) -> dict[str, str]:
        if world > 1:
            at(world - 1)
        checks = {
            f"{strategy}: {name}": functools.partial(_named, check, strategy, folder)
            for strategy in (ON_ONE if world == 1 else ON_MANY)
            for name, check in CHECKS.items()
        }
        return outcomes(checks | (ON_RANKS if world > 1 else {}), world)

    yield at


def _named(check: Callable[[str, World, Path], None], strategy: str, folder: Path, place: World) -> None:
    check(strategy, place, folder)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    ("strategy", "world"),
    [*((strategy, 1) for strategy in ON_ONE), *((strategy, world) for strategy in ON_MANY for world in (2, 3))],
)
def test_contract(strategy: str, world: int, check: str, found: Any) -> None:
    passed(found(world)[f"{strategy}: {check}"])


@pytest.mark.parametrize("check", ON_RANKS)
@pytest.mark.parametrize("world", [2, 3])
def test_over_ranks(world: int, check: str, found: Any) -> None:
    passed(found(world)[check])


def passed(outcome: str) -> None:
    if outcome:
        pytest.fail(outcome, pytrace=False)
