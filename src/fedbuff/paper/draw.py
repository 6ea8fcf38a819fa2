"""Figures of one style: Okabe and Ito's colours, thin axes, nothing that is not data."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedbuff.report.plot import COLOURS, Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# one colour for one method in every figure
BY_METHOD = {"fedbuff": COLOURS[0], "fedavgm": COLOURS[1], "fedasync": COLOURS[2], "fedavg": COLOURS[3], "fedprox": COLOURS[4]}
OVER_SELECTION = COLOURS[4]


def panels(
    titles: Sequence[str], x: str | Sequence[str], y: str | Sequence[str], share_y: bool = False
) -> "tuple[Plot, list[Axes]]":
    """Panels side by side, each with its title; `x` and `y` name the axes, the same for all or one each."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ValueError("figures need matplotlib: pip install 'fedbuff[paper]'") from e
    n = len(titles)
    figure = Figure(figsize=(7.2 if n == 1 else 3.6 * n + 0.6, 4.0), layout="constrained", dpi=150)
    found: Any = figure.subplots(1, n, sharey=share_y, squeeze=False)[0]
    for i, (axes, title) in enumerate(zip(found, titles, strict=True)):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(x if isinstance(x, str) else x[i])
        if not share_y or i == 0:
            axes.set_ylabel(y if isinstance(y, str) else y[i])
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return Plot(figure), list(found)


def concurrencies(axes: "Axes", sweep: Sequence[int]) -> None:
    """A logarithmic axis of concurrency that shows just the values there are."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(sweep)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{m:,}" for m in sweep])
