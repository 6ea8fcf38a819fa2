"""Draws docs/figures/trips.svg from a real timeline, so that the picture and the code can't disagree.

python docs/figures/trips.py
"""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

import fedbuff as fb

K, M, END = 3, 4, 2.75
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def draw() -> Figure:
    t = fb.timeline(start=fb.refill(M), buffer_size=K, timing=fb.uniform(0.3, 1.6), clients=20, trips=20, seed=1618)
    shown = [i for i in range(len(t.trip)) if t.start_time[i] < END]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.add_subplot()
    free_at = [0.0] * M
    for i in shown:
        lane = next(lane for lane in range(M) if free_at[lane] <= t.start_time[i] + 1e-12)
        free_at[lane] = t.end_time[i]
        colour = COLOURS[t.start_version[i] % len(COLOURS)]
        axes.barh(lane, t.end_time[i] - t.start_time[i], left=t.start_time[i], height=0.55, color=colour, edgecolor="white")
        if t.end_time[i] - t.start_time[i] > 0.25 and t.start_time[i] < 2.4:
            axes.annotate(
                f"client {t.client[i]}",
                (t.start_time[i] + 0.02, lane + 0.02),
                va="center",
                color="white",
                fontsize=7,
                clip_on=True,
            )
        if t.end_time[i] <= END:
            axes.plot(t.end_time[i], -1, "o", color=colour, markersize=6, clip_on=False)
            text = f"τ = {t.staleness[i]}\ns = {t.weight[i]:.2f}"
            axes.annotate(text, (t.end_time[i] + 0.01, -1.25), ha="left", va="top", fontsize=6.5, color="0.2")
            axes.plot([t.end_time[i]] * 2, [lane - 0.28, -1], color="0.75", linewidth=0.8, zorder=0)
    steps = sorted({int(v) for v in t.server_step if v > 0})
    for step in steps:
        when = max(t.end_time[i] for i in range(len(t.trip)) if t.server_step[i] == step)
        if when <= END:
            axes.axvline(when, color="0.2", linewidth=1, linestyle="--", zorder=0)
            axes.annotate(f"step {step}", (when, M - 0.35), ha="center", va="bottom", fontsize=8, color="0.2")
    axes.set_yticks([-1, *range(M)], ["buffer", *(f"slot {lane + 1}" for lane in range(M))])
    axes.set_ylim(-2.0, M - 0.1)
    axes.set_xlim(0, END)
    axes.set_xlabel("virtual time")
    axes.set_title(
        f"{M} trips in flight, a server step on every K = {K} updates; a colour is the version a trip started from", fontsize=9
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    return figure


if __name__ == "__main__":
    with mpl.rc_context({"svg.hashsalt": "fedbuff"}):
        draw().savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})
