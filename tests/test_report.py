"""The report as a file: what it says is what the runs did, nothing from outside is in it, and nothing in it can harm."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedbuff as fb
from fedbuff import cli, toml
from fedbuff.report import figures, groups, html, pages
from fedbuff.report.digest import _levels, active, curve, digest
from fedbuff.report.run import Run

HOSTILE = "</script><script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>\u2028&amp;\"'"


class Document(HTMLParser):
    """A page taken apart: the elements, the text of scripts, and the tables by name."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._open: list[str] = []
        self._name, self._row, self._cell = "", [""], ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.elements.append((tag, given))
        self._open.append(tag)
        self._name = given.get("data-table") or self._name
        if tag == "script":
            self.scripts.append("")
        if tag == "tr":
            self._row = []
        if tag in ("td", "th"):
            self._cell = ""

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass
        if tag in ("td", "th"):
            self._row.append(self._cell)
        if tag == "tr":
            self.tables.setdefault(self._name, []).append(self._row)

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        elif "style" not in self._open:
            self.text += data
            self._cell += data

    @property
    def figures(self) -> dict[str, object]:
        return json.loads(self.scripts[0])


@pytest.fixture(scope="module")
def report(run_folders: Path) -> Document:
    return Document(pages.report([run_folders]))


def runs(folder: Path, name: str) -> list[Run]:
    return [fb.load(path) for path in sorted(folder.glob(f"{name}-seed*"))]


# ── what it says ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_seeds_of_the_same_settings_are_one_group(report):
    assert report.figures["groups"] == [{"name": "FedAvg", "seeds": [0, 1]}, {"name": "FedBuff", "seeds": [0, 1, 2]}]


def test_runs_of_one_name_are_told_apart_by_what_differs(run_folders):
    one, two = (digest(run) for run in runs(run_folders, "FedBuff")[:2])
    changed = {**one.settings, "server": {**one.settings["server"], "buffer_size": 7}}
    found = groups.grouped([one, two, dataclasses.replace(one, settings=changed)])
    assert [(group.name, len(group.runs)) for group in found] == [
        ("FedBuff (buffer_size 4)", 2),
        ("FedBuff (buffer_size 7)", 1),
    ]


def test_a_run_that_is_there_twice_counts_once(run_folders):
    one, two = (digest(run) for run in runs(run_folders, "FedBuff")[:2])
    (group,) = groups.grouped([one, two, one])
    assert [d.summary["seed"] for d in group.runs] == [0, 1]


def test_runs_of_the_same_settings_on_other_data_are_no_seeds_of_each_other(run_folders):
    one, two = (digest(run) for run in runs(run_folders, "FedBuff")[:2])
    other = dataclasses.replace(two, summary={**two.summary, "task": "digits (subset: 9 images)"})
    names = [group.name for group in groups.grouped([one, other])]
    assert names == [f"FedBuff (data {one.summary['task']})", "FedBuff (data digits (subset: 9 images))"]


def test_groups_have_names_that_tell_them_apart_however_many_settings_differ(run_folders):
    one = digest(runs(run_folders, "FedBuff")[0])
    slow = {**one.settings, "client": {**one.settings["client"], "lr": 0.001}}
    far = {**one.settings, "server": {**one.settings["server"], "buffer_size": 7, "max_staleness": 9, "weight_by": "examples"}}
    names = [group.name for group in groups.grouped([dataclasses.replace(one, settings=s) for s in (one.settings, slow, far)])]
    assert len(set(names)) == 3
    assert not any("′" in name for name in names), names


def test_a_curve_has_every_evaluation_of_its_run(report, run_folders):
    for name, group in zip(("FedAvg", "FedBuff"), report.figures["curves"], strict=True):
        for drawn, run in zip(group, runs(run_folders, name), strict=True):
            assert drawn["trips"] == [m["trips"] for m in run.metrics]
            assert drawn["virtual_time"] == pytest.approx([m["virtual_time"] for m in run.metrics], rel=1e-4)
            assert drawn["test accuracy"] == pytest.approx([m["accuracy"] for m in run.metrics], rel=1e-4)


def test_histograms_count_what_the_trips_say(report, run_folders):
    for i, name in enumerate(("FedAvg", "FedBuff")):
        trips = [run.trips for run in runs(run_folders, name)]
        used = [t["outcome"] == "used" for t in trips]
        of = {
            key: np.concatenate([t[key][u] for t, u in zip(trips, used, strict=True)])
            for key in ("staleness", "weight", "examples")
        }
        for key, values in of.items():
            drawn = report.figures[key][i]
            edges = drawn["first"] + drawn["step"] * np.arange(len(drawn["counts"]) + 1)
            edges[-1] += drawn["step"] if not drawn["whole"] else 0  # the highest value belongs to the last bin
            assert drawn["counts"] == np.histogram(values + 1e-9, edges)[0].tolist(), (name, key)
            assert drawn["total"] == len(values)
            assert drawn["mean"] == pytest.approx(values.mean(), rel=1e-4)
        per_client = [np.unique(t["client"][u], return_counts=True)[1] for t, u in zip(trips, used, strict=True)]
        made_a_trip = sum(len(set(t["client"].tolist())) for t in trips)
        drawn = report.figures["participations"][i]
        assert drawn["total"] == made_a_trip
        assert drawn["mean"] == pytest.approx(sum(c.sum() for c in per_client) / made_a_trip, rel=1e-4)


def test_over_selection_shows_whom_it_loses(report, run_folders):
    """Clients with many examples are slow, and cancelled: behind the updates that were used, all trips."""
    over_selected, asynchronous = report.figures["examples"]
    assert sum(over_selected["behind"]) == sum(run.summary["trips"] for run in runs(run_folders, "FedAvg"))
    assert "behind" not in asynchronous or sum(asynchronous["behind"]) - sum(asynchronous["counts"]) < 12  # the last buffers
    shares = (
        np.array(over_selected["counts"]) / sum(over_selected["counts"]),
        np.array(over_selected["behind"]) / sum(over_selected["behind"]),
    )
    middles = np.arange(len(shares[0]))
    assert middles @ shares[0] < middles @ shares[1]


def test_the_summary_table_has_the_summaries(report, run_folders):
    header, fedavg, fedbuff = report.tables["summary"]
    assert "client trips to 40\N{NO-BREAK SPACE}%" in header
    reached = [run.summary["trips_to_target"] for run in runs(run_folders, "FedBuff")]
    cell = fedbuff[header.index("client trips to 40\N{NO-BREAK SPACE}%")]
    limit = np.mean(
        [r if r is not None else run.summary["trips"] for r, run in zip(reached, runs(run_folders, "FedBuff"), strict=True)]
    )
    assert cell.startswith(f"{limit:,.0f} ±" if None not in reached else f"> {limit:,.0f}")
    assert fedbuff[1].startswith("0, 1, 2")
    outcomes = np.concatenate([run.trips["outcome"] for run in runs(run_folders, "FedAvg")]).astype(str)
    assert f"{(outcomes == 'used').mean():.1%}" in fedavg[header.index("updates used")]
    assert f"{(outcomes == 'cancelled').sum()} cancelled" in fedavg[header.index("updates used")]


def test_settings_stand_side_by_side_and_what_differs_is_marked(report):
    rows = {row[0]: row[1:] for row in report.tables["differences"]}
    assert rows["server.buffer_size"] == ["20", "◆ 4"]
    assert rows["server.start.refill.concurrency"] == ["–", "◆ 20"]
    assert "seed" not in rows
    assert list(rows).index("server.start.cohort.size") + 3 >= list(rows).index("server.start.refill.concurrency")
    same = {row[0]: row[1] for row in report.tables["same"]}
    assert same["client.lr"] == "0.1"
    assert not set(same) & set(rows) - {""}


def test_privacy_and_cost_are_shown_if_a_run_has_them(run_folders, tmp_path, report):
    assert {"privacy", "cost"}.isdisjoint(report.tables)
    folder = tmp_path / "private"
    shutil.copytree(run_folders / "FedBuff-seed0", folder)
    summary = json.loads((folder / "summary.json").read_text())
    limits = "What it does not cover, in a paragraph of its own. " * 4
    summary |= {"privacy": {"epsilon": 3.25, "delta": 1e-5, "limits": limits}, "cost": {"up": {"bytes": 123456}}}
    (folder / "summary.json").write_text(json.dumps(summary))
    made = Document(pages.report([folder, run_folders / "FedAvg-seed0"]))
    assert made.tables["privacy"][1:] == [["epsilon", "3.25", "–"], ["delta", "1e-05", "–"]]
    assert made.tables["cost"][1:] == [["up.bytes", "123,456", "–"]]
    assert limits in made.text


def test_a_diverged_run_and_a_task_without_accuracy_are_shown_too(run_folders, tmp_path):
    run = fb.load(run_folders / "FedBuff-seed0")
    gone = [{**m, "loss": None if i > 5 else m["loss"]} for i, m in enumerate(run.metrics)]
    for m in gone:
        del m["accuracy"]
    summary = {
        **run.summary,
        "target": None,
        "metrics": {"test": {"loss": None}},
        "staleness_mean": None,
        "staleness_max": None,
    }
    shown = pages.view([digest(dataclasses.replace(run, metrics=gone, summary=summary))])
    assert shown.figures["metrics"] == ["test loss"]
    assert shown.figures["curves"][0][0]["test loss"][6] is None
    assert shown.figures["targets"] == []


def test_a_target_is_drawn_where_its_run_is_judged(run_folders):
    run = fb.load(run_folders / "FedBuff-seed0")
    other = dataclasses.replace(
        run,
        metrics=[{**m, "split": "validation"} for m in run.metrics],
        summary={**run.summary, "target": 0.125},
        settings={**run.settings, "name": "other"},
    )
    shown = pages.view([digest(run), digest(other)]).figures["targets"]
    assert {(t["metric"], t["value"]) for t in shown} == {
        (f"{run.metrics[0]['split']} accuracy", run.summary["target"]),
        ("validation accuracy", 0.125),
    }


def test_why_runs_stopped_is_said(report, run_folders):
    header, _, fedbuff = report.tables["summary"]
    assert fedbuff[header.index("took")].endswith("reached 480 trips")
    assert "diverged" not in report.text
    one, two, three = (digest(run) for run in runs(run_folders, "FedBuff"))
    why = "diverged: the loss is no longer finite; lower the learning rates"
    gone = dataclasses.replace(two, summary={**two.summary, "stopped_by": why})
    under_way = dataclasses.replace(three, summary={**three.summary, "stopped_by": None})
    made = Document(pages.runs_page(pages.view([one, gone, under_way]), "three"))
    assert made.tables["summary"][1][-1].endswith(
        "reached 480 trips (seed\N{NO-BREAK SPACE}0); diverged (seed\N{NO-BREAK SPACE}1)"
    )
    assert f"FedBuff, seed 1: {why}." in made.text


def test_without_evaluations_the_curves_say_so(run_folders):
    run = fb.load(run_folders / "FedBuff-seed0")
    none = digest(dataclasses.replace(run, metrics=[], summary={**run.summary, "metrics": {}}))
    assert "There were no evaluations" in Document(pages.runs_page(pages.view([none]), "none")).text
    some = pages.view([none, digest(fb.load(run_folders / "FedAvg-seed0"))])
    assert some.about_curves == ["Without evaluations: FedBuff."]


def test_curves_of_different_tasks_are_told_apart(run_folders, report):
    assert "different tasks" not in report.text
    one, two = (digest(fb.load(run_folders / f"{name}-seed0")) for name in ("FedBuff", "FedAvg"))
    other = dataclasses.replace(two, summary={**two.summary, "task": "digits"})
    made = Document(pages.runs_page(pages.view([one, other]), "both"))
    assert "different tasks, so their curves can’t be compared: FedBuff on synthetic; FedAvg on digits." in made.text


def test_a_long_name_is_not_said_in_every_cell(run_folders):
    first, second = (digest(fb.load(run_folders / f"{name}-seed0")) for name in ("FedAvg", "FedBuff"))
    reached = {f"{cost}_to_target": 100 for cost in ("trips", "server_steps", "virtual_time")}
    for name, said in (("FedAvg", "FedAvg’s"), ("FedAvg that over-selects by a third", "the first’s")):
        groups = [
            dataclasses.replace(first, summary={**first.summary, **reached, "algorithm": name}),
            dataclasses.replace(second, summary={**second.summary, **reached}),
        ]
        rows = Document(pages.runs_page(pages.view(groups), "both")).tables["summary"]
        assert rows[2][2] == f"1001.00\N{NO-BREAK SPACE}× {said}"


# ── active trips ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_with_refill_exactly_the_concurrency_is_active_all_the_time(run_folders):
    made = digest(fb.load(run_folders / "FedBuff-seed1")).active
    assert made["mean"] == pytest.approx([20.0] * 300)
    assert made["low"] == made["high"] == [20.0] * 300


def same_time(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.ones(n)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("start", "how"),
    [
        (fb.refill(20), {}),
        (fb.refill(20), {"timing": same_time}),
        (fb.refill(20), {"dropout": 0.4, "timeout": 1.5}),
        (fb.cohort(20), {"timing": same_time}),
        (fb.cohort(20), {"dropout": 0.4, "timeout": 1.5}),
        (fb.cohort(20, over_selection=0.3), {"dropout": 0.2}),
        (fb.cohort(20, poisson=True), {"dropout": 0.4}),
    ],
)
def test_trips_that_were_in_flight_at_the_end_are_drawn_as_they_were(start, how, seed):
    """Against the same timeline, followed further."""
    stopped, followed = cut_off(start, seed, **how)
    drawn, known = active(stopped), active(followed)
    for name in ("mean", "low", "high"):
        assert drawn[name] == pytest.approx(known[name], abs=1e-6), name


def test_clients_that_come_by_themselves_are_drawn_to_have_come_evenly():
    stopped, followed = cut_off(fb.arrivals(rate=20), 0, timing=same_time)
    assert active(stopped)["mean"] == pytest.approx(active(followed)["mean"], abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("start", [fb.refill(20), fb.cohort(20)])
def test_where_clients_are_lacking_no_more_trips_are_drawn_than_the_rule_allows(start, seed):
    stopped, followed = cut_off(start, seed, clients=30, availability=fb.windows(period=3.0, open=1.0), dropout=0.2)
    assert max(active(stopped)["high"]) <= 20
    assert active(stopped)["mean"] == pytest.approx(active(followed)["mean"], abs=4)


def cut_off(start: object, seed: int, clients: int = 200, **how: object) -> tuple[Run, Run]:
    """A run that stops between two ends, and the same with the rows that the trips in flight would have got."""
    t = fb.timeline(start=start, buffer_size=20, clients=clients, trips=2000, seed=seed, **how)
    until = float(np.sort(t.end_time)[700 + 3 * seed])
    steps = sum(t.end_time[t.server_step == step].max() <= until for step in range(1, t.server_step.max() + 1))
    summary = {"virtual_time": until, "server_steps": steps, "in_flight": 0}
    settings = {"server": {"start": toml.encode(start)}}
    ended, begun = t.end_time <= until, t.start_time <= until
    rows = {name: getattr(t, name) for name in t.__dataclass_fields__}
    rows["outcome"] = np.where(t.server_step > steps, "unused", t.outcome)
    stopped = {name: column[ended] for name, column in rows.items()}
    in_flight = {**summary, "in_flight": int((begun & ~ended).sum())}
    followed = {name: column[begun] for name, column in rows.items()}
    return Run(in_flight, [], stopped, settings, {}), Run(summary, [], followed, settings, {})


def test_active_trips_are_those_that_have_started_and_not_ended(run_folders):
    """Against a plain count of the rows, long before the end, where no trip lacks its row."""
    run = fb.load(run_folders / "FedAvg-seed0")
    drawn = active(run, slices=97)
    start, end = run.trips["start_time"], run.trips["end_time"]
    for i in range(60):
        for t in np.linspace(drawn["time"][i], drawn["time"][i + 1], 7)[1:-1]:
            assert drawn["low"][i] <= ((start <= t) & (t < end)).sum() <= drawn["high"][i]
        low, high = drawn["time"][i], drawn["time"][i + 1]
        total = np.clip(np.minimum(end, high) - np.maximum(start, low), 0, None).sum()
        assert drawn["mean"][i] == pytest.approx(total / (high - low))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(-3, 3)), min_size=1, max_size=30, unique_by=lambda step: step[0]))
def test_levels_are_those_of_the_step_function(steps):
    steps = sorted(steps)
    moments, level = np.array([m for m, _ in steps], float), np.array([v for _, v in steps], float)
    edges = np.array([0.0, 7.0, 20.5, 41.0])
    made = _levels(moments, level, edges)
    grid = np.arange(0, 41, 0.25)
    values = np.array([level[moments <= t][-1] if (moments <= t).any() else 0.0 for t in grid])
    for i in range(3):
        inside = (grid >= edges[i]) & (grid < edges[i + 1])
        assert made["mean"][i] == pytest.approx(values[inside].mean(), abs=1e-9)
        assert (made["low"][i], made["high"][i]) == (values[inside].min(), values[inside].max())


# ── small, whatever the runs ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_of_600_000_trips_makes_a_small_file():
    t = fb.timeline(start=fb.refill(1000), buffer_size=10, clients=5000, trips=600_000, seed=0)
    trips = {name: getattr(t, name) for name in t.__dataclass_fields__}
    metrics = [
        {"trips": i, "server_steps": i // 10, "virtual_time": i / 1000, "split": "test", "loss": 1 / (1 + i), "accuracy": 0.5}
        for i in range(0, 600_000, 100)
    ]
    summary = {"algorithm": "FedBuff", "task": "t", "seed": 0, "in_flight": 1000, "target": 0.6, "staleness_mean": 1.0}
    summary |= {
        f"{cost}{end}": None if end else metrics[-1][cost]
        for cost in ("trips", "server_steps", "virtual_time")
        for end in ("", "_to_target")
    }
    summary |= {"metrics": {"test": {"accuracy": 0.5}}, "staleness_max": 9, "wall_seconds": 1.0}
    settings = {"name": "FedBuff", "seed": 0, "server": {"start": {"refill": {"concurrency": 1000}}}}
    made = pages.runs_page(pages.view([digest(Run(summary, metrics, trips, settings, {}))]), "large")
    assert len(made.encode()) < 200_000


@given(st.lists(st.floats(0, 1) | st.none(), min_size=1, max_size=400), st.integers(20, 100))
def test_thinning_keeps_the_ends_the_extremes_and_the_first_at_the_target(values, points):
    metrics = [
        {"trips": i, "server_steps": i, "virtual_time": i / 2, "split": "test", "loss": 1.0, "accuracy": v}
        for i, v in enumerate(values)
    ]
    made = curve(metrics, 0.7, points)
    assert len(made["trips"]) <= 2 * points + 3
    assert {0, len(values) - 1} <= set(made["trips"])
    assert made["trips"] == sorted(set(made["trips"]))
    assert all(values[i] == v for i, v in zip(made["trips"], made["test accuracy"], strict=True))
    finite = [v for v in values if v is not None]
    if finite:
        assert {min(finite), max(finite)} <= set(made["test accuracy"])
    at_target = [i for i, v in enumerate(values) if v is not None and v >= 0.7]
    assert set(at_target[:1]) <= set(made["trips"])


@given(st.dictionaries(st.integers(0, 100_000), st.integers(1, 1000), min_size=1, max_size=60))
def test_every_count_is_in_one_bin_that_holds_its_value(counts):
    made = figures._histogram(counts)
    assert len(made["counts"]) <= 40
    assert sum(made["counts"]) == sum(counts.values()) == made["total"]
    for i, count in enumerate(made["counts"]):
        low = made["first"] + i * made["step"]
        assert count == sum(n for value, n in counts.items() if low <= value < low + made["step"])


@given(st.dictionaries(st.floats(0, 50) | st.floats(0, 1e300), st.integers(1, 1000), min_size=1, max_size=60))
def test_weights_are_in_at_most_twenty_bins_from_zero(counts):
    made = figures._histogram(counts, whole=False)
    assert made["first"] == 0
    assert len(made["counts"]) <= 20
    assert sum(made["counts"]) == sum(counts.values())
    assert made["step"] * len(made["counts"]) >= max(counts) * (1 - 1e-6)


# ── a file on its own ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_needs_nothing_from_outside(report, run_folders):
    for tag, attributes in report.elements:
        for key in ("src", "href", "srcset", "data"):
            assert (attributes.get(key) or "data:").startswith("data:"), (tag, attributes)
    text = pages.report([run_folders])
    assert not re.findall(r"@import|url\((?!#)(?!['\"]?data:)(?!#\$)", text.replace("url(#${clip})", ""))
    policy = next(a["content"] for tag, a in report.elements if tag == "meta" and a.get("http-equiv"))
    assert "default-src 'none'" in policy


def test_the_same_runs_make_the_same_bytes(run_folders):
    assert pages.report([run_folders]) == pages.report([run_folders])


def test_a_comparison_keeps_its_own_order_and_a_run_given_twice_is_shown_once(run_folders, tmp_path):
    folder = tmp_path / "both"
    shutil.copytree(run_folders, folder)
    (folder / "comparison.json").write_text(json.dumps([{"name": "FedBuff"}, {"name": "FedAvg"}]))
    found = pages.run_folders([folder, folder / "FedBuff-seed0"])
    assert [path.name for path in found] == ["FedBuff-seed0", "FedBuff-seed1", "FedBuff-seed2", "FedAvg-seed0", "FedAvg-seed1"]


def test_what_a_run_is_called_can_do_no_harm(run_folders, tmp_path):
    made = Document(pages.report([hostile(run_folders, tmp_path)], title=HOSTILE))
    assert [tag for tag, _ in made.elements].count("script") == 2
    assert "img" not in [tag for tag, _ in made.elements]
    assert made.figures["groups"][0]["name"] == HOSTILE
    assert HOSTILE in made.text
    assert HOSTILE in made.tables["same"][-1][1] + "".join(row[1] for row in made.tables["same"]).replace('\\"', '"')


def hostile(run_folders: Path, tmp_path: Path) -> Path:
    """A copy of a run whose every name is an attack."""
    folder = tmp_path / "hostile <b>&"
    shutil.copytree(run_folders / "FedBuff-seed0", folder)
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"algorithm": HOSTILE, "task": HOSTILE, "privacy": {HOSTILE: HOSTILE}}
    (folder / "summary.json").write_text(json.dumps(summary))
    tables = fb.load(folder).settings
    (folder / "settings.toml").write_text(toml.dumps({**tables, "name": HOSTILE, "task": {"python": {"object": HOSTILE}}}))
    return folder


@given(st.text(), st.text(), st.text())
def test_blocks_for_other_pages_take_any_text(title, heading, cell):
    made = html.page(
        title, [html.section("x", heading, html.table(["", heading], [[cell, cell]], name="t"), html.paragraph(cell))]
    )
    taken = Document(made)
    assert [tag for tag, _ in taken.elements if tag in ("script", "table", "section", "p")] == [
        "section",
        "table",
        "p",
        "script",
    ]
    shown = cell.replace("\r\n", "\n").replace("\r", "\n")
    assert taken.tables["t"][1][0].replace("\r\n", "\n").replace("\r", "\n").replace("\x00", "\ufffd") == shown.replace(
        "\x00", "\ufffd"
    )


def test_a_picture_is_embedded_so_that_its_styles_stay_its_own():
    made = html.figure("<svg xmlns='http://www.w3.org/2000/svg'><style>*{fill:red}</style></svg>", 'a "picture"')
    assert "<style>" not in made
    assert 'alt="a &quot;picture&quot;"' in made


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_fedbuff_report_writes_one_file(run_folders, fedbuff, tmp_path):
    done = fedbuff("report", run_folders, "-o", tmp_path / "deep" / "page.html", "--title", "Two")
    assert "page.html" in done.stdout
    assert (tmp_path / "deep" / "page.html").read_text() == pages.report([run_folders], "Two")
    fedbuff("report", run_folders / "FedBuff-seed0")
    assert "<title>FedBuff-seed0</title>" in (tmp_path / "report.html").read_text()


def test_a_report_into_a_pipe_leaves_the_pipe(run_folders, tmp_path, capsys):
    os.mkfifo(pipe := tmp_path / "pipe")
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link"):
        with ThreadPoolExecutor() as reader:
            read = reader.submit(subprocess.run, ["timeout", "20", "cat", str(pipe)], capture_output=True)
            assert cli.main(["report", str(run_folders), "-o", str(path), "--title", "Two"]) == 0
            assert pipe.is_fifo()
            assert read.result().stdout.decode() == pages.report([run_folders], "Two")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe"]
    assert (tmp_path / "link").is_symlink()


def test_a_report_goes_where_a_link_points_and_not_in_its_place(run_folders, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    for name in ("folder", "page.html"):
        (tmp_path / f"to {name}").symlink_to(name)
    assert cli.main(["report", str(run_folders), "-o", str(tmp_path / "to folder")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said == f"fedbuff: can't write {tmp_path}/to folder: Is a directory; what was there before is still whole"
    assert cli.main(["report", str(run_folders), "-o", str(tmp_path / "to page.html")]) == 0
    assert all((tmp_path / name).is_symlink() for name in ("to folder", "to page.html"))
    assert (tmp_path / "page.html").read_text() == pages.report([run_folders])


def test_what_is_not_a_run_is_one_line(run_folders, fedbuff, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "unfinished" / "a").mkdir(parents=True)
    shutil.copy(run_folders / "FedBuff-seed0" / "settings.toml", tmp_path / "unfinished" / "a")
    (tmp_path / "file").touch()
    for name, complaint in {
        "nothing": "nothing does not exist",
        "file": "file is a file, not a run folder",
        "empty": "empty is neither a run folder nor a folder of runs",
        "unfinished": "unfinished holds no finished run",
        "unfinished/a": "the run is not finished",
    }.items():
        done = fedbuff("report", run_folders, name, "-o", "r.html", code=2)
        assert complaint in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "r.html").exists()


def test_an_unfinished_run_among_others_is_left_out_and_said(run_folders, fedbuff, tmp_path):
    shutil.copytree(run_folders, tmp_path / "both")
    (tmp_path / "both" / "FedAvg-seed1" / "summary.json").unlink()
    done = fedbuff("report", "both")
    assert "FedAvg-seed1 is not finished and left out" in done.stderr
    assert '"FedAvg","seeds":[0]' in (tmp_path / "report.html").read_text()


def with_values(**changed: object) -> Callable[[Path], None]:
    """Change values of a JSON file."""
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def with_text(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def with_column(name: str, values: object) -> Callable[[Path], None]:
    """Change a column of trips.parquet, or leave it out."""

    def change(path: Path) -> None:
        table = pq.read_table(path).drop_columns([name])
        pq.write_table(table if values is None else table.append_column(name, pa.array([values] * len(table))), path)

    return change


EVALUATION = '{"trips": 0, "server_steps": 0, "virtual_time": 0.0, "split": "test", "accuracy": %s}\n'


@pytest.mark.parametrize(
    ("file", "damage", "complaint"),
    [
        ("summary.json", with_text("{}"), "there is no algorithm"),
        ("summary.json", with_text("[]"), "expected a JSON object, found []"),
        ("summary.json", cut, "Expecting"),
        ("summary.json", with_values(trips="x"), 'trips = "x": expected a count'),
        ("summary.json", with_values(in_flight=-1), "in_flight = -1: expected a count"),
        ("summary.json", with_values(virtual_time=float("nan")), "virtual_time = NaN: expected a number"),
        ("summary.json", with_values(wall_seconds=None), "wall_seconds = null: expected a number"),
        ("summary.json", with_values(target=True), "target = true: expected a number or null"),
        ("summary.json", with_values(task=3), "task = 3: expected text"),
        ("summary.json", with_values(metrics={"test": 1}), "test = 1: expected a table"),
        ("summary.json", with_values(metrics={"test": {"accuracy": "x"}}), 'accuracy = "x": expected a number or null'),
        ("metrics.jsonl", with_text('{"a": 1}\n'), "line 1: there is no split"),
        ("metrics.jsonl", with_text("[1]\n"), "line 1: expected a JSON object, found [1]"),
        (
            "metrics.jsonl",
            with_text(EVALUATION % 0.5 + EVALUATION % '"x"'),
            'line 2: accuracy = "x": expected a number or null',
        ),
        ("metrics.jsonl", with_text('{"split": "test"}'), "line 1: there is no trips"),
        ("metrics.jsonl", with_text(EVALUATION.replace("0.0", "null") % 1), "line 1: virtual_time = null: expected a number"),
        ("metrics.jsonl", cut, "line 25: "),
        ("metrics.jsonl", Path.unlink, "No such file"),
        ("settings.toml", with_text(""), "there is no table server.start"),
        ("settings.toml", with_text("server = 3"), "there is no table server.start"),
        ("settings.toml", with_text("server.start = 3"), "there is no table server.start"),
        ("settings.toml", with_text("[server]\nsta"), "Expected '='"),
        ("trips.parquet", with_column("staleness", None), "there is no column staleness"),
        ("trips.parquet", with_column("start_time", float("nan")), "column start_time: expected finite numbers only"),
        ("trips.parquet", with_column("client", "x"), "column client: expected finite numbers only"),
        ("trips.parquet", with_column("outcome", 1), "column outcome: expected text only"),
        ("trips.parquet", cut, "Parquet"),
        ("trips.parquet", Path.unlink, "there is no such file"),
        ("weights.safetensors", cut, "Error while deserializing"),
        ("weights.safetensors", Path.unlink, "No such file"),
    ],
)
def test_a_damaged_run_is_one_line_that_names_the_file(run_folders, tmp_path, capsys, file, damage, complaint):
    folder = tmp_path / "run"
    shutil.copytree(run_folders / "FedBuff-seed0", folder)
    damage(folder / file)
    for command in (["show", str(folder)], ["report", str(folder), "-o", str(tmp_path / "r.html")]):
        assert cli.main(command) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(f"fedbuff: {folder} is not a whole run: ")
        assert file in said.removeprefix(f"fedbuff: {folder} is not a whole run: ")
        assert complaint in said
    with pytest.raises(fb.FolderError):
        fb.load(folder)
    assert not (tmp_path / "r.html").exists()
