"""Plots of runs, by matplotlib (extra `fedbuff[plot]`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbuff.report.compare import COSTS
from fedbuff.report.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by everyone
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


class Plot:
    """A figure that can be saved, as SVG, PNG or PDF by the file's ending; a notebook shows it by itself."""

    def __init__(self, figure: "Figure") -> None:
        self.figure = figure

    def save(self, path: str | Path) -> Path:
        """Write the figure and return where: to `path`, or to `path`.png if it has no ending."""
        import matplotlib as mpl

        path = Path(path)
        if path.is_dir():
            raise ValueError(f"{path}: is a folder; give the name of a file, e.g. {path / 'accuracy.svg'}")
        path = path if path.suffix else path.with_name(f"{path.name}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        # a fixed salt and no date: the same run draws the same file
        with mpl.rc_context({"svg.hashsalt": "fedbuff"}):
            self.figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        return path

    def _repr_png_(self) -> bytes:
        import io

        data = io.BytesIO()
        self.figure.savefig(data, format="png")
        return data.getvalue()


def curves(runs: Mapping[str, Sequence[Run]], metric: str = "accuracy", against: str = "trips") -> Plot:
    """One curve per name: the mean over its runs (seeds), with the range between the lowest and highest as a band."""
    if against not in COSTS:
        raise ValueError(f"against={against!r}: expected one of {', '.join(COSTS)}")
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ValueError("plots need matplotlib: pip install 'fedbuff[plot]'") from e
    figure = Figure(figsize=(7.2, 4.4), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    for i, (name, group) in enumerate(runs.items()):
        colour, style = COLOURS[i % len(COLOURS)], "-" if i < 4 else "--"  # dashes, as the fifth may lie on the fourth
        lines = [_line(run, metric, against) for run in group]
        x = np.unique(np.concatenate([xs for xs, _ in lines]))
        x = x[x <= max(xs[-1] for xs, _ in lines)]
        # a run that has stopped keeps its last value, so that the mean does not jump when one seed ends
        y = np.stack([np.interp(x, xs, ys) for xs, ys in lines])
        axes.plot(x, y.mean(0), color=colour, label=name, linewidth=1.8, linestyle=style)
        if len(lines) > 1:
            axes.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.15, linewidth=0)
    targets = {run.summary["target"] for group in runs.values() for run in group} - {None}
    if metric == "accuracy":
        for target in targets:
            axes.axhline(target, color="0.4", linewidth=1, linestyle="--")
            axes.annotate(
                f"target {target:g}", (0.995, target), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="0.3"
            )
    axes.set_xlabel(COSTS[against])
    axes.set_ylabel(f"{_split(runs)} {metric}")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(runs) > 1:
        axes.legend(frameon=False)
    return Plot(figure)


def _line(run: Run, metric: str, against: str) -> tuple[Any, Any]:
    split = run.metrics[0]["split"]
    rows = [m for m in run.metrics if m["split"] == split and isinstance(m.get(metric), int | float)]
    if not rows:
        raise ValueError(
            f"metric={metric!r}: the run recorded {', '.join(k for k in run.metrics[0] if k not in (*COSTS, 'split'))}"
        )
    return np.array([m[against] for m in rows], float), np.array([m[metric] for m in rows])


def _split(runs: Mapping[str, Sequence[Run]]) -> str:
    return str(next(iter(runs.values()))[0].metrics[0]["split"])
