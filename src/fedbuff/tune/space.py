"""What a study searches: settings by their paths, each with a range of numbers or a list of them."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from typing import Any

from fedbuff import settings, toml
from fedbuff.core import check
from fedbuff.core.schedule import check_fits
from fedbuff.presets import PRESETS
from fedbuff.toml import SettingsError, Table


@dataclass(frozen=True)
class between:
    """Any number from `low` to `high`, on a logarithmic scale."""

    low: float
    high: float

    def __post_init__(self) -> None:
        check.number(0, above=True, low=self.low)
        check.number(self.low, above=True, high=self.high)


Space = Mapping[str, between | tuple[float, ...]]  # by the path of a setting, "client.lr"

BETA = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
MU = (0.001, 0.01, 0.1, 1.0)
# what a preset's own arguments may be; "paper": the ranges of the paper's appendix
RANGES: dict[str, dict[str, between | tuple[float, ...]]] = {
    "paper": {"client": between(1e-8, 1e4), "lr": between(1e-8, 1e4), "beta": BETA, "mu": MU},
    "narrow": {"client": between(1e-3, 1e1), "lr": between(1e-2, 1e2), "beta": BETA, "mu": MU},
    # for clients that take one local step: then only η_l · η_g matters, and μ does nothing
    "one-step": {"lr": between(0.3, 1e2), "beta": (0.0, 0.3, 0.6, 0.9)},
}
METHOD = ("algorithm", "client", "server", "privacy", "secure_aggregation")  # may be searched; the rest is what is measured
CROWDS = ("concurrency", "size", "over_selection", "buffer_size")  # settings that need so many clients
_COMBINATIONS = 10_000  # of them are tried


def space_of(
    tables: Table, ranges: Mapping[str, between | tuple[float, ...]]
) -> tuple[dict[str, between | tuple[float, ...]], Table]:
    """What is searched, and the tables without [tune]: from [tune] if the file has one, else what its preset can be given,
    or its server's optimizer.

    >>> space_of({"algorithm": {"fedprox": {}}, "client": {"lr": 1.0}}, RANGES["paper"])[0].keys()
    dict_keys(['client.lr', 'algorithm.fedprox.lr', 'algorithm.fedprox.mu'])
    >>> server = {"start": {"refill": {"concurrency": 9}}, "buffer_size": 3, "optimizer": "momentum"}
    >>> space_of({"server": server, "client": {"lr": 1.0}}, RANGES["paper"])[0].keys()
    dict_keys(['client.lr', 'server.optimizer.momentum.lr', 'server.optimizer.momentum.beta'])
    """
    rest = {key: value for key, value in tables.items() if key != "tune"}
    if "tune" in tables:
        return {path: searched(path, value) for path, value in flat(tables["tune"])}, rest
    path, own = _tunable(tables)
    found = {f"{path}.{key}": ranges[key] for key in ("lr", "beta", "mu") if key in own and key in ranges}
    return ({"client.lr": ranges["client"]} if "client" in ranges else {}) | found, rest


def _tunable(tables: Table) -> tuple[str, Container[str]]:
    """What has learning rates, by its path, and what it can be given: the preset, or the server's optimizer."""
    if "algorithm" not in tables and isinstance(tables.get("server"), dict):
        optimizer = toml.decode(settings.ServerSettings, tables["server"], "server").optimizer
        return f"server.optimizer.{type(optimizer).__name__}", toml.fields_of(optimizer)
    named = tables.get("algorithm")
    name = next(iter(named), "") if isinstance(named, dict) else named
    if not name:
        raise SettingsError("tune: nothing to search; give a preset as [algorithm.NAME], or the ranges in [tune]")
    if name not in PRESETS:
        raise SettingsError(f"algorithm = {toml.show(name)}: unknown; {toml.suggest(str(name), PRESETS)}")
    return f"algorithm.{name}", toml.parameters(PRESETS[name])


def flat(table: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of [tune], by their paths: lists, and tables of low and high."""
    if not isinstance(table, dict) or not table:
        at = f"tune.{path}" if path else "tune"
        raise SettingsError(f"{at} = {toml.show(table)}: expected a list of numbers, or {{low = …, high = …}}, by setting")
    for key, value in table.items():
        at = f"{path}.{key}" if path else key
        if isinstance(value, list) or (isinstance(value, dict) and {"low", "high"} & value.keys()):
            yield at, value
        else:
            yield from flat(value, at)


def searched(path: str, value: Any) -> between | tuple[float, ...]:
    if isinstance(value, dict):
        return toml.decode(between, value, f"tune.{path}")  # type: ignore[no-any-return]
    if not value or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in value):
        raise SettingsError(f"tune.{path} = {toml.show(value)}: expected a list of numbers")
    return tuple(value)


def check_space(tables: Table, space: Space) -> None:
    """Refuse what a trial would stumble over, or what would change what is measured, before anything starts."""
    values = {path: (where.low, where.high) if isinstance(where, between) else where for path, where in space.items()}
    drawn = tables  # with the first value of every range
    for path in space:
        _check_path(drawn, path)
        drawn = with_values(drawn, {path: values[path][0]})
    crowds = [path for path in space if path.rpartition(".")[2] in CROWDS]
    for path, value in [(each, value) for each in space for value in values[each]]:
        try:
            settings.from_tables(with_values(drawn, {path: value}))
        except SettingsError as e:
            hint = "; give a list of integers" if str(e).endswith("expected an integer") else ""
            raise SettingsError(f"tune: {e}{hint}") from e
    if crowds:
        clients = len(settings.from_tables(drawn).load_task().clients)
        check_clients(drawn, {path: values[path] for path in crowds}, clients)


def check_clients(tables: Table, values: Mapping[str, Sequence[float]], clients: int) -> None:
    """Refuse what needs more clients than there are, in whatever combination."""
    for chosen in islice(product(*values.values()), _COMBINATIONS):
        change = dict(zip(values, chosen, strict=True))
        try:
            server = settings.from_tables(with_values(tables, change)).server
            check_fits(server.start, server.buffer_size, clients)
        except ValueError as e:
            said = ", ".join(f"{path} = {toml.show(value)}" for path, value in change.items())
            raise SettingsError(f"tune.{said}: {e}") from e


def _check_path(tables: Table, path: str) -> None:
    """Refuse settings that are not the method's, and those of another kind than the tables have."""
    root, *inner = path.split(".")
    of_task = root == "task" and {"model", "arguments"} & set(inner)
    if root in settings.Settings.__dataclass_fields__ and root not in METHOD and not of_task:
        raise SettingsError(
            f"tune.{path}: can't be searched, it is part of what is measured; search {', '.join(METHOD)} or a task's model"
        )
    at: Any = tables
    for key, kind in pairwise([root, *inner]):
        at = at.get(key) if isinstance(at, dict) else None
        named = list(at) if isinstance(at, dict) else [at]
        if key in settings.CHOICES and at and kind not in named:
            raise SettingsError(f"tune.{path}: {key} is {toml.show(named[0])} here; search that one, or change the file")


def with_values(tables: Table, values: Mapping[str, float]) -> Table:
    """The settings of a trial."""
    for path, value in values.items():
        changes: Any = value
        for key in reversed(path.split(".")):
            changes = {key: changes}
        tables = settings.merge(tables, changes)
    return tables
