"""A run: what it did, read from its folder or straight from the simulator."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.report.files import FolderError

if TYPE_CHECKING:
    from fedbuff.core.trips import Trips
    from fedbuff.report.plot import Plot


def summarise(
    trips: "Trips",
    *,
    stopped_by: str | None,
    server_steps: int,
    virtual_time: float,
    wall_seconds: float,
    peak_memory_mb: float,
    metrics: list[dict[str, Any]],
    target: float | None,
    reached: Mapping[str, Any] | None,
    privacy: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What summary.json says of a run, simulated or served; `metrics` are those of its last evaluation, one for each split.

    reached   what it had cost when it was first at its target: trips, server_steps, virtual_time
    """
    from fedbuff.version import versions

    staleness, then = trips.staleness_used(), reached or {}
    return {
        "stopped_by": stopped_by,
        "trips": trips.ended,
        "in_flight": len(trips) - trips.ended,
        "server_steps": server_steps,
        "virtual_time": virtual_time,
        "wall_seconds": wall_seconds,
        "trips_per_second": trips.ended / wall_seconds,
        "peak_memory_mb": peak_memory_mb,
        "staleness_mean": float(staleness.mean()) if len(staleness) else None,
        "staleness_max": int(staleness.max()) if len(staleness) else None,
        "metrics": {m["split"]: {k: v for k, v in m.items() if k in ("loss", "accuracy")} for m in metrics},
        "target": target,
        "trips_to_target": then.get("trips"),
        "server_steps_to_target": then.get("server_steps"),
        "virtual_time_to_target": then.get("virtual_time"),
        **({"privacy": privacy} if privacy else {}),
        "versions": versions(),
    }


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run: `print(run)` says what it did, `run.plot("accuracy", against="trips")` draws it.

    summary    what summary.json holds
    metrics    one dict per evaluation and split, in order
    trips      one array per column of trips.parquet
    settings   the tables of settings.toml
    weights    final weights, one array per parameter of the model
    """

    summary: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    trips: Mapping[str, NDArray[Any]]
    settings: Mapping[str, Any]
    weights: Mapping[str, NDArray[np.floating]]
    folder: Path | None = None

    def __repr__(self) -> str:
        s = self.summary
        lines = [f"{s['algorithm']} on {s['task']}, seed {s['seed']}: {s['stopped_by']}"]
        rows = [
            ("trips", f"{s['trips']:,}"),
            ("server steps", f"{s['server_steps']:,}"),
            ("virtual time", f"{s['virtual_time']:.4g}"),
            (
                "staleness",
                "no update used"
                if s["staleness_mean"] is None
                else f"{s['staleness_mean']:.2f} on average, {s['staleness_max']} at most",
            ),
        ]
        if failed := int(np.count_nonzero(np.asarray(self.trips["outcome"]) == "failed")):
            rows.append(("refused", f"{failed:,} updates that were not finite; trips.parquet says whose"))
        for split, values in s["metrics"].items():
            rows.append((split, ", ".join(f"{name} {_number(value)}" for name, value in values.items())))
        if s["target"] is not None:
            reached = s["trips_to_target"]
            found = (
                "not reached" if reached is None else f"after {reached:,} trips, {s['server_steps_to_target']:,} server steps"
            )
            rows.append((f"accuracy {s['target']:g}", found))
        if privacy := s.get("privacy"):
            at_the_end = f", {privacy['epsilon_at_horizon']:.3g} after {privacy['horizon']:,} server steps"
            rows.append(
                ("epsilon", f"{privacy['epsilon']:.3g}{at_the_end}, delta {privacy['delta']:g} ({privacy['mechanism']})")
            )
        rows.append(("took", f"{s['wall_seconds']:.1f} s, {s['trips_per_second']:.0f} trips/s, {s['peak_memory_mb']:.0f} MB"))
        if self.folder is not None:
            rows.append(("folder", str(self.folder)))
        return "\n".join(lines + [f"  {name:<13} {value}" for name, value in rows])

    def plot(self, metric: str = "accuracy", against: str = "trips") -> "Plot":
        """The metric against "trips", "server_steps" or "virtual_time"; `.save("curve.svg")` writes it, and returns where."""
        from fedbuff.report.plot import curves

        return curves({self.summary["algorithm"]: [self]}, metric, against)


def load(folder: str | Path) -> Run:
    """A finished run from its folder."""
    from fedbuff.report.finished import check_one_run, read_metrics, read_settings, read_summary, read_trips, read_weights

    if not isinstance(folder, str | PathLike):
        raise ValueError(f"folder={folder!r}: expected the path of a run folder")
    path = Path(folder)
    if not (path / "summary.json").is_file():
        unfinished = "has no summary.json: the run is not finished (go on with --resume)"
        known = (path / "settings.toml").is_file()
        what = unfinished if known else "is not a run folder" if path.exists() else "does not exist"
        raise FolderError(f"{path} {what}")
    try:
        found = Run(
            summary=read_summary(path),
            metrics=read_metrics(path),
            trips=read_trips(path),
            settings=read_settings(path),
            weights=read_weights(path),
            folder=path,
        )
        check_one_run(found.summary, found.metrics, len(found.trips["trip"]))
        return found
    except (OSError, ValueError, RecursionError) as e:
        raise FolderError(f"{path} is not a whole run: {e}") from e


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
