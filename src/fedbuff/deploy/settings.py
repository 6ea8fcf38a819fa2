"""`[deploy]` of a settings file: what only a run over a network needs to know."""

from dataclasses import dataclass, field

from fedbuff.core import check

_DIGITS = 8  # of a client's number: more clients than that are not one by one behind gateways

_EXPECTED = "expected numbers and ranges, e.g. '0-49' or '0-9,20'"


@dataclass(frozen=True)
class Deployment:
    """How a run over a network goes.

    deadline              seconds after which a trip that is not back has failed, and frees its slot
    trips_per_message     at most so many clients of a gateway are asked at once; their results come back together
    messages_per_gateway  on their way at a time: the next one waits at the gateway while this one is worked on
    linger                seconds that less than a full message waits for more while another one is on its way
    gateways              which clients each gateway stands for, by the name it is registered under: "0-49" or "0-9,20-29";
                          empty: a gateway says itself, and the first to say it is believed
    strikes               so many bad messages shut a client or a gateway out
    max_norm              an update that is longer is refused (by default any length is taken; privacy clips)
    max_examples          an update that claims to come from more is refused
    results_per_minute    of a client; more are refused
    poll                  seconds between looks for replies: each costs the SuperLink a hundredth of a second
    checkpoint_every      seconds between checkpoints; a restart reads the journal since
    keep_journal          all of it, for `fedbuff replay`; else only what a restart needs
    drain                 seconds to wait at the end for what is still on its way
    metrics               HOST:PORT of the live page and of /metrics for Prometheus; empty for none
    """

    deadline: float = 600.0
    trips_per_message: int = 64
    messages_per_gateway: int = 2
    linger: float = 2.0
    gateways: dict[str, str] = field(default_factory=dict)
    strikes: int = 5
    max_norm: float | None = None
    max_examples: int = 1_000_000
    results_per_minute: int = 600
    poll: float = 0.2
    checkpoint_every: float = 30.0
    keep_journal: bool = True
    drain: float = 60.0
    metrics: str = ""

    def __post_init__(self) -> None:
        check.number(0, above=True, deadline=self.deadline, poll=self.poll)
        check.number(0, checkpoint_every=self.checkpoint_every, drain=self.drain, linger=self.linger)
        check.integer(1, trips_per_message=self.trips_per_message, messages_per_gateway=self.messages_per_gateway)
        check.integer(1, strikes=self.strikes, results_per_minute=self.results_per_minute, max_examples=self.max_examples)
        if self.max_norm is not None:
            check.number(0, above=True, max_norm=self.max_norm)
        check.fits(
            isinstance(self.gateways, dict),
            'clients by the name of their gateway, e.g. {north = "0-49"}',
            gateways=self.gateways,
        )
        every = []
        for name, text in self.gateways.items():
            try:
                every += [(first, last, name) for first, last in ranges(text)]
            except ValueError as e:
                raise ValueError(f"gateways.{name} = {text!r}: {_EXPECTED}") from e
        reach, before = -1, ""
        for first, last, name in sorted(every):
            if first <= reach and name != before:
                raise ValueError(f"gateways.{name} = {self.gateways[name]!r}: client {first} is behind {before} already")
            reach, before = max((reach, before), (last, name))

    def clients_of(self, gateway: str) -> tuple[tuple[int, int], ...]:
        return ranges(self.gateways[gateway])

    def most_bytes(self, trips: int, weights: int) -> int:
        """The largest report that a message with so many trips can bring about, for so many bytes of weights."""
        return (1 << 16) + (trips + self.trips_per_message) * (weights + 1024)


def ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Numbers as people write them.

    >>> ranges("0-9,20")
    ((0, 9), (20, 20))
    """
    found = []
    for part in text.replace(" ", "").split(",") if isinstance(text, str) else [""]:
        first, dash, last = part.partition("-")
        last = last if dash else first
        short = len(first) <= _DIGITS and len(last) <= _DIGITS
        if not (short and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ValueError(f"clients = {text!r}: {_EXPECTED}")
        found.append((int(first), int(last)))
    return tuple(found)
