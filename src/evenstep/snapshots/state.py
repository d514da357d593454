"""A training's state as tensors and plain values by name, the same names under every strategy, and back.

Most is the same on all ranks, or dealt out among them. What a rank has for itself, its random states and what its
BatchNorms saw since they were last averaged, stands under its number.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenstep.errors import UserError
from evenstep.snapshots import generators
from evenstep.snapshots.manifest import DTYPES, Damaged, Manifest, Stored
from evenstep.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class State:
    """What a training learns, what its optimizer has gathered, and where its random numbers are."""

    strategy: Strategy
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    # Out

    def tensors(self) -> dict[str, Tensor]:
        """What this rank has to say of the state: its tensors, as they are now."""
        rank, own = self.strategy.rank, self.strategy.own_buffers()
        buffers = {name for name, _ in self.strategy.model.named_buffers(remove_duplicate=False)}
        found = {}
        for name, tensor in self._model().items():
            if name in own:
                found[_of_rank(rank, name)] = tensor
            elif rank == 0 or name not in buffers:  # of a buffer that all have, rank 0's counts
                found[f"model.{name}"] = tensor
        found |= {f"optimizer.{name}": part for name, part in self._held() if isinstance(part, Tensor)}
        drawn = generators.states(self.strategy.device)
        return found | {_of_rank(rank, f"random.{name}"): tensor for name, tensor in drawn.items()}

    def values(self) -> dict[str, Any]:
        """What is no tensor: numbers of the optimizer's groups, and of what it holds, and the scaler's."""
        held = {name: _plain(name, part) for name, part in self._held() if not isinstance(part, Tensor)}
        groups = [_numbers(group) for group in self.optimizer.param_groups]
        return {"groups": groups, "held": held, "scaler": self.scaler.state_dict()}

    # In

    def room(self, manifest: Manifest) -> dict[str, Tensor]:
        """Tensors for a load to fill, by their names in a snapshot: the live ones, and new ones where it has more.

        A UserError where the snapshot is of another model.
        """
        self._check(manifest.values)
        model, trained = self._model(), self._trained()
        room = {}
        for name, tensor in model.items():
            names = self._names(name, manifest)
            for there in names:
                _compare(there, tensor, manifest.tensors.get(there))
                room[there] = tensor if len(names) == 1 else torch.empty_like(tensor)
        for there, stored in manifest.tensors.items():
            kind, _, name = there.partition(".")
            if kind == "model" and name not in model:
                raise _other(f"it has {there!r}")
            if kind == "optimizer":
                room[there] = _room_held(name, stored, trained)
            elif there.startswith(_of_rank(self.strategy.rank, "random.")):
                room[there] = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        return room

    def take_over(self, filled: Mapping[str, Tensor], manifest: Manifest) -> None:
        """Go on from there, once the tensors have been filled. The random states count for as many ranks only."""
        model = self._model()
        for name, tensor in model.items():
            names = self._names(name, manifest)
            if len(names) > 1:
                tensor.copy_(_settled([filled[there] for there in names]))
        extra = {name: tensor for name, tensor in model.items() if name.endswith("_extra_state")}
        self.strategy.model.load_state_dict(extra, strict=False)
        self._hold(filled, manifest.values)
        self._scale(manifest)
        if manifest.world == self.strategy.world:
            prefix = _of_rank(self.strategy.rank, "random.")
            drawn = {name.removeprefix(prefix): part for name, part in filled.items() if name.startswith(prefix)}
            generators.go_on(drawn, self.strategy.device)

    def _names(self, name: str, manifest: Manifest) -> list[str]:
        """Under which names a tensor of the model stands in a snapshot: several where each rank had its own."""
        if _of_rank(0, name) not in manifest.tensors:
            return [f"model.{name}"]
        if manifest.world == self.strategy.world:
            return [_of_rank(self.strategy.rank, name)]
        return [_of_rank(rank, name) for rank in range(manifest.world)]

    def _hold(self, filled: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Give the optimizer what it held."""
        held = {name.partition(".")[2]: part for name, part in filled.items() if name.startswith("optimizer.")}
        trained = self._trained()
        self.optimizer.state.clear()
        for name, part in (values["held"] | held).items():
            self.optimizer.state[_place(name, trained).parameter][name.rpartition(".")[2]] = part
        for group, kept in zip(self.optimizer.param_groups, values["groups"], strict=True):
            for key, number in _numbers(group).items():
                if key in kept:
                    group[key] = kept[key] if _number(number) else type(number)(kept[key])

    def _scale(self, manifest: Manifest) -> None:
        """In half precision losses are raised by the scale, and by the world: together as much as before."""
        if self.scaler.is_enabled():
            kept = manifest.values["scaler"]
            self.scaler.load_state_dict({**kept, "scale": kept["scale"] * manifest.world / self.strategy.world})

    def _check(self, values: Mapping[str, Any]) -> None:
        """A stranger's values must not be of kinds that no training has."""
        match values:
            case {"groups": [*groups], "held": dict(held), "scaler": dict(scaler)}:
                own = [_numbers(group) for group in self.optimizer.param_groups]
                alike = len(own) == len(groups) and all(map(_alike_groups, own, groups))
                plain = all(isinstance(part, bool | int | float | str) for part in held.values())
                if alike and plain and _numbers(scaler).keys() >= self.scaler.state_dict().keys():
                    return
        raise Damaged("what it says of the optimizer, or of the scaler, no training has said")

    # What there is

    def _model(self) -> dict[str, Tensor]:
        found = self.strategy.model.state_dict()
        for name, part in found.items():
            if not isinstance(part, Tensor):
                raise UserError(f"the model's {name} is a {type(part).__name__}; a snapshot keeps tensors only")
        return found

    def _held(self) -> Iterator[tuple[str, Any]]:
        """What the optimizer holds, by parameter and name."""
        names = {id(parameter): name for name, parameter in self.strategy.model.named_parameters()}
        for parameter, held in self.optimizer.state.items():
            if id(parameter) not in names:
                raise UserError("the optimizer trains a parameter that is none of the model's: it has no name")
            yield from ((f"{names[id(parameter)]}.{key}", part) for key, part in held.items() if part is not None)

    def _trained(self) -> "dict[str, _Trained]":
        """What the optimizer trains, by name."""
        groups = {id(part): group for group in self.optimizer.param_groups for part in group["params"]}
        named = self.strategy.model.named_parameters()
        return {name: _Trained(part, groups[id(part)]) for name, part in named if id(part) in groups}


class _Trained(NamedTuple):
    parameter: Tensor
    group: Mapping[str, Any]


def _place(name: str, trained: Mapping[str, _Trained]) -> _Trained:
    """The parameter of which the optimizer holds something that goes by this name."""
    parameter = name.rpartition(".")[0]
    if parameter not in trained:
        raise _other(f"its optimizer held {name!r:.80}")
    return trained[parameter]


def _room_held(name: str, stored: Stored, trained: Mapping[str, _Trained]) -> Tensor:
    """Room for what the optimizer holds of a parameter: mostly of its shape, and then dealt out as it is."""
    parameter, group = _place(name, trained)
    dtype = DTYPES[stored.dtype]
    if stored.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    # as torch's optimizers have it: a count is on the device only where a kernel reads it there
    there = bool(stored.shape) or group.get("fused") or group.get("capturable")
    return torch.empty(stored.shape, dtype=dtype, device=parameter.device if there else "cpu")


def _of_rank(rank: int, name: str) -> str:
    return f"rank.{rank}.{name}"


def _settled(parts: Sequence[Tensor]) -> Tensor:
    """What `Strategy.settle` makes of the buffers that ranks had each for itself."""
    if not parts[0].is_floating_point():
        return parts[0]
    return torch.stack(list(parts)).sum(0) / len(parts)


def _plain(name: str, value: Any) -> Any:
    """As JSON keeps it."""
    if isinstance(value, bool | int | float | str):
        return value
    raise UserError(f"the optimizer's {name} is a {type(value).__name__}; a snapshot keeps tensors and numbers")


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a group of parameters; how it is computed is for who goes on to say."""
    return {
        key: value
        for key, value in group.items()
        if _number(value) or (isinstance(value, list | tuple) and value and all(map(_number, value)))
    }


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _alike_groups(own: Mapping[str, Any], kept: Any) -> bool:
    return isinstance(kept, dict) and all(_alike(number, kept.get(key, number)) for key, number in own.items())


def _alike(one: Any, other: Any) -> bool:
    """Two numbers, or as many of them."""
    if _number(one) or _number(other):
        return _number(one) and _number(other)
    return isinstance(other, list | tuple) and len(one) == len(other) and all(map(_number, other))


def _compare(name: str, here: Tensor, there: Stored | None) -> None:
    if there is None:
        raise _other(f"it has no {name}")
    if tuple(here.shape) != there.shape or here.dtype != DTYPES[there.dtype]:
        shapes = " x ".join(map(str, there.shape)), " x ".join(map(str, here.shape))
        kinds = there.dtype, str(here.dtype).removeprefix("torch.")
        raise _other(f"its {name} is {kinds[0]} [{shapes[0]}], not {kinds[1]} [{shapes[1]}]")


def _other(detail: str) -> UserError:
    return UserError(
        f"the snapshot is of another model: {detail}; go on with the task, the options and the code that wrote it"
    )
