"""Each call of the service: request in, reply out; what was decided is on disk before the reply goes."""

import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from evenstep.errors import UserError
from evenstep.service import order_pb2 as pb
from evenstep.service import wire
from evenstep.service.desk import Desk
from evenstep.service.journal import Journal
from evenstep.service.leases import Ended, Later, Lease
from evenstep.service.refusals import Refused, Why
from evenstep.service.spec import checked_name

BIRTH = 16  # bytes

CODES = {
    Why.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Why.UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Why.EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Why.UNFIT: grpc.StatusCode.FAILED_PRECONDITION,
    Why.OVER: grpc.StatusCode.ABORTED,
    Why.FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Why.LATER: grpc.StatusCode.UNAVAILABLE,
}
Context = grpc.aio.ServicerContext[Any, Any]


class Handlers:
    """The calls, by their names in order.proto: each decides at once, from what is in memory."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    def answer(self, name: str, request: Any) -> Any:
        """The reply to a request; raises `Refused` where there is none."""
        try:
            return getattr(self, f"_{name.lower()}")(request, time.monotonic())
        except UserError as error:
            raise Refused(Why.INVALID, str(error)) from None

    def _open(self, request: pb.OpenRequest, now: float) -> pb.Session:
        return wire.session_of(self.desk.open(request.session, wire.spec_of(request.plan)), now)

    def _list(self, request: pb.ListRequest, now: float) -> pb.ListReply:
        del request
        sessions = sorted(self.desk.sessions.values(), key=lambda session: session.name)
        return pb.ListReply(sessions=[wire.session_of(session, now, told=1) for session in sessions])

    def _show(self, request: pb.ShowRequest, now: float) -> pb.Session:
        return wire.session_of(self.desk.find(request.session), now)

    def _close(self, request: pb.CloseRequest, now: float) -> pb.Session:
        return wire.session_of(self.desk.close(request.session, request.forget), now)

    def _join(self, request: pb.JoinRequest, now: float) -> pb.JoinReply:
        session = self.desk.find(request.session)
        for what in ("size", "seed"):
            ours, theirs = getattr(session.spec, what), getattr(request, what)
            if request.HasField(what) and ours != theirs:
                raise Refused(
                    Why.UNFIT,
                    f"session {session.name} has {what} {ours}, and the worker expects {theirs}: it is of another "
                    "data set or order",
                )
        if len(request.birth) != BIRTH:
            raise Refused(Why.INVALID, f"a birth is {BIRTH} random bytes, not {len(request.birth)}")
        work = session.leases()
        incarnation = work.join(checked_name("worker", request.worker), request.birth, now)
        return pb.JoinReply(incarnation=incarnation, plan=wire.plan_of(session.spec), epoch=work.epoch)

    def _take(self, request: pb.TakeRequest, now: float) -> pb.TakeReply:
        work = self.desk.find(request.session).leases()
        if request.HasField("commit"):
            work.commit(request.incarnation, request.commit.lease, request.commit.start, request.commit.stop, now)
        found = work.take(request.incarnation, request.lease, request.epoch, request.blocks, now)
        match found:
            case Lease(number, start, done, stop):
                lease = pb.Lease(lease=number, epoch=work.epoch, start=start, done=done, stop=stop)
                return pb.TakeReply(lease=lease)
            case Later(seconds):
                return pb.TakeReply(wait=pb.Wait(milliseconds=round(seconds * 1000)))
            case Ended(epoch):
                return pb.TakeReply(ended=pb.Ended(epoch=epoch, all=epoch == work.epochs))

    def _commit(self, request: pb.CommitRequest, now: float) -> pb.CommitReply:
        work, part = self.desk.find(request.session).leases(), request.part
        work.commit(request.incarnation, part.lease, part.start, part.stop, now)
        return pb.CommitReply()

    def _leave(self, request: pb.LeaveRequest, now: float) -> pb.LeaveReply:
        self.desk.find(request.session).leases().leave(request.incarnation, now)
        return pb.LeaveReply()

    def _batches(self, request: pb.BatchesRequest, now: float) -> pb.BatchesReply:
        del now
        work = self.desk.find(request.session).lockstep()
        cuts, steps = work.batches(request.epoch, request.step, request.rank, request.world, request.count)
        return pb.BatchesReply(batches=[wire.batch_of(cut) for cut in cuts], steps=steps)

    def _advance(self, request: pb.AdvanceRequest, now: float) -> pb.AdvanceReply:
        del now
        work = self.desk.find(request.session).lockstep()
        work.advance(request.rank, request.world, request.epoch, request.step)
        return pb.AdvanceReply(epoch=work.place.epoch, step=work.place.step)


def generic(handlers: Handlers, journal: Journal) -> grpc.GenericRpcHandler:
    """All calls, for a gRPC server."""
    calls = {
        name: grpc.unary_unary_rpc_method_handler(
            _call(name, handlers, journal), method.request.FromString, method.reply.SerializeToString
        )
        for name, method in wire.METHODS.items()
    }
    return grpc.method_handlers_generic_handler(wire.SERVICE, calls)


def _call(name: str, handlers: Handlers, journal: Journal) -> Callable[[Any, Context], Awaitable[Any]]:
    async def call(request: Any, context: Context) -> Any:
        reply = refusal = None
        try:
            reply = handlers.answer(name, request)
        except Refused as refused:
            refusal = refused
        try:
            await journal.settled(handlers.desk.changes(time.monotonic()))
        except Refused as refused:
            refusal = refused
        if refusal is not None:
            await _refuse(context, refusal)
        return reply

    return call


async def _refuse(context: Context, refusal: Refused) -> NoReturn:
    await context.abort(CODES[refusal.why], str(refusal))
    raise AssertionError("abort does not return")
