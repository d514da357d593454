"""How a rank ends by a verdict, from a thread, while its main thread is stuck in what will never return."""

import contextlib
import os
import sys
import threading
import time

import psutil

from evenstep.failure import FAILED, Failure, report
from evenstep.watch.verdict import Accused, Verdict
from evenstep.watch.witness import same
from evenstep.world import World

ALL_KNOW = 0.3  # seconds until every rank has read the verdict, and whoever reports it has done so
VICTIMS_STAY = 1.0  # seconds more under torchrun, which takes the first to end for the one that failed


def end(verdict: Verdict, place: World) -> None:
    """End this process, so that whoever started it can start all ranks again; ends those here that cannot."""
    own = next(told for told in verdict.ranks if told.rank == place.rank)
    _report(verdict, own, place)
    time.sleep(ALL_KNOW)
    for told in verdict.ranks:
        if told.host == place.host and not told.answers:
            _kill(told)
    if own.victim and place.reports is None:
        time.sleep(VICTIMS_STAY)
    say("")
    os._exit(FAILED)


def say(text: str) -> None:
    """To whoever watches, but not for long: the main thread may be stuck in a print of its own."""
    saying = threading.Thread(target=_say, args=(text,), daemon=True)
    saying.start()
    saying.join(ALL_KNOW)


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()


def _report(verdict: Verdict, own: Accused, place: World) -> None:
    """Leave word for the process that started this one: about itself, and about those that cannot any more."""
    now = time.time()
    if place.reports is None:
        if not own.victim:
            _tell_torchrun(own)
        return
    speaks = next(told for told in verdict.ranks if told.host == place.host and told.answers).rank == place.rank
    with contextlib.suppress(OSError):
        for told in verdict.culprits if speaks else ():
            report(place.reports, _failure(told, now))
        if own not in verdict.culprits:
            report(place.reports, _failure(own, now))


def _failure(told: Accused, now: float) -> Failure:
    return Failure(
        rank=told.rank,
        host=told.host,
        pid=told.pid,
        time=now,
        what=told.what,
        trace=told.trace,
        victim=told.victim,
    )


def _tell_torchrun(own: Accused) -> None:
    """Its summary names the rank whose error it is told first."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise Stuck(own.sentence)  # it keeps the traceback of what is being handled
    except Stuck as error:
        get_error_handler().record_exception(error)


class Stuck(Exception):
    """A rank that is to blame for a standstill."""


def _kill(told: Accused) -> None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(told.pid)
        if same(process, told.created):
            process.kill()
