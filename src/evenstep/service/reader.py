"""For those who read a dynamic session: as a plain loop, or as the batch sampler of any DataLoader."""

import os
from collections.abc import Iterator, Sized
from functools import partial
from pathlib import Path
from typing import Any, Self

from torch.utils.data import Sampler, get_worker_info

from evenstep.errors import UserError
from evenstep.order.permutation import Indices
from evenstep.service import order_pb2 as pb
from evenstep.service.connection import Connection, session_at
from evenstep.service.feed import FIRST_WORDS, Feed


class Reader:
    """The blocks of an epoch that this process gets, as arrays of sample numbers; each loop is an epoch.

        with Reader("grpc://host:7077/clicks", size=len(data)) as reader:
            while not reader.over:
                for indices in reader:
                    work(data[indices])

    A block is committed when the next one is asked for, and the last one when the loop comes to its end: what was
    interrupted before is worked on again, by whoever comes next. So this is for loops that are done with a block
    when they ask for another; where something reads ahead of them, as a DataLoader does, take `ServiceSampler`.

    It can be handed to other processes, by fork or spawn: each reads as a worker of its own. In the workers of a
    DataLoader (under an IterableDataset) a loop ends when there is nothing more to be had for now; so loop over
    the loader until `over`, as with `ServiceSampler`.
    """

    def __init__(
        self,
        address: str,
        *,
        size: int | None = None,
        seed: int | None = None,
        worker: str | None = None,
        token_file: Path | None = None,
        tls_ca: Path | None = None,
        patience: float = 600.0,
    ) -> None:
        server, self.session = session_at(address, token_file=token_file, tls_ca=tls_ca)
        self._connect = partial(Connection, server, patience=patience)
        self._options: dict[str, Any] = {"size": size, "seed": seed, "worker": worker}
        self._feed: Feed | None = None
        self._process = os.getpid()
        self._made_in = self._process

    @property
    def epoch(self) -> int:
        """The epoch that comes next, or that is being read."""
        return self._stands()[0]

    @property
    def over(self) -> bool:
        """Whether all epochs are over."""
        epoch, epochs = self._stands()
        return epoch == epochs

    @property
    def refused(self) -> int:
        """Samples that were worked on too late: others did so again."""
        return self._feed.refused if self._feed is not None else 0

    def __iter__(self) -> Iterator[Indices]:
        feed = self.feed
        feed.rewind()
        feed.next_epoch()
        # a loader takes from its workers in turn: one that waited for what another holds would wait for ever
        wait = get_worker_info() is None
        while (block := feed.next(wait)) is not None:
            yield block.indices
            feed.commit()
        feed.settle()

    def _stands(self) -> tuple[int, int]:
        """The epoch, of how many: of what this process holds, else as the server says once it has heard of all
        that was committed here."""
        feed = self._feed if self._process == os.getpid() else None
        if feed is not None and feed.holds():
            return feed.epoch, feed.spec.epochs
        connection = self._connect()
        try:
            session = connection.call("Show", pb.ShowRequest(session=self.session), pb.Session, FIRST_WORDS)
        finally:
            connection.close()
        return session.epoch, session.plan.epochs

    @property
    def feed(self) -> Feed:
        """What this process reads from."""
        if self._feed is None or self._process != os.getpid():
            self._process = os.getpid()
            options = dict(self._options)
            if options["worker"] is not None and self._process != self._made_in:
                options["worker"] = f"{options['worker']}-{self._process}"  # two of one name would end each other
            self._feed = Feed(self._connect(), self.session, **options)
            self._feed.start()
        return self._feed

    def close(self) -> None:
        """Send what is committed, and give back what is not."""
        if self._feed is not None and self._process == os.getpid():
            self._feed.close()
        self._feed = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_feed": None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ServiceSampler(Sampler[list[int]]):
    """The blocks that this process gets, as the batch sampler of a DataLoader with any number of workers.

        sampler = ServiceSampler(data, "grpc://host:7077/clicks")
        loader = DataLoader(data, batch_sampler=sampler, num_workers=2)
        while not sampler.over:
            for inputs, targets in loader:
                train(inputs, targets)
                sampler.take()

    `take()` says that the training is done with a batch: it is committed. What the loader's workers have read
    ahead does not count; after a break out of the loop it comes again.

    A loop over the loader ends when there is nothing more to be had for now. Mostly that is the end of the epoch.
    Where others still work on theirs, and may fail, it is not yet: `epoch` says so, and the next loop waits for
    what comes back, or for the end. So loop until `over`, or until `epoch` has come to what you want.
    """

    def __init__(self, data: Sized | int, address: str, **options: Any) -> None:
        size = data if isinstance(data, int) else len(data)
        self.reader = Reader(address, size=size, **options)
        self._counted = False  # whether take() is called at all
        self._silent = False  # a whole loop went by without it

    @property
    def epoch(self) -> int:
        """The epoch that comes next, or that is being read."""
        return self.reader.epoch

    @property
    def over(self) -> bool:
        """Whether all epochs are over."""
        return self.reader.over

    @property
    def refused(self) -> int:
        """Samples that were trained on too late: others did so again."""
        return self.reader.refused

    def __iter__(self) -> Iterator[list[int]]:
        if self._silent:
            raise UserError("call take() on the sampler after each batch: nothing else tells what was trained on")
        feed = self.reader.feed
        feed.rewind()
        feed.next_epoch()
        drawn = False
        while (block := feed.next()) is not None:
            drawn = True
            yield block.indices.tolist()
        self._silent = drawn and not self._counted

    def take(self) -> None:
        """The training is done with the oldest batch that it has not said this of."""
        self.reader.feed.commit()
        self._counted, self._silent = True, False

    def close(self) -> None:
        """Send what is committed, and give back what is not."""
        self.reader.close()
