"""Several runs side by side: what each needed to reach the target, over seeds."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any, Protocol

COSTS = {"trips": "client trips", "server_steps": "server steps", "virtual_time": "virtual time"}


class Summarised(Protocol):
    """A run, or what is left of it."""

    @property
    def summary(self) -> Mapping[str, Any]: ...


def comparison(runs: Mapping[str, Sequence[Summarised]]) -> list[dict[str, Any]]:
    """One row per name: mean and standard deviation over its runs; ratios are to the first name.

    A cost to target is None unless every run reached it: a mean over the lucky seeds would flatter.
    """
    rows: list[dict[str, Any]] = []
    for name, group in runs.items():
        summaries = [run.summary for run in group]
        row: dict[str, Any] = {"name": name, "seeds": [s["seed"] for s in summaries], "target": summaries[0]["target"]}
        row["task"] = ", ".join(dict.fromkeys(str(s["task"]) for s in summaries))
        row["reached"] = sum(s["trips_to_target"] is not None for s in summaries)
        for cost in COSTS:
            to_target = [s[f"{cost}_to_target"] for s in summaries]
            row[cost] = _spread(to_target) if None not in to_target else None
            # at least so much, even where the target was not reached
            row[f"{cost}_limit"] = mean(
                s[cost] if reached is None else reached for s, reached in zip(summaries, to_target, strict=True)
            )
        judged: list[dict[str, Any]] = [next(iter(s["metrics"].values()), {}) for s in summaries]  # empty without an evaluation
        row["accuracy"] = _spread([metrics.get("accuracy") for metrics in judged]) if "accuracy" in judged[0] else None
        row["staleness_mean"] = mean(s["staleness_mean"] or 0.0 for s in summaries)
        row["wall_seconds"] = mean(s["wall_seconds"] for s in summaries)
        base = rows[0] if rows else row
        alike = row["target"] == base["target"]
        row["ratio"] = {
            c: row[c]["mean"] / base[c]["mean"] if alike and row[c] and base[c] and base[c]["mean"] else None for c in COSTS
        }
        rows.append(row)
    return rows


def _spread(values: Sequence[float | None]) -> dict[str, float | None]:
    if any(v is None for v in values):
        return {"mean": None, "std": None}
    numbers = [float(v) for v in values if v is not None]
    return {"mean": mean(numbers), "std": stdev(numbers) if len(numbers) > 1 else None}


def cells(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table that people see."""
    targets = list(dict.fromkeys(r["target"] for r in rows))
    if targets == [None]:
        header = ["", "client trips", "server steps", "virtual time", "accuracy", "staleness"]
        body = [
            [
                r["name"],
                *(f"{r[f'{c}_limit']:,.0f}" for c in COSTS),
                _plus_minus(r["accuracy"], 3),
                f"{r['staleness_mean']:.1f}",
            ]
            for r in rows
        ]
        return header, body
    first = rows[0]["name"]
    to = "its target" if len(targets) > 1 else f"{100 * targets[0]:g} %"
    header = ["", *(f"{title} to {to}" for title in COSTS.values())]
    header += [f"{first}'s speed-up, by trips", "by virtual time", "staleness"]
    body = []
    for r in rows:
        own = "none" if r["target"] is None else f"{100 * r['target']:g} %"
        name = f"{r['name']} (target: {own})" if len(targets) > 1 else r["name"]
        costs = [_plus_minus(r[c], 1 if c == "virtual_time" else 0) if r[c] else f"> {r[f'{c}_limit']:,.0f}" for c in COSTS]
        costs = ["–"] * len(COSTS) if r["target"] is None else costs
        ratios = [_times(r, rows[0], c) if r["name"] != first else "" for c in ("trips", "virtual_time")]
        body.append([name, *costs, *ratios, f"{r['staleness_mean']:.1f}"])
    return header, body


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    return in_markdown(*cells(rows))


def in_markdown(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table of names and numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def on_what(rows: Sequence[Mapping[str, Any]]) -> str:
    """What was learned: the names of tasks, which say how much of a dataset there was."""
    return ", ".join(dict.fromkeys(row["task"] for row in rows))


def _plus_minus(spread: Mapping[str, float | None] | None, digits: int) -> str:
    if spread is None or spread["mean"] is None:
        return "–"
    return f"{spread['mean']:,.{digits}f}" + ("" if spread["std"] is None else f" ± {spread['std']:,.{digits}f}")


def _times(row: Mapping[str, Any], first: Mapping[str, Any], cost: str) -> str:
    """How many times the first's cost; only a bound if the target was not reached, nothing if the first did not get there."""
    if not first[cost] or not first[cost]["mean"] or row["target"] != first["target"]:
        return "–"
    return f"{row['ratio'][cost]:.2f} ×" if row[cost] else f"> {row[f'{cost}_limit'] / first[cost]['mean']:.2f} ×"
