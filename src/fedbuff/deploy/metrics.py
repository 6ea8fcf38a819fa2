"""Prometheus metrics of a run that is being served: its text format, version 0.0.4, written by hand.

    # HELP fedbuff_updates_refused_total What was not used, by reason.
    # TYPE fedbuff_updates_refused_total counter
    fedbuff_updates_refused_total{reason="not finite"} 3

Counters go on after a restart of the server: they follow from the run's journal. Updates that wait in the buffer are in
fedbuff_buffer_fill, and are counted as trips once a server step has used them.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # of staleness
_NAMES = 1000  # label values of one metric: whoever sends us bad messages does not fill a database

Sample = tuple[Mapping[str, object], float | int | None]


def exposition(
    facts: Mapping[str, Any], staleness: Mapping[int, int], refused: Mapping[str, int], strikes: Mapping[str, int]
) -> str:
    """All metrics, from the facts of status.json and these counts: updates by staleness, refusals by reason, strikes by who."""
    buffer, clients, evaluated = facts["buffer"], facts["clients"], facts["evaluation"] or {"splits": {}}
    splits, gateways = evaluated["splits"], facts["gateways"]
    families = [
        _family("run_info", "gauge", "What is run.", [({k: str(v) for k, v in facts["run"].items()}, 1)]),
        _family("server_steps_total", "counter", "Server steps taken: the newest version.", [({}, facts["version"])]),
        _family("trips_total", "counter", "Trips that ended, by what became of them.", _by("outcome", facts["outcomes"])),
        _family("trips_in_flight", "gauge", "Active trips.", [({}, facts["in_flight"])]),
        _family("concurrency", "gauge", "Trips that are to be in flight.", [({}, facts["concurrency"])]),
        _family("buffer_fill", "gauge", "Updates in the buffer.", [({}, buffer["fill"])]),
        _family("buffer_size", "gauge", "Updates that make a server step.", [({}, buffer["size"])]),
        _histogram("staleness", "Server steps between start and arrival of the updates that were used.", staleness),
        _family("updates_refused_total", "counter", "What was not used, by reason.", _by("reason", refused)),
        _family("strikes_total", "counter", "Messages that no honest client sends, by sender.", _by("who", strikes)),
        _family("shut_out", "gauge", "Clients and gateways that are not listened to any more.", [({}, len(facts["shut_out"]))]),
        _family("clients_online", "gauge", "Clients that can be reached.", [({}, clients["online"])]),
        *(
            _family(f"gateway_{name}", "gauge", said, [({"gateway": g["name"]}, g[key]) for g in gateways[:_NAMES]])
            for name, key, said in (
                ("online", "online", "Whether the gateway can be reached."),
                ("clients", "clients", "Clients behind the gateway."),
                ("messages_out", "messages_out", "Messages to the gateway that are not answered yet."),
                ("trips_queued", "trips_queued", "Trips that wait to be sent to the gateway."),
                ("last_seen_seconds", "last_seen", "Seconds since the gateway was last heard of."),
            )
        ),
        *(
            _family(
                name, "gauge", f"The {name} of the last evaluation.", [({"split": s}, m.get(name)) for s, m in splits.items()]
            )
            for name in ("accuracy", "loss")
        ),
        _family("epsilon", "gauge", "Differential privacy spent by the last evaluation.", [({}, facts["epsilon"])]),
        _family("uptime_seconds", "gauge", "Seconds that this server has been up.", [({}, facts["uptime"])]),
    ]
    return "".join(families)


def _by(label: str, counts: Mapping[str, int]) -> list[Sample]:
    """Counts by what they are called; those that came late to a crowd are counted together, so that no count ever falls."""
    samples: list[Sample] = [({label: name}, count) for name, count in islice(counts.items(), _NAMES)]
    if len(counts) > _NAMES:
        samples.append(({label: "others"}, sum(islice(counts.values(), _NAMES, None))))
    return samples


def _family(name: str, kind: str, said: str, samples: Iterable[Sample]) -> str:
    """A metric with its samples; nothing at all if no value is known."""
    lines = [_line(name, labels, value) for labels, value in samples if value is not None]
    return _head(name, kind, said) + "".join(lines) if lines else ""


def _histogram(name: str, said: str, counts: Mapping[int, int]) -> str:
    up_to = [(str(edge), sum(count for value, count in counts.items() if value <= edge)) for edge in BUCKETS]
    total = sum(counts.values())
    lines = [_line(f"{name}_bucket", {"le": edge}, count) for edge, count in (*up_to, ("+Inf", total))]
    lines += [
        _line(f"{name}_sum", {}, sum(value * count for value, count in counts.items())),
        _line(f"{name}_count", {}, total),
    ]
    return _head(name, "histogram", said) + "".join(lines)


def _head(name: str, kind: str, said: str) -> str:
    return f"# HELP fedbuff_{name} {said}\n# TYPE fedbuff_{name} {kind}\n"


def _line(name: str, labels: Mapping[str, object], value: float | int) -> str:
    shown = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in labels.items())
    number = repr(float(value)) if isinstance(value, float) else str(int(value))
    return f"fedbuff_{name}{f'{{{shown}}}' if shown else ''} {number}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
