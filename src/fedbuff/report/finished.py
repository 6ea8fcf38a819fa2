"""A finished run, read again from its folder: whatever is wrong with it is a ValueError that begins with the file's name."""

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedbuff import toml
from fedbuff.report.compare import COSTS

Arrays = dict[str, NDArray[Any]]
Parsed = TypeVar("Parsed")

# what others rely on in a finished run
_COLUMNS = (
    *("trip", "client", "examples", "start_time", "end_time", "start_version", "end_version"),
    *("staleness", "weight", "server_step", "outcome"),
)
_SUMMARY = {
    "text": ("algorithm", "task"),
    "a count": ("trips", "in_flight", "server_steps"),
    "a number": ("seed", "virtual_time", "wall_seconds", "trips_per_second", "peak_memory_mb"),
    "a number or null": ("target", "staleness_mean", "staleness_max", *(f"{cost}_to_target" for cost in COSTS)),
    "a table": ("metrics",),
}


def read_summary(path: Path) -> dict[str, Any]:
    return _read(path / "summary.json", _summary)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return _read(path / "metrics.jsonl", lambda text: [_evaluation(i, line) for i, line in enumerate(text.splitlines(), 1)])


def read_settings(path: Path) -> toml.Table:
    return _read(path / "settings.toml", _settings)


def read_trips(path: Path) -> Arrays:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not (path / "trips.parquet").is_file():
        raise ValueError("trips.parquet: there is no such file")
    try:
        table = pq.read_table(path / "trips.parquet")
        trips = {name: table[name].to_numpy() for name in table.column_names}
    except (OSError, pa.ArrowException) as e:
        raise ValueError(f"trips.parquet: {e}") from e
    for name in _COLUMNS:
        if name not in trips:
            raise ValueError(f"trips.parquet: there is no column {name}")
        what = "text" if name == "outcome" else "finite numbers"
        if not _all(trips[name], what):
            raise ValueError(f"trips.parquet: column {name}: expected {what} only")
    return trips


def read_weights(path: Path) -> Arrays:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return dict(load_file(path / "weights.safetensors"))
    except SafetensorError as e:
        raise ValueError(f"weights.safetensors: {e}") from e


def check_one_run(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], trips: int) -> None:
    """Refuse files of different runs, where that shows."""
    if trips != summary["trips"]:
        raise ValueError(f"trips.parquet: has {trips:,} trips, and summary.json says {summary['trips']:,}: of another run?")
    last = {m["split"]: m.get("loss") for m in metrics[-len(summary["metrics"]) :]} if summary["metrics"] else {}
    said = {split: values.get("loss") for split, values in summary["metrics"].items()}
    if last != said:
        raise ValueError("metrics.jsonl: does not end with the evaluation in summary.json: of another run?")


def _read(path: Path, parse: Callable[[str], Parsed]) -> Parsed:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path.name}: {e}") from e


def _summary(text: str) -> dict[str, Any]:
    summary = _object(text)
    for what, keys in _SUMMARY.items():
        _expect(summary, keys, what)
    for split, values in summary["metrics"].items():
        _expect(summary["metrics"], [split], "a table")
        _expect(values, values, "a number or null")
    return summary


def _evaluation(number: int, line: str) -> dict[str, Any]:
    try:
        found = _object(line)
        _expect(found, ["split"], "text")
        _expect(found, COSTS, "a number")
        _expect(found, [name for name in found if name != "split"], "a number or null")
    except ValueError as e:
        raise ValueError(f"line {number}: {getattr(e, 'msg', e)}") from e  # without JSON's own count of lines
    return found


def _settings(text: str) -> toml.Table:
    tables = tomllib.loads(text)
    server = tables.get("server")
    if not isinstance(server, dict) or not isinstance(server.get("start"), dict | str):  # text if it is a Python function
        raise ValueError("there is no table server.start")
    return tables


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {json.dumps(found)[:40]}")
    return found


def _expect(table: Mapping[str, Any], keys: Iterable[str], what: str) -> None:
    for key in keys:
        if key not in table:
            raise ValueError(f"there is no {key}")
        if not _fits(table[key], what):
            raise ValueError(f"{key} = {json.dumps(table[key])[:40]}: expected {what}")


def _fits(value: Any, what: str) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # which NaN is not
    return {
        "text": isinstance(value, str),
        "a count": number and isinstance(value, int) and value >= 0,
        "a number": number,
        "a number or null": number or value is None,
        "a table": isinstance(value, dict),
    }[what]


def _all(values: NDArray[Any], what: str) -> bool:
    if what == "text":
        return all(isinstance(value, str) for value in values.tolist())
    return values.dtype.kind in "iuf" and bool(np.isfinite(values).all())
