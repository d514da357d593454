"""A lockstep session as the order of a training: what stands in for a Plan."""

import contextlib
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenstep.errors import UserError
from evenstep.order.plan import WINDOW, Cut, Plan, Share
from evenstep.order.sampler import EvenSampler
from evenstep.service import order_pb2 as pb
from evenstep.service import wire
from evenstep.service.connection import Closed, Connection, session_at
from evenstep.service.lockstep import MOST_STEPS
from evenstep.service.spec import Spec, differences

FIRST_WORDS = LAST_WORDS = 30.0  # seconds to get through at the start, and with where the training ended


class RemoteOrder:
    """The order of a training, as the service hands it out. Parts of steps are asked for ahead of the training,
    and how far that has come is told behind it, so that it waits for neither; it waits for a server that is away.
    """

    def __init__(self, connection: Connection, session: str, spec: Spec, rank: int, world: int) -> None:
        self.connection = connection
        self.session = session
        self.spec = spec
        self.plan = spec.plan
        self.rank = rank
        self.world = world
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="order")
        self._telling = ThreadPoolExecutor(1, thread_name_prefix="order")
        self._told: Future[Any] | None = None
        self._come = (0, 0)

    def steps(self, epoch: int) -> int:
        """Global steps in an epoch."""
        return self.plan.steps(epoch)

    def shares(self, epoch: int, step: int, rank: int, world: int) -> Iterator[Share]:
        """What this rank computes in each step, from `step` on."""
        assert (rank, world) == (self.rank, self.world)
        steps, ahead = self.steps(epoch), None
        while step < steps:
            cuts = (ahead or self._ask(epoch, step)).result()
            step += len(cuts)
            ahead = self._ask(epoch, step) if step < steps else None
            yield from self.plan.filled(epoch, cuts)

    def weight(self, epoch: int, step: int, rank: int, world: int) -> tuple[int, int]:
        """How many samples of this rank's share count in a step, and how many the step has over all ranks."""
        return self.plan.weight(epoch, step, rank, world)

    def taken(self, epoch: int, step: int) -> None:
        """This rank has trained on its parts of all steps before this one."""
        self._come = epoch, step
        if self._told is None or self._told.done():
            if self._told is not None:
                self._told.result()  # or what went wrong
            self._told = self._telling.submit(self._tell)

    def close(self) -> None:
        """Tell how far the training has come, and end."""
        self.connection.patience = min(self.connection.patience, LAST_WORDS)
        try:
            if self._told is not None:
                self._telling.submit(self._tell).result()
        except UserError as error:
            warnings.warn(f"the order service was not told where the training ended: {error}", stacklevel=2)
        finally:
            self.connection.close()
            self._asking.shutdown(cancel_futures=True)
            self._telling.shutdown(cancel_futures=True)

    def _ask(self, epoch: int, step: int) -> "Future[list[Cut]]":
        return self._asking.submit(self._cuts, epoch, step)

    def _cuts(self, epoch: int, step: int) -> list[Cut]:
        reply = self.connection.call(
            "Batches",
            pb.BatchesRequest(
                session=self.session,
                epoch=epoch,
                step=step,
                rank=self.rank,
                world=self.world,
                count=min(MOST_STEPS, max(1, WINDOW * self.world // self.plan.global_batch)),
            ),
            pb.BatchesReply,
        )
        return [wire.cut_of(batch) for batch in reply.batches]

    def _tell(self) -> None:
        epoch, step = self._come
        request = pb.AdvanceRequest(session=self.session, rank=self.rank, world=self.world, epoch=epoch, step=step)
        with contextlib.suppress(Closed):
            self.connection.call("Advance", request, pb.AdvanceReply)


def even_sampler(order: RemoteOrder) -> EvenSampler:
    """What a loop of one's own reads a lockstep session by: an `EvenSampler` over it, for this rank."""
    sampler = EvenSampler(
        order.spec.size, global_batch=order.spec.block, seed=order.spec.seed, rank=order.rank, world=order.world
    )
    sampler.plan = order
    return sampler


def order_at(
    address: str,
    plan: Plan,
    *,
    epochs: int,
    rank: int,
    world: int,
    token_file: Path | None = None,
    tls_ca: Path | None = None,
) -> RemoteOrder:
    """The order of a training that would otherwise follow this plan; a session of another plan is refused."""
    server, session = session_at(address, token_file=token_file, tls_ca=tls_ca)
    connection = Connection(server)
    try:
        spec = spec_at(connection, session)
        _check(session, spec, replace(spec, **_named(plan), world=world), epochs)
    except UserError:
        connection.close()
        raise
    return RemoteOrder(connection, session, spec, rank, world)


def spec_at(connection: Connection, session: str) -> Spec:
    """What a session was opened with."""
    told = connection.call("Show", pb.ShowRequest(session=session), pb.Session, FIRST_WORDS)
    return wire.spec_of(told.plan)


def _check(session: str, spec: Spec, wanted: Spec, epochs: int) -> None:
    differs = differences(wanted, spec, "world")
    if spec.epochs < epochs:
        differs = ", ".join(filter(None, (differs, f"epochs {spec.epochs} instead of {epochs}")))
    if differs:
        raise UserError(
            f"session {session} is of another training: it has {differs}; for this one: {_line(wanted, epochs)}"
        )


def _named(plan: Plan) -> dict[str, Any]:
    """A plan by the names that a session has for its parts."""
    return {
        "size": plan.size,
        "block": plan.global_batch,
        "seed": plan.seed,
        "policy": plan.policy,
        "block_size": plan.block_size,
        "deal": plan.deal,
        "dealt_to": plan.lanes if plan.lanes > 1 else 1,
    }


def _line(spec: Spec, epochs: int) -> str:
    """The command that opens the session that is wanted."""
    options = {**spec.values(), "epochs": epochs}
    options.pop("lease_seconds")
    return "evenstep session open --name NAME " + " ".join(
        f"--{name.replace('_', '-')} {value}" for name, value in options.items()
    )
