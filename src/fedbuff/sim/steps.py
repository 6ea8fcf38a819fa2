"""Server steps to come, as the plan finds them and the run takes them: a queue.

Tens of thousands of steps wait where many trips are in flight. They lie in columns, in the order in which they will be
needed: as objects of Python's own they would be all over the memory, and far away by then.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

_KEPT = 64  # steps that were taken and still lie before those to come: more only while those are more


class Step(NamedTuple):
    """A server step, and where the run stands right after it."""

    version: int  # that it makes
    trips: "array[int]"  # in its buffer, in the order of arrival
    weights: "array[float]"  # s(τ) of each
    staleness: "array[int]"
    first: int  # the first trip that starts on the version
    started: int  # trips that have started by now
    time: float
    ended: int  # trips that have ended by now

    def state(self) -> tuple[Any, ...]:
        """Ready for JSON."""
        return tuple(value.tolist() if isinstance(value, array) else value for value in self)

    @classmethod
    def restored(cls, state: Sequence[Any]) -> "Step":
        version, trips, weights, staleness, *rest = state
        return cls(version, array("q", trips), array("d", weights), array("q", staleness), *rest)


NOTHING = Step(0, array("q"), array("d"), array("q"), 0, 0, 0.0, 0)  # where a run stands before its first step


class Steps:
    """Steps that make one version after another: the plan adds them, the run takes them.

    >>> steps = Steps()
    >>> steps.add(1, array("q", [4, 2]), array("d", [1.0, 0.5]), array("q", [0, 3]), 5, 7, 1.5, 2)
    >>> steps[0].trips, steps[0].time, len(steps)
    (array('q', [4, 2]), 1.5, 1)
    >>> steps.taken()
    >>> len(steps)
    0
    """

    def __init__(self) -> None:
        self._trips, self._weights, self._staleness = array("q"), array("d"), array("q")
        self._until = array("q", [0])  # where a step's trips end, after where those of the first begin
        self._firsts, self._started, self._times, self._ended = array("q"), array("q"), array("d"), array("q")
        self._version = 0  # that the first of the columns makes
        self._taken = 0

    def __len__(self) -> int:
        return len(self._firsts) - self._taken

    def __getitem__(self, number: int) -> Step:
        if not 0 <= number < len(self):
            raise IndexError(f"step {number} of {len(self)}")
        i = self._taken + number
        begin, end = self._until[i], self._until[i + 1]
        buffer = self._trips[begin:end], self._weights[begin:end], self._staleness[begin:end]
        return Step(self._version + i, *buffer, self._firsts[i], self._started[i], self._times[i], self._ended[i])

    def __iter__(self) -> Iterator[Step]:
        return (self[i] for i in range(len(self)))

    def add(
        self, version: int, trips: Sequence[int], weights: Sequence[float], staleness: Sequence[int],
        first: int, started: int, time: float, ended: int,
    ) -> None:  # fmt: skip
        """The next step; what it is given is copied."""
        if not self._firsts:
            self._version = version
        self._trips.extend(trips)
        self._weights.extend(weights)
        self._staleness.extend(staleness)
        self._until.append(len(self._trips))
        self._firsts.append(first)
        self._started.append(started)
        self._times.append(time)
        self._ended.append(ended)

    def extend(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self.add(*step)

    def taken(self) -> None:
        """The next step was taken, and is no longer to come."""
        if not self:
            raise IndexError("no step is to come")
        self._taken += 1
        if self._taken >= max(_KEPT, len(self)):
            self._forget()

    @property
    def first(self) -> int:
        """The first trip that starts on the version of the next step."""
        return self._firsts[self._taken]

    def ended_by(self, version: int) -> int | None:
        """Trips that have ended by the last step that makes `version` or one before it; None if no step does."""
        i = min(version - self._version, len(self._firsts) - 1)
        return self._ended[i] if i >= self._taken else None

    def clear(self) -> None:
        self._taken = len(self._firsts)
        self._forget()

    def _forget(self) -> None:
        """Let go of the steps that were taken."""
        taken, gone = self._taken, self._until[self._taken]
        for column in (self._trips, self._weights, self._staleness):
            del column[:gone]
        for column in (self._firsts, self._started, self._times, self._ended):
            del column[:taken]
        self._until = array("q", [end - gone for end in self._until[taken:]])
        self._version += taken
        self._taken = 0
