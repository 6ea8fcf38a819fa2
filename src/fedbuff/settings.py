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

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_type_hints

from fedbuff import toml
from fedbuff.core import check
from fedbuff.core.optimizers import adam, delay_adaptive, momentum, sgd
from fedbuff.core.server import SETTINGS, Server
from fedbuff.core.staleness import constant, cutoff, hinge, polynomial
from fedbuff.core.starting import arrivals, cohort, is_sampled, refill
from fedbuff.deploy.settings import Deployment
from fedbuff.learn import tasks
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.task import Task
from fedbuff.learn.training import Training
from fedbuff.presets import PRESETS
from fedbuff.privacy.settings import Privacy
from fedbuff.report.address import host_and_port
from fedbuff.report.run import Run
from fedbuff.sim.availability import windows
from fedbuff.sim.refused import check_sampling, check_secure
from fedbuff.sim.secure import SecureAggregation
from fedbuff.sim.simulate import describe, simulate
from fedbuff.sim.timing import Sizes, Timing, half_normal, mean_duration
from fedbuff.sim.until import Until
from fedbuff.toml import SettingsError, Table

TASKS = {
    f.__name__: f
    for f in (
        tasks.digits,
        tasks.synthetic,
        tasks.cifar10,
        tasks.celeba,
        tasks.sent140,
        tasks.leaf,
        tasks.hugging_face,
        tasks.python,
    )
}


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
    average: int | None = None

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
    privacy: Privacy | None = None
    secure_aggregation: SecureAggregation | None = None
    evaluate_every: int | None = None
    evaluate_share: float = 0.1
    target: float | None = None
    training: Training = Training()
    deploy: Deployment | None = None

    def check_deployable(self) -> None:
        """Refuse what there is in a simulation only; for whoever serves these settings, with [deploy] or without."""
        if is_sampled(self.server.start):
            raise ValueError("poisson=True: over a network who is not there can't be in a cohort, so it is no Poisson sample")
        if self.secure_aggregation is not None and self.secure_aggregation.mode == "helpers":
            raise ValueError("secure_aggregation.mode = 'helpers': over a network there are 'enclave' and 'plain'")

    def __post_init__(self) -> None:
        """What only `simulate` would find out, so that a comparison does not stop at its fifth run."""
        check.integer(0, seed=self.seed)
        check.number(0, 1, dropout=self.dropout)
        if self.timeout is not None:
            check.number(0, above=True, timeout=self.timeout)
        if self.target is not None:
            check.number(0, 1, target=self.target)
        if self.evaluate_every is not None:
            check.integer(1, evaluate_every=self.evaluate_every)
        check.number(1e-9, 1, evaluate_share=self.evaluate_share)
        if self.secure_aggregation is not None:
            check_secure(self.secure_aggregation, self.server, self.privacy)
        if self.deploy is not None:
            self.check_deployable()
            if self.deploy.metrics:
                host_and_port(self.deploy.metrics, "deploy.metrics")
            if self.deploy.max_norm is not None and self.secure_aggregation is not None:
                raise ValueError(
                    f"deploy.max_norm={self.deploy.max_norm:g}: with secure aggregation nobody sees how long an update is, and "
                    "its clip is a limit already; leave max_norm out"
                )
        check_sampling(self.server, self.privacy, self.availability)
        if self.privacy is not None:  # with any noise and any number of clients: both take longer to find out
            any_noise = replace(self.privacy, epsilon=None, noise_multiplier=1.0)
            limits = {"server_steps": self.until.server_steps, "trips": self.until.trips}
            any_noise.plan(self.server, 2 * self.server.buffer_size, **limits)

    def run(self, **how: Any) -> Run:
        """Simulate; `how` are those arguments of `simulate` that don't change the result: out, resume, progress, …"""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("task", "server", "name", "deploy")}
        return simulate(self.server, self.load_task(), algorithm=self.name, **parts, **how)

    def load_task(self) -> Task:
        make, arguments = self.task
        try:
            return make(**arguments)
        except ValueError as e:
            raise SettingsError(f"task.{make.__name__}: {e}") from e

    def tables(self) -> Table:
        """Every setting, defaults included, as a run's settings.toml has it."""
        task = toml.table_of(*self.task)
        plain = {
            name: getattr(self, name)
            for name in (
                "name",
                "seed",
                "dropout",
                "timeout",
                "evaluate_every",
                "evaluate_share",
                "target",
            )
        }
        parts = (self.server, self.client, self.until, self.timing, self.availability, self.training, self.privacy)
        tables = describe(task, *parts, self.secure_aggregation, **plain)
        return tables if self.deploy is None else {**tables, "deploy": toml.fields_of(self.deploy)}


# ── from tables ──────────────────────────────────────────────────────────────────────────────────────────────────────


_OPTIONAL: tuple[tuple[str, Any], ...] = (
    ("privacy", Privacy),
    ("secure_aggregation", SecureAggregation),
    ("deploy", Deployment),
)


def from_tables(tables: Table) -> Settings:
    """Check everything, and fill in what a preset says and what is left to defaults."""
    _known_keys(tables)
    for key in ("task", "client", "until"):
        if key not in tables:
            raise SettingsError(f"{key}: missing; settings need [task.…], [client] and [until]")
    name, server, client = _algorithm(tables)
    try:
        return Settings(
            task=toml.decode_choice(TASKS, tables["task"], "task", call=False),
            server=server,
            client=client,
            until=toml.decode(Until, tables["until"], "until"),
            training=toml.decode(Training, tables.get("training", {}), "training"),
            **{key: toml.decode(kind, tables[key], key) for key, kind in _OPTIONAL if key in tables},
            name=toml.decode_value(str, tables.get("name", name), "name"),
            **_plain(tables, "seed", "evaluate_every", "evaluate_share", "target"),
            **_clock(tables),
        )
    except ValueError as e:
        raise SettingsError(str(e)) from e


def timeline_arguments(tables: Table, clients: int | None = None, concurrency: int | None = None) -> dict[str, Any]:
    """The arguments of `fedbuff.timeline` that settings hold: they need a server, not a task or a client.

    Without a task (or with `clients`) there are so many clients that hold one example each, by default 100 for every
    trip in flight. `concurrency` changes the size of the file's own starting rule.
    """
    _known_keys(tables)
    if all(key in tables for key in ("task", "client", "until")):
        from_tables(tables)  # a whole file must be right as a whole, though little of it is looked at here
    _, server, _ = _algorithm({"client": {"lr": 0.0}, **tables})
    for key, kind in (("until", Until), ("training", Training), *_OPTIONAL):
        if key in tables:
            toml.decode(kind, tables[key], key)
    arguments: dict[str, Any] = {name: getattr(server, name) for name in ("start", "buffer_size", "weigh", "max_staleness")}
    arguments |= {**_plain(tables, "seed"), **_clock(tables)}
    if concurrency is not None:
        start = server.start
        if isinstance(start, cohort):
            arguments["start"] = replace(start, size=concurrency)
            arguments["buffer_size"] = concurrency if server.buffer_size == start.size else server.buffer_size
        elif isinstance(start, arrivals):
            arguments["start"] = replace(start, rate=None, concurrency=concurrency)
        else:
            arguments["start"] = refill(concurrency)
    if "task" in tables and clients is None:
        make, of_task = toml.decode_choice(TASKS, tables["task"], "task", call=False)
        task = make(**of_task)
        return {**arguments, "clients": len(task.clients), "examples": task.examples}
    return {**arguments, "clients": 100 * max(in_flight(arguments), arguments["buffer_size"]) if clients is None else clients}


def in_flight(arguments: Table) -> int:
    """About how many trips a timeline with these arguments has in flight."""
    start, timing = arguments["start"], arguments["timing"]
    if not isinstance(start, arrivals):
        return int(start.at_once())
    return math.ceil(start.concurrency or (start.rate or 0.0) * mean_duration(timing, 0, 1, Sizes()))


def _known_keys(tables: Table) -> None:
    known = dict.fromkeys(("algorithm", *Settings.__dataclass_fields__))
    for key, value in tables.items():
        if key == "compare":
            raise SettingsError("compare: this file holds several variants; use `fedbuff compare`, or remove [compare.…]")
        if key == "tune":
            raise SettingsError("tune: this file is for `fedbuff tune`, which writes a best.toml to run; or remove [tune]")
        if key not in known:
            raise SettingsError(f"{key} = {toml.show(value)}: unknown key; {toml.suggest(key, known)}")


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
    if not isinstance(spelled_out, dict):
        raise SettingsError(f"server = {toml.show(spelled_out)}: expected a table with {', '.join(SETTINGS)}")
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

SET_BY_PRESETS = frozenset({"proximal"})  # what presets change of the client
# keys whose table names one of several kinds: another kind replaces it instead of joining it
CHOICES = frozenset({"algorithm", "model", "optimizer", "split", "start", "task", "timing", "weigh"})


def read(path: Path) -> Table:
    """A settings file; paths in it are relative to it."""
    try:
        return _with_paths(tomllib.loads(path.read_text(encoding="utf-8")), path.parent)
    except OSError as e:
        raise SettingsError(f"{path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:  # no TOML, no text, a number of thousands of digits, thousands of brackets
        raise SettingsError(f"{path}: not TOML: {e}") from e


# which keys of which table are paths
_PATHS = {
    "python": ("file",),
    "leaf": ("folder",),
    "cifar10": ("data",),
    "celeba": ("data",),
    "sent140": ("data",),
    "hugging_face": ("train", "test"),
    "trace": ("path",),
}


def _with_paths(tables: Table, folder: Path) -> Table:
    """`tables` with absolute paths, so that they mean the same wherever they are written next."""
    found = {}
    for key, value in tables.items():
        if isinstance(value, dict):
            value = _with_paths(value, folder)
            for path in _PATHS.get(key, ()):
                if isinstance(value.get(path), str):
                    value[path] = str((folder / value[path]).resolve())
        found[key] = value
    return found


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
    except (ValueError, RecursionError):
        value = text.strip()
    for key in reversed(keys):
        value = {key: value}
    return layer(tables, _with_paths(value, Path()))


def layer(tables: Table, changes: Table) -> Table:
    """`merge`, but a change of algorithm also takes back what the tables say of the old one."""
    named, old = _preset_name(changes.get("algorithm")), _preset_name(tables.get("algorithm"))
    if named is not None and named != old:
        tables = {key: value for key, value in tables.items() if key not in ("algorithm", "server", "name")}
        if isinstance(tables.get("client"), dict):
            tables["client"] = {key: value for key, value in tables["client"].items() if key not in SET_BY_PRESETS}
    return merge(tables, changes)


def _preset_name(value: Any) -> str | None:
    return next(iter(value), None) if isinstance(value, dict) else value


def variants(tables: Table) -> dict[str, Table]:
    """The tables of each [compare.NAME], merged over the rest of the file."""
    common = {key: value for key, value in tables.items() if key != "compare"}
    named = tables["compare"]
    if not isinstance(named, dict) or not named or not all(isinstance(value, dict) for value in named.values()):
        raise SettingsError(f"compare = {toml.show(named)}: expected tables [compare.NAME], each with the settings that differ")
    return {name: {**layer(common, changes), "name": name} for name, changes in named.items()}
