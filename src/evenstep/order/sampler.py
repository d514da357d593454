"""The same order for a training loop that is not ours: a batch sampler for a plain DataLoader."""

from collections.abc import Iterator, Mapping, Sized
from typing import Protocol

import torch.distributed as dist
from torch.utils.data import Sampler

from evenstep.errors import UserError
from evenstep.order.plan import Plan, Share


class Steps(Protocol):
    """What a sampler reads from: a Plan, or a service that hands out the same."""

    def steps(self, epoch: int) -> int:
        """Global steps in an epoch."""
        ...

    def shares(self, epoch: int, step: int, rank: int, world: int) -> Iterator[Share]:
        """What a rank computes in each step, from `step` on."""
        ...

    def weight(self, epoch: int, step: int, rank: int, world: int) -> tuple[int, int]:
        """How many samples of a rank's share count in a step, and how many the step has over all ranks."""
        ...

    def taken(self, epoch: int, step: int) -> None:
        """This rank has trained on its shares of all steps before this one."""
        ...


class EvenSampler(Sampler[list[int]]):
    """Each rank's batches of each epoch: every sample once over all ranks, as many batches on every rank.

        sampler = EvenSampler(data, global_batch=64)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=2)
        while sampler.epoch < 10:
            for inputs, targets in loader:
                loss = F.cross_entropy(model(inputs), targets) * sampler.take()

    There is no set_epoch: going through the loader again is the next epoch, in a new order. `len()` is the
    number of batches in an epoch, the same for every rank and any number of ranks.

    `take()` says that the training has come to the next batch, and returns the factor for its mean loss with
    which the average that DDP makes over ranks is the exact mean over the samples of the global step. It is
    1 where all ranks have equally many; 0 for a rank without samples left in the last step, which got one of
    another rank's to keep in step.

    The state is two integers, the epoch and the step that come next. With `take()` it is where the training
    stands, however far the loader's workers have read ahead: what was read and not taken comes again, after
    a break out of the loop too. Without `take()` nobody can tell, so the state knows whole epochs only: one
    that was read to its end is over, and so is one that was left early when the next loop begins. (Before
    the very first `take()` the sampler cannot know that there will be one: save after a step, not before.)
    The state loads into any number of ranks, with the same data set and options.

    Rank and world are those of torch.distributed once that has started, unless given.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        global_batch: int,
        seed: int = 0,
        policy: str = "shuffle",
        block_size: int = 1000,
        deal: str = "round_robin",
        workers: int = 1,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        if (rank is None) != (world is None):
            raise UserError("give both rank and world, or neither to take those of torch.distributed")
        if rank is not None and world is not None and not 0 <= rank < world:
            raise UserError(f"there is no rank {rank} in a world of {world}; ranks are 0 to {world - 1}")
        self.plan: Steps = Plan(
            size=data if isinstance(data, int) else len(data),
            global_batch=global_batch,
            seed=seed,
            policy=policy,
            block_size=block_size,
            deal=deal,
            workers=workers,
        )
        self._given = None if rank is None or world is None else (rank, world)
        self._counted = False  # whether take() is called at all
        self._epoch, self._step, self._drawn, self._taken = 0, 0, 0, 0

    @property
    def epoch(self) -> int:
        """The epoch of the step that comes next."""
        return self.state_dict()["epoch"]

    @property
    def step(self) -> int:
        """The step that comes next, counted from the start of its epoch."""
        return self.state_dict()["step"]

    @property
    def drop_last(self) -> bool:
        """Asked for only by what would deal the batches out to ranks again, and silently skip most samples."""
        raise UserError(
            "EvenSampler gives each rank its own batches already: keep its loader out of accelerator.prepare(), "
            "and prepare the model and the optimizer only"
        )

    def __len__(self) -> int:
        return self.plan.steps(self.epoch)

    def __iter__(self) -> Iterator[list[int]]:
        if self._drawn and not self._counted:  # nobody says how far the last loop came: it was an epoch
            self._set(self._epoch + 1, 0)
        self._set(self._epoch, self._step)
        rank, world = self._place()
        for share in self.plan.shares(self._epoch, self._step, rank, world):
            self._drawn += 1
            yield share.indices.tolist()

    def take(self) -> float:
        """Call it once for each batch: the training takes its step; returns the factor for its mean loss."""
        if self._taken == self._drawn:
            raise ValueError("take() was called more often than there were batches; call it once for each")
        rank, world = self._place()
        weighted, total = self.plan.weight(self._epoch, self._step, rank, world)
        self._taken += 1
        self._counted = True
        self._epoch, self._step = self._after(1)
        self.plan.taken(self._epoch, self._step)
        return weighted * world / total

    def state_dict(self) -> dict[str, int]:
        """The epoch and the step that come next: equal on all ranks."""
        epoch, step = self._epoch, self._step
        if not self._counted and self._after(self._drawn)[0] > epoch:
            epoch, step = epoch + 1, 0
        return {"epoch": epoch, "step": step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there in the next loop over the loader."""
        epoch, step = state["epoch"], state["step"]
        if epoch < 0 or not 0 <= step < self.plan.steps(epoch):
            raise UserError(
                f"there is no step {step} in epoch {epoch}, which has {self.plan.steps(epoch)}; "
                "was the state saved with another data set or global batch?"
            )
        self._counted = self._counted or step > 0
        self._set(epoch, step)

    def _set(self, epoch: int, step: int) -> None:
        self._epoch, self._step = epoch, step
        self._drawn, self._taken = 0, 0  # in the current loop

    def _after(self, steps: int) -> tuple[int, int]:
        """The place so many steps on, which is in this epoch or the start of the next."""
        step = self._step + steps
        return (self._epoch + 1, 0) if step == self.plan.steps(self._epoch) else (self._epoch, step)

    def _place(self) -> tuple[int, int]:
        if self._given is not None:
            return self._given
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1
