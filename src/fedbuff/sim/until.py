"""When a run ends: `accuracy(0.6) | trips(600_000)`, whichever comes first."""

from dataclasses import dataclass, fields

from fedbuff.core import check


@dataclass(frozen=True)
class Until:
    """Limits of a run; it ends at the first that is reached.

    >>> accuracy(0.9) | trips(1000) | trips(500)
    Until(accuracy=0.9, trips=500, server_steps=None, virtual_time=None)
    """

    accuracy: float | None = None
    trips: int | None = None
    server_steps: int | None = None
    virtual_time: float | None = None

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if not given:
            raise ValueError("until: give at least one of accuracy, trips, server_steps, virtual_time")
        for name, value in given.items():
            if name == "accuracy":
                check.number(0, 1, accuracy=value)
            elif name == "virtual_time":
                check.number(0, above=True, virtual_time=value)
            else:
                check.integer(1, check.MOST, **{name: value})

    def __or__(self, other: "Until") -> "Until":
        def earlier(name: str) -> float | None:
            both = [v for v in (getattr(self, name), getattr(other, name)) if v is not None]
            return min(both, default=None)

        return Until(**{f.name: earlier(f.name) for f in fields(self)})  # type: ignore[arg-type]  # each field's own type


def accuracy(target: float) -> Until:
    """Until the accuracy on the task's first split reaches `target`."""
    return Until(accuracy=target)


def trips(limit: int) -> Until:
    """Until so many trips have ended: arrived, failed, or cancelled."""
    return Until(trips=limit)


def server_steps(limit: int) -> Until:
    """Until the server has taken so many steps."""
    return Until(server_steps=limit)


def virtual_time(limit: float) -> Until:
    """Until the virtual clock shows so much."""
    return Until(virtual_time=limit)
