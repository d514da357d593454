"""How long a rank may stay at one place before something must be wrong."""

from evenstep.watch.pulse import FIRST, METRICS, OF_A_STEP, SNAPSHOT, START, WEIGHTS, Pulse, Where

TIMES = 10  # the usual step
LEAST = 30.0  # seconds
LONG = 600.0  # seconds for what nobody can foresee: reading data for the first time, compiling, a slow disk
MEMORY = 0.1  # of the latest steps in what is usual

UNFORESEEN = (START, SNAPSHOT, FIRST, METRICS, WEIGHTS)
LONGEST_TICK = 2.0  # seconds; a thread that was away for longer was stopped, and so was its whole process


class Patience:
    """What is long, by what is usual."""

    def __init__(self, given: float | None = None, *, compiles: bool = False) -> None:
        self._given = given
        self._long = max(LONG, given or 0.0)
        self._compiles = compiles
        self._steps = 0
        self._usual = 0.0

    def step_took(self, seconds: float) -> None:
        """A step has ended. The first one is forgotten soon: much happens in it for the first time."""
        self._steps += 1
        if self._steps <= 2:
            self._usual = seconds
        else:
            self._usual += MEMORY * (seconds - self._usual)

    def at(self, where: Where) -> float:
        """Seconds for which a rank may stay there."""
        if where.phase in UNFORESEEN or not self._steps:
            return self._long
        if self._given is not None:
            return self._given
        if self._compiles:  # another shape of batch, and it compiles anew
            return max(LONG, TIMES * self._usual)
        return max(LEAST, TIMES * self._usual)


class Stillness:
    """How long a rank has not moved."""

    def __init__(self, patience: Patience, pulse: Pulse, now: float) -> None:
        self.patience = patience
        self.pulse = pulse
        self.where = pulse.where()
        self.still = 0.0
        self._taken = pulse.taken
        self._looked = now
        self._stepping = 0.0
        """Seconds spent on steps since the last one was seen to end."""

    def look(self, now: float) -> None:
        """See where the rank is now. Time in which this whole process stood still does not count."""
        passed = min(now - self._looked, LONGEST_TICK)
        before, self.where, self._looked = self.where, self.pulse.where(), now
        self.still = self.still + passed if self.where == before else 0.0
        if before.phase in OF_A_STEP:
            self._stepping += passed
        steps, self._taken = self.pulse.taken - self._taken, self.pulse.taken
        if steps:
            self.patience.step_took(self._stepping / steps)
            self._stepping = 0.0

    @property
    def left(self) -> float:
        """Seconds of patience that are left; none, or less, where something must be wrong."""
        return self.patience.at(self.where) - self.still
