from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Plan(_message.Message):
    __slots__ = ("size", "block", "seed", "policy", "block_size", "deal", "dealt_to", "epochs", "world", "lease_seconds")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEAL_FIELD_NUMBER: _ClassVar[int]
    DEALT_TO_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    size: int
    block: int
    seed: int
    policy: str
    block_size: int
    deal: str
    dealt_to: int
    epochs: int
    world: int
    lease_seconds: float
    def __init__(self, size: _Optional[int] = ..., block: _Optional[int] = ..., seed: _Optional[int] = ..., policy: _Optional[str] = ..., block_size: _Optional[int] = ..., deal: _Optional[str] = ..., dealt_to: _Optional[int] = ..., epochs: _Optional[int] = ..., world: _Optional[int] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("session", "plan")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    session: str
    plan: Plan
    def __init__(self, session: _Optional[str] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ...) -> None: ...

class ShowRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("session", "forget")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    session: str
    forget: bool
    def __init__(self, session: _Optional[str] = ..., forget: _Optional[bool] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("name", "plan", "closed", "epoch", "committed", "handed_out", "leases", "workers", "workers_in_all", "rate")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    HANDED_OUT_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_IN_ALL_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    plan: Plan
    closed: bool
    epoch: int
    committed: int
    handed_out: int
    leases: int
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    workers_in_all: int
    rate: float
    def __init__(self, name: _Optional[str] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., closed: _Optional[bool] = ..., epoch: _Optional[int] = ..., committed: _Optional[int] = ..., handed_out: _Optional[int] = ..., leases: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., workers_in_all: _Optional[int] = ..., rate: _Optional[float] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("name", "incarnation", "leases", "committed", "epoch", "silent_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    leases: int
    committed: int
    epoch: int
    silent_seconds: float
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., leases: _Optional[int] = ..., committed: _Optional[int] = ..., epoch: _Optional[int] = ..., silent_seconds: _Optional[float] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("session", "worker", "birth", "size", "seed")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    session: str
    worker: str
    birth: bytes
    size: int
    seed: int
    def __init__(self, session: _Optional[str] = ..., worker: _Optional[str] = ..., birth: _Optional[bytes] = ..., size: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("incarnation", "plan", "epoch")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    plan: Plan
    epoch: int
    def __init__(self, incarnation: _Optional[int] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class TakeRequest(_message.Message):
    __slots__ = ("session", "incarnation", "lease", "epoch", "blocks", "commit")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    session: str
    incarnation: int
    lease: int
    epoch: int
    blocks: int
    commit: Part
    def __init__(self, session: _Optional[str] = ..., incarnation: _Optional[int] = ..., lease: _Optional[int] = ..., epoch: _Optional[int] = ..., blocks: _Optional[int] = ..., commit: _Optional[_Union[Part, _Mapping]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("lease", "start", "stop")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    lease: int
    start: int
    stop: int
    def __init__(self, lease: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class TakeReply(_message.Message):
    __slots__ = ("lease", "wait", "ended")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    wait: Wait
    ended: Ended
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., wait: _Optional[_Union[Wait, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease", "epoch", "start", "done", "stop")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    lease: int
    epoch: int
    start: int
    done: int
    stop: int
    def __init__(self, lease: _Optional[int] = ..., epoch: _Optional[int] = ..., start: _Optional[int] = ..., done: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("milliseconds",)
    MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    milliseconds: int
    def __init__(self, milliseconds: _Optional[int] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("epoch", "all")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    all: bool
    def __init__(self, epoch: _Optional[int] = ..., all: _Optional[bool] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session", "incarnation", "part")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    session: str
    incarnation: int
    part: Part
    def __init__(self, session: _Optional[str] = ..., incarnation: _Optional[int] = ..., part: _Optional[_Union[Part, _Mapping]] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("session", "incarnation")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    session: str
    incarnation: int
    def __init__(self, session: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BatchesRequest(_message.Message):
    __slots__ = ("session", "epoch", "step", "rank", "world", "count")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    step: int
    rank: int
    world: int
    count: int
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., rank: _Optional[int] = ..., world: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class BatchesReply(_message.Message):
    __slots__ = ("batches", "steps")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[Batch]
    steps: int
    def __init__(self, batches: _Optional[_Iterable[_Union[Batch, _Mapping]]] = ..., steps: _Optional[int] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("ranges", "weighted", "total", "most")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    weighted: int
    total: int
    most: int
    def __init__(self, ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., weighted: _Optional[int] = ..., total: _Optional[int] = ..., most: _Optional[int] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("lane", "start", "stop")
    LANE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    lane: int
    start: int
    stop: int
    def __init__(self, lane: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class AdvanceRequest(_message.Message):
    __slots__ = ("session", "rank", "world", "epoch", "step")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    session: str
    rank: int
    world: int
    epoch: int
    step: int
    def __init__(self, session: _Optional[str] = ..., rank: _Optional[int] = ..., world: _Optional[int] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class AdvanceReply(_message.Message):
    __slots__ = ("epoch", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...
