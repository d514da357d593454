"""torch's elastic agent, with two things it lacks: it sees how every rank ended, and it leaves signals alone."""

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, MultiprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig

from evenstep import leash
from evenstep.errors import UserError


class Ended(NamedTuple):
    """How a rank's process ended: an exit code, or a signal as a negative one."""

    pid: int
    code: int
    time: float


class Agent(LocalElasticAgent):
    """Starts the ranks of this machine, and ends them all when one has ended."""

    def __init__(
        self,
        entry: Callable[..., Any],
        *args: Any,
        procs: int,
        rendezvous: RendezvousHandler,
        local_addr: str | None,
        logs: str,
        interval: float,
        restarts: int,
        again: Callable[[Mapping[int, "Ended"]], bool],
        node: int | None,
    ) -> None:
        logs_specs = DefaultLogsSpecs(log_dir=logs)
        spec = WorkerSpec(
            role="evenstep",
            local_world_size=procs,
            rdzv_handler=rendezvous,
            entrypoint=entry,
            args=args,
            max_restarts=restarts,
            monitor_interval=interval,
            local_addr=local_addr,
            # torch's own choice: near its GPU, where there is one for each rank
            numa_options=LaunchConfig(1, 1, procs, logs_specs).numa_options,
        )
        super().__init__(spec, logs_specs, start_method="forkserver")
        self.ended: dict[int, Ended] = {}
        """By rank, those that ended before their time; the ones that were ended for it are not among them."""
        self._again = again
        self._node = node
        """This machine's number, where the user has numbered them: torch would go by the names of the hosts."""

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        node = group_rank if self._node is None else self._node
        if store.add(f"evenstep/node/{node}", 1) > 1:
            raise UserError(f"two nodes say NODE_RANK={node}; number them 0 to {group_world_size - 1}")
        workers: list[Worker] = super()._assign_worker_ranks(store, node, group_world_size, spec)
        return workers

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._node is not None:
            worker_group.group_rank = self._node  # type: ignore[assignment]
        with _signals_kept():  # torch takes over even those that nohup has switched off
            started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = self._look(worker_group)
        if result.is_failed() and self._remaining_restarts > 0 and not self._again(self.ended):
            self._remaining_restarts = 0
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.ended = {}
        super()._restart_workers(worker_group)

    def _look(self, worker_group: WorkerGroup) -> RunResult:
        """How the ranks are, and who has ended since."""
        assert isinstance(self._pcontext, MultiprocessContext) and self._pcontext._pc is not None
        for worker, process in zip(worker_group.workers, self._pcontext._pc.processes, strict=True):
            if process.exitcode is not None and worker.global_rank not in self.ended:
                self.ended[worker.global_rank] = Ended(process.pid, process.exitcode, time.time())
        left = {rank: ended for rank, ended in self.ended.items() if ended.code == 0}
        if left:  # torch would take a rank that called os._exit(0) for a good one, and wait for its result
            failures = {rank: ProcessFailure(rank, ended.pid, 0, "") for rank, ended in left.items()}
            return RunResult(state=WorkerState.FAILED, failures=failures)
        result: RunResult = super()._monitor_workers(worker_group)
        for rank, failure in result.failures.items():
            self.ended.setdefault(rank, Ended(failure.pid, failure.exitcode, time.time()))
        return result


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*leash.STOPPING, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            with contextlib.suppress(ValueError):  # not the main thread, where torch sets none either
                signal.signal(number, handler)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What torch's agent has to say we say in a line."""
    loggers = [logging.getLogger(f"torch.{name}") for name in ("distributed.elastic", "multiprocessing.spawn")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
