"""Between the messages of order.proto and the values that the rooms use."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from google.protobuf.message_factory import GetMessageClass

from evenstep.order.plan import Cut
from evenstep.service import order_pb2 as pb
from evenstep.service.desk import Session
from evenstep.service.leases import Leases, Worker
from evenstep.service.spec import Spec

_SERVICE = pb.DESCRIPTOR.services_by_name["OrderService"]
SERVICE = _SERVICE.full_name
MOST_TOLD = 100  # workers, in what is told of a session


class Method(NamedTuple):
    """A call: its request and its reply."""

    path: str
    request: Any
    reply: Any


METHODS: Mapping[str, Method] = {
    method.name: Method(
        f"/{SERVICE}/{method.name}", GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    )
    for method in _SERVICE.methods
}


def spec_of(plan: pb.Plan) -> Spec:
    """A session's options as the message has them."""
    return Spec(**{field.name: getattr(plan, field.name) for field in pb.Plan.DESCRIPTOR.fields})


def plan_of(spec: Spec) -> pb.Plan:
    """The message for a session's options."""
    return pb.Plan(**spec.values())


def batch_of(cut: Cut) -> pb.Batch:
    """The message for a rank's part of a step."""
    ranges = [pb.Range(lane=lane, start=start, stop=stop) for lane, start, stop in cut.ranges]
    return pb.Batch(ranges=ranges, weighted=cut.weighted, total=cut.total, most=cut.most)


def cut_of(batch: pb.Batch) -> Cut:
    """A rank's part of a step as the message has it."""
    ranges = [(part.lane, part.start, part.stop) for part in batch.ranges]
    return Cut(ranges, batch.weighted, batch.total, batch.most)


def session_of(session: Session, now: float, told: int = MOST_TOLD) -> pb.Session:
    """The message for a session as it stands, with so many of its workers."""
    work = session.work
    message = pb.Session(
        name=session.name,
        plan=plan_of(session.spec),
        closed=session.closed,
        rate=session.meter.rate(now),
    )
    if isinstance(work, Leases):
        message.epoch, message.committed, message.handed_out = work.epoch, work.committed, work.handed_out()
        message.leases, message.workers_in_all = work.open_leases(), len(work.workers)
        slowest = sorted(work.workers.values(), key=lambda worker: (not worker.leases, worker.progress))
        message.workers.extend(_worker_of(worker, now) for worker in slowest[:told])
        return message
    message.epoch, message.workers_in_all = work.place.epoch, len(work.ranks)
    if work.place.epoch < session.spec.epochs:
        message.committed = message.handed_out = session.spec.plan.before(*work.place)
    for rank, place in sorted(work.ranks.items(), key=lambda item: item[1])[:told]:
        message.workers.add(name=f"rank {rank}", committed=place.step, epoch=place.epoch)
    return message


def slowest(session: pb.Session) -> pb.Worker:
    """The worker that holds leases and has made no progress the longest; of a lockstep session, the last rank."""
    holding = [worker for worker in session.workers if worker.leases or session.plan.world]
    return holding[0] if holding else pb.Worker()


def _worker_of(worker: Worker, now: float) -> pb.Worker:
    return pb.Worker(
        name=worker.name,
        incarnation=worker.incarnation,
        leases=len(worker.leases),
        committed=worker.committed,
        silent_seconds=max(0.0, now - worker.progress),
    )
