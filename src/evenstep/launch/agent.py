"""torch's elastic agent, with what it lacks: it is awake when a rank ends and sees how, it ends the others at
once, hands on requests to stop, and takes no signals for itself."""

import contextlib
import logging
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, MultiprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from evenstep import leash
from evenstep.launch.blame import Ended
from evenstep.launch.nodes import Nodes
from evenstep.watch import stopping

INTERVAL = 0.1  # seconds between two looks at the ranks, where nothing happens meanwhile
BEFORE_THE_KILL = 25.0  # seconds that ranks have to stop: what sends SIGTERM sends SIGKILL 30 s later
BEFORE_THE_END = 110.0  # and SIGUSR1 comes as a warning, such as two minutes before a spot instance is taken
PATIENCE = {signal.SIGTERM: BEFORE_THE_KILL, signal.SIGHUP: BEFORE_THE_KILL}


class Agent(LocalElasticAgent):
    """Starts the ranks of this node, and ends them all when one has ended."""

    def __init__(
        self,
        entry: Callable[..., Any],
        *args: Any,
        procs: int,
        nodes: Nodes,
        logs: str,
        restarts: int,
        again: Callable[[str, Mapping[int, Ended], str], bool],
    ) -> None:
        logs_specs = DefaultLogsSpecs(log_dir=logs)
        spec = WorkerSpec(
            role="evenstep",
            local_world_size=procs,
            rdzv_handler=nodes.rendezvous,
            entrypoint=entry,
            max_restarts=restarts,
            monitor_interval=1e-6,  # `_wait` does the waiting
            master_addr=nodes.meeting.address if nodes.meeting else None,
            master_port=nodes.meeting.port if nodes.meeting else None,
            local_addr=None if nodes.meeting else "localhost",
            # torch's own choice: near its GPU, where there is one for each rank
            numa_options=LaunchConfig(1, 1, procs, logs_specs).numa_options,
        )
        super().__init__(spec, logs_specs, start_method="forkserver")
        self.attempt = ""
        """The name of this try, the same on all nodes; empty before the first."""
        self.ended: dict[int, Ended] = {}
        """By rank, those that ended before their time; the ones that were ended for it are not among them."""
        self._args = args
        self._nodes = nodes
        self._again = again
        self._place = 0
        self._handed_on: float | None = None

    # A try

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with stopping.interruptible():
            leash.await_forkserver()
            super()._rendezvous(worker_group)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """In the order in which the user has numbered the nodes; torch would go by the names of the hosts."""
        self._place = self._nodes.met(store, group_rank, group_world_size)
        workers: list[Worker] = super()._assign_worker_ranks(store, self._place, group_world_size, spec)
        return workers

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        assert worker_group.store is not None
        worker_group.group_rank = self._place
        if worker_group.group_rank == 0:
            worker_group.store.set("evenstep/attempt", uuid.uuid4().hex)
        self.attempt = worker_group.store.get("evenstep/attempt").decode()
        worker_group.spec.args = (*self._args, self.attempt)
        with ThreadPoolExecutor(1) as outside:  # of the main thread, where torch would take the signals for itself
            return outside.submit(super()._start_workers, worker_group).result()

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.ended = {}
        failed, nodes = worker_group.state == WorkerState.FAILED, worker_group.group_world_size
        super()._restart_workers(worker_group)
        if failed and worker_group.group_world_size != nodes:  # a node that comes or goes is no failure
            self._remaining_restarts += 1

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """A rank that is ended has nothing to save: it was asked before, or the others are gone."""
        del death_sig
        super()._shutdown(signal.SIGKILL, timeout)

    # While it runs

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._wait()
        self._hand_on_requests()
        self._see_who_ended(worker_group)
        gone = self._nodes.gone()
        if self.ended or gone:
            self._kill()  # at once: they wait for each other in collectives, or are about to
            if stopping.requested() or (
                self._remaining_restarts > 0 and not self._again(self.attempt, self.ended, gone)
            ):
                self._remaining_restarts = 0
            failures = {rank: ProcessFailure(rank, how.pid, how.code, "") for rank, how in self.ended.items()}
            return RunResult(state=WorkerState.FAILED, failures=failures)
        if not all(self._returned()):
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        for rank, failure in result.failures.items():
            self.ended.setdefault(rank, Ended(failure.pid, failure.exitcode, time.time()))
        return result

    def _wait(self) -> None:
        """Until a rank ends or returns, or for a moment."""
        queues: list[Any] = list(self._context._ret_vals.values())
        waiting = [queue._reader for queue in queues if queue.empty()]
        connection.wait([*(process.sentinel for process in self._processes), *waiting], INTERVAL)

    def _hand_on_requests(self) -> None:
        """Let the ranks know that somebody has asked this process to stop; end them if they take too long."""
        asked = stopping.requested()
        if asked is None:
            return
        if self._handed_on is None:
            self._handed_on = time.monotonic()
            self._signal(signal.SIGTERM)
        elif time.monotonic() - self._handed_on > PATIENCE.get(asked, BEFORE_THE_END):
            self._kill()

    def _see_who_ended(self, worker_group: WorkerGroup) -> None:
        for worker, process in zip(worker_group.workers, self._processes, strict=True):
            if process.exitcode is not None and worker.global_rank not in self.ended:
                self.ended[worker.global_rank] = Ended(process.pid, process.exitcode, time.time())
                if -process.exitcode in leash.STOPPING:  # it was not yet able to listen
                    stopping.request(signal.Signals(-process.exitcode))

    def _returned(self) -> list[bool]:
        return [not queue.empty() for queue in self._context._ret_vals.values()]

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    @property
    def _context(self) -> MultiprocessContext:
        assert isinstance(self._pcontext, MultiprocessContext)
        return self._pcontext

    @property
    def _processes(self) -> list[Any]:
        assert self._context._pc is not None
        found: list[Any] = self._context._pc.processes
        return found


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
