"""Settings: one TOML file of the same shape as the arguments of `fedbuff.simulate`.

    [task.digits]
    clients = 400

    [algorithm.fedbuff]            # a preset, or [server] spelled out, or a preset with changes in [server]
    concurrency = 100

    [client]
    lr = 0.1

    [until]
    trips = 20_000

docs/settings.md lists every key.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_type_hints

from fedbuff import toml
from fedbuff.core.optimizers import adam, delay_adaptive, momentum, sgd
from fedbuff.core.server import SETTINGS, Server
from fedbuff.core.staleness import constant, cutoff, hinge, polynomial
from fedbuff.core.starting import arrivals, cohort, refill
from fedbuff.learn import tasks
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.task import Task
from fedbuff.presets import PRESETS
from fedbuff.report.run import Run
from fedbuff.sim.availability import windows
from fedbuff.sim.simulate import simulate
from fedbuff.sim.timing import Timing, half_normal
from fedbuff.sim.until import Until
from fedbuff.toml import SettingsError, Table

TASKS = {f.__name__: f for f in (tasks.digits, tasks.synthetic, tasks.leaf, tasks.python)}


@dataclass(frozen=True)
class ServerSettings:
    """The arguments of `Server` that a file can hold."""

    start: refill | arrivals | cohort
    buffer_size: int
    weigh: constant | polynomial | hinge | cutoff = polynomial(0.5)
    optimizer: sgd | momentum | adam | delay_adaptive = sgd()
    max_staleness: int | None = None
    weight_by: Literal["uniform", "examples"] = "uniform"
    mixing: bool = False

    def __post_init__(self) -> None:
        self.server()  # which checks the values

    def server(self) -> Server:
        return Server(**{name: getattr(self, name) for name in SETTINGS})


@dataclass(frozen=True)
class Settings:
    """A whole experiment: `settings.run()` runs it, `settings.tables()` is its complete file."""

    task: tuple[Callable[..., Task], Table]
    server: Server
    client: LocalSGD
    until: Until
    timing: Timing = half_normal(1.0)
    name: str = "custom"
    seed: int = 0
    dropout: float = 0.0
    timeout: float | None = None
    availability: windows | None = None
    evaluate_every: int | None = None
    target: float | None = None

    def run(self, **how: Any) -> Run:
        """Simulate; `how` are those arguments of `simulate` that don't change the result: out, resume, progress, …"""
        make, arguments = self.task
        try:
            task = make(**arguments)
        except ValueError as e:
            raise SettingsError(f"task.{make.__name__}: {e}") from e
        return simulate(
            self.server,
            task,
            client=self.client,
            until=self.until,
            timing=self.timing,
            seed=self.seed,
            dropout=self.dropout,
            timeout=self.timeout,
            availability=self.availability,
            evaluate_every=self.evaluate_every,
            target=self.target,
            algorithm=self.name,
            settings=self.tables(),
            **how,
        )

    def tables(self) -> Table:
        """Every setting, defaults included: this file alone reproduces the run."""
        make, arguments = self.task
        defaults = {name: p.default for name, p in toml.parameters(make).items()}
        plain = ("seed", "dropout", "timeout", "evaluate_every", "target")
        server = {name: getattr(self.server, name) for name in SETTINGS}
        return {
            "name": self.name,
            **{name: getattr(self, name) for name in plain if getattr(self, name) is not None},
            "task": {make.__name__: toml.encode({**defaults, **arguments})},
            "server": toml.encode(server),
            "client": toml.fields_of(self.client),
            "timing": toml.encode(self.timing),
            **({"availability": toml.fields_of(self.availability)} if self.availability else {}),
            "until": toml.fields_of(self.until),
        }


# ── from tables ──────────────────────────────────────────────────────────────────────────────────────────────────────


def from_tables(tables: Table) -> Settings:
    """Check everything, and fill in what a preset says and what is left to defaults."""
    known = dict.fromkeys(("algorithm", *Settings.__dataclass_fields__))
    for key, value in tables.items():
        if key == "compare":
            raise SettingsError(
                f"compare = {toml.show(value)}: this file holds several variants; use `fedbuff compare`, or remove [compare]"
            )
        if key not in known:
            raise SettingsError(f"{key} = {toml.show(value)}: unknown key; {toml.suggest(key, known)}")
    for key in ("task", "client", "until"):
        if key not in tables:
            raise SettingsError(f"{key}: missing; settings need [task.…], [client] and [until]")
    name, server, client = _algorithm(tables)
    plain = ("seed", "evaluate_every", "target")
    return Settings(
        task=toml.decode_choice(TASKS, tables["task"], "task", call=False),
        server=server,
        client=client,
        until=toml.decode(Until, tables["until"], "until"),
        name=toml.decode_value(str, tables.get("name", name), "name"),
        **_plain(tables, *plain),
        **_clock(tables),
    )


def timeline_arguments(tables: Table, clients: int | None = None) -> dict[str, Any]:
    """The arguments of `fedbuff.timeline` that settings hold: they need a server, not a task or a client.

    Without a task (or with `clients`) there are so many clients that hold one example each, by default 100 for
    every trip in flight.
    """
    _, server, _ = _algorithm({"client": {"lr": 0.0}, **tables})
    arguments: dict[str, Any] = {name: getattr(server, name) for name in ("start", "buffer_size", "weigh", "max_staleness")}
    if "task" in tables and clients is None:
        make, of_task = toml.decode_choice(TASKS, tables["task"], "task", call=False)
        task = make(**of_task)
        arguments |= {"clients": len(task.clients), "examples": task.examples}
    else:
        arguments["clients"] = clients or 100 * max(server.start.most(), server.buffer_size)
    return {**arguments, **_plain(tables, "seed"), **_clock(tables)}


def _clock(tables: Table) -> dict[str, Any]:
    """Timing, and what goes wrong on the way."""
    decoded = _plain(tables, "dropout", "timeout")
    decoded["timing"] = toml.decode_value(Timing, tables.get("timing", "half_normal"), "timing")
    if "availability" in tables:
        decoded["availability"] = toml.decode(windows, tables["availability"], "availability")
    return decoded


def _plain(tables: Table, *keys: str) -> dict[str, Any]:
    hints = get_type_hints(Settings)
    return {key: toml.decode_value(hints[key], tables[key], key) for key in keys if key in tables}


def _algorithm(tables: Table) -> tuple[str, Server, LocalSGD]:
    """Server and client: from the preset if one is named, with what [server] and [client] say on top."""
    client = toml.decode(LocalSGD, tables["client"], "client")
    spelled_out = tables.get("server", {})
    if "algorithm" not in tables:
        if "server" not in tables:
            raise SettingsError(
                f"server: missing; give [server], or a preset as [algorithm.NAME] (presets: {', '.join(PRESETS)})"
            )
        return "custom", toml.decode(ServerSettings, spelled_out, "server").server(), client
    named = tables["algorithm"]
    choices = {name: partial(preset, client) for name, preset in PRESETS.items()}
    server, changed = toml.decode_choice(choices, named, "algorithm")
    table = merge(
        {name: toml.encode(getattr(server, name)) for name in SETTINGS if getattr(server, name) is not None}, spelled_out
    )
    client = replace(changed, **{key: getattr(client, key) for key in tables["client"]})  # the file's own words win
    return (
        next(iter(named)) if isinstance(named, dict) else named,
        toml.decode(ServerSettings, table, "server").server(),
        client,
    )


# ── files and changes ────────────────────────────────────────────────────────────────────────────────────────────────

# keys whose table names one of several kinds: another kind replaces it instead of joining it
CHOICES = frozenset({"algorithm", "model", "optimizer", "split", "start", "task", "timing", "weigh"})


def read(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise SettingsError(f"{path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise SettingsError(f"{path}: not TOML: {e}") from e


def merge(base: Table, changes: Table) -> Table:
    """`base` with `changes` on top, table by table.

    >>> merge({"start": {"refill": {"concurrency": 9}}, "a": {"x": 1}}, {"start": {"cohort": {"size": 5}}, "a": {"y": 2}})
    {'start': {'cohort': {'size': 5}}, 'a': {'x': 1, 'y': 2}}
    """
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        other_kind = key in CHOICES and isinstance(old, dict) and isinstance(value, dict) and old.keys() != value.keys()
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) and not other_kind else value
    return merged


def change(tables: Table, assignment: str) -> Table:
    """`tables` with a change as on the command line, `server.buffer_size=10`; what is not TOML is taken as a string.

    >>> change({"server": {"buffer_size": 10}}, "server.weigh=constant")
    {'server': {'buffer_size': 10, 'weigh': 'constant'}}
    """
    path, equals, text = assignment.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise SettingsError(f"--set {assignment}: expected KEY=VALUE, e.g. server.buffer_size=10")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for key in reversed(keys):
        value = {key: value}
    return merge(tables, value)


def variants(tables: Table) -> dict[str, Table]:
    """The tables of each [compare.NAME], merged over the rest of the file."""
    common = {key: value for key, value in tables.items() if key != "compare"}
    named = tables["compare"]
    if not isinstance(named, dict) or not named or not all(isinstance(value, dict) for value in named.values()):
        raise SettingsError(f"compare = {toml.show(named)}: expected tables [compare.NAME], each with the settings that differ")
    return {name: {**merge(common, changes), "name": name} for name, changes in named.items()}
