"""`fedbuff paper`: its numbers are the paper's, its cells come from runs, and what was interrupted goes on."""

import copy
import json
import math
import re
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

import fedbuff as fb
from conftest import command
from fedbuff import toml
from fedbuff.core.starting import arrivals, cohort, refill
from fedbuff.learn.data import Data, data_of
from fedbuff.paper import (
    cells,
    experiments,
    fig_bias,
    fig_delays,
    fig_progress,
    methods,
    table1,
    table_delays,
    table_hyper,
    table_k,
    table_large_k,
    table_lrnorm,
    theorem,
)
from fedbuff.paper.datasets import DATASETS, DIGITS, SIZES, Dataset, aiming, quick
from fedbuff.paper.experiment import Ask
from fedbuff.paper.report import report
from fedbuff.paper.result import NOT_RUN, Number, Pair, differences, exceeds, lines, ratio
from fedbuff.paper.table_delays import TIMINGS
from fedbuff.paper.table_lrnorm import WEIGHTINGS
from fedbuff.paper.tuning import tune_method, within
from fedbuff.report.files import lock
from fedbuff.settings import from_tables
from fedbuff.toml import SettingsError
from fedbuff.tune.space import between

TINY = replace(
    DIGITS, task={"digits": {"clients": 120, "model": "linear"}}, target=0.3, concurrency=20, trips=600, sweep=(5, 20)
)


def ask(tmp_path: Path, dataset: Dataset = TINY, seeds: tuple[int, ...] = (0,), **how: bool) -> Ask:
    return Ask(dataset, tmp_path / "settings", seeds, **how)


def silent(line: str) -> None:
    pass


# ── the paper's numbers ──────────────────────────────────────────────────────────────────────────────────────────────

# rows of the paper's own LaTeX, word for word
TABLE1 = r"""
CelebA  & 90\%              & 31.9  & 37.1 (1.2$\times$)    & 104 (3.3$\times$) & 231 (8.5$\times$) & 228 (8.4$\times$)  \\
Sent140 & 69\%             & 124.7 & 308.9 (2.5$\times$) & 216 (1.7$\times$) & $>600$   & $ >600$    \\
CIFAR-10 & 60\%             & 67.5 & 73.3 (1.1$\times$) & 122.7 (1.8$\times$) & 386.7 (5.7$\times$) &  292.7 (4.3$\times$)    \\
"""
TABLE_K = r"""
        &   1                      & 32.4 $\pm$  2.0       \\
CelebA  &   10                     & 31.9 $\pm$  8.9         \\
        &   100                    & 71.6 $\pm$  6.8        \\
        &    1                      & 190.0   $\pm$  11.9      \\
Sent140 &   10                      & 124.7   $\pm$  25.8      \\
        &   100                     & 178.2   $\pm$  13.1        \\
        &    1                      & 76.7 $\pm$ 9.6    \\
CIFAR-10 &   10                     & 67.5 $\pm$ 7.4         \\
        &    100                    & 102.5 $\pm$ 2.0          \\
"""
TABLE_DELAYS = r"""
        &   Uniform           & 4.7$\times$                        & 1.6$\times$       \\
CelebA  &   Half-Normal       & 3.3$\times$                        & 1.2$\times$      \\
        &   Exponential       & 4.3$\times$                        & 1.1$\times$      \\
        &   Uniform             & 1.3$\times$                       &   1.2$\times$    \\
Sent140 &   Half-Normal         & 1.7$\times$                       &   2.5$\times$    \\
        &   Exponential         & 1.4$\times$                       &   2.0$\times$    \\
"""
TABLE_LARGE_K = r"""
        &   FedBuff ($K$=1000)             & 1000    & 124            & 124\\
CelebA  &   FedAvgM                        & 1000    & 446 (3.6$\times$)     & 104\\
        &   FedAvgM, over-selection        & 1300    & 155 (1.25$\times$)    & 135\\
        &   FedBuff ($K$=1000)             & 1000    & 228            & 228\\
Sent140 &   FedAvgM                        & 1000    & 927 (4.06$\times$)    & 216\\
        &   FedAvgM. over-selection    & 1300    & 322 (1.41$\times$)    & 281\\
"""
TABLE_LRNORM = r"""
        &   1                      & 20.8                       & 23.9                             & 20.7 \\
CelebA  &   10                     & 27.1                       & 25.5                             & 28.7 \\
        &   100                    & 57.6                       & 57.6                             & 54.4  \\
        &    1                      & 190.0                      & 201.9                            & 201.9  \\
Sent140 &   10                      & 124.7                      & 207.9                            & 136.6  \\
        &   100                     & 178.2                      & 570.3                            & 231.7 \\
"""
TABLE_HYPER = r"""
  & $\eta_{\ell}=4.7\cdot10^{-6}$ & $\eta_{\ell}=5.7$ &  $\eta_{\ell}=1.1\cdot10^{-1}$ & $\eta_{\ell}=1.0\cdot10^2$  & $\eta_{\ell}=4.9\cdot10^{-4}$ \\
CelebA  & $\eta_g=1.0\cdot10^{3}$  & $\eta_g=2.8\cdot10^{-3}$ & $\eta_g=2.4\cdot10^{-1}$ & $\eta_g=1.6\cdot10^{-3}$ & $\eta_g=1.0\cdot10^2$   \\
  & $\beta=3.0\cdot10^{-1}$ &  &  $\beta=8.3\cdot10^{-1}$ &  & $\mu=1.0\cdot10^{-2}$   \\
  & $\eta_{\ell}=1.3\cdot10^1$ & $\eta_{\ell}=1.7\cdot10^1$ &  $\eta_{\ell}=1.5$ & $\eta_{\ell}=2.6\cdot10^{-3}$  & $\eta_{\ell}=2.0\cdot10^{-3}$ \\
Sent140  & $\eta_g=4.9\cdot10^{-2}$  & $\eta_g=1.5\cdot10^{-2}$ & $\eta_g=3.4\cdot10^{-1}$ & $\eta_g=1.0\cdot10^3$ & $\eta_g=1.0^3$   \\
  & $\beta=5.0\cdot10^{-1}$ &  &  $\beta=9.0\cdot10^{-1}$ &  & $\mu=1.0\cdot10^{-3}$   \\
  & $\eta_{\ell}=1.95\cdot10^{-4}$  & $\eta_{\ell}=1.0\cdot10^{2}$  & $\eta_{\ell}=1.0\cdot10^1$  & $\eta_{\ell}=1.0\cdot10^1$  & $\eta_{\ell}=1.0\cdot10^1$  \\
CIFAR-10  & $\eta_g=4.09\cdot10^1$ & $\eta_g=6.4\cdot10^{-5}$ & $\eta_g=1.02\cdot10^{-3}$ & $\eta_g=1.02\cdot10^{-3}$ & $\eta_g=1.02\cdot10^{-3}$ \\
& $\beta=0$ & & $\beta=9.0\cdot10^{-1}$  &  & $\mu=1.0\cdot10^{-3}$ \\
"""  # noqa: E501
ORDER = ("celeba", "sent140", "cifar10")


def rows(latex: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.rstrip("\\ ").split("&")] for line in latex.strip().splitlines()]


def numbers(cell: str) -> list[float]:
    """1.0\\cdot10^{-3} is one number; what is in brackets is derived."""
    cell = re.sub(r"\(.*?\)", "", cell)
    cell = re.sub(r"\\cdot10\^\{?(-?\d+)\}?", r"e\1", cell).replace("1.0^3", "1.0e3")
    return [float(x) for x in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", cell)]


def test_table1_holds_the_papers_numbers():
    for name, row in zip(ORDER, rows(TABLE1), strict=True):
        theirs = [None if ">" in cell else numbers(cell)[0] for cell in row[2:]]
        assert theirs == [table1.PAPER[name][method] for method in ("fedbuff", "fedasync", "fedavgm", "fedavg", "fedprox")]


def test_table_k_holds_the_papers_numbers():
    for i, row in enumerate(rows(TABLE_K)):
        assert tuple(numbers(row[2])) == table_k.PAPER[ORDER[i // 3]][int(row[1])]


def test_table_delays_holds_the_papers_numbers():
    for i, row in enumerate(rows(TABLE_DELAYS)):
        assert tuple(numbers(cell)[0] for cell in row[2:]) == table_delays.PAPER[ORDER[i // 3]][row[1].lower()]


def test_table_large_k_holds_the_papers_numbers():
    for i, row in enumerate(rows(TABLE_LARGE_K)):
        method = list(table_large_k.TITLES)[i % 3]
        assert tuple(numbers(cell)[0] for cell in row[3:]) == table_large_k.PAPER[ORDER[i // 3]][method]


def test_table_lrnorm_holds_the_papers_numbers():
    for i, row in enumerate(rows(TABLE_LRNORM)):
        assert tuple(numbers(cell)[0] for cell in row[2:]) == table_lrnorm.PAPER[ORDER[i // 3]][int(row[1])]


def test_table_hyper_holds_the_papers_numbers():
    found = rows(TABLE_HYPER)
    for i, name in enumerate(ORDER):
        client, server, extra = found[3 * i : 3 * i + 3]
        for j, method in enumerate(("fedbuff", "fedasync", "fedavgm", "fedavg", "fedprox"), 1):
            ours = table_hyper.PAPER[name][method]
            assert [ours.client, ours.server] == [numbers(client[j])[0], numbers(server[j])[0]]
            theirs = numbers(extra[j].replace(r"\beta=", "").replace(r"\mu=", ""))
            assert [x for x in (ours.beta, ours.mu) if x is not None] == theirs


# ── cells ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cell_is_run_once(tmp_path):
    tables = ask(tmp_path).tables("fedbuff")
    said = []
    first = cells.measure(tables, 0, tmp_path, ask(tmp_path).data, workers=1, say=said.append)
    shutil.rmtree(tmp_path / "runs")  # all that a table needs is in the cell
    again = cells.measure(tables, 0, tmp_path, ask(tmp_path).data, workers=1, say=said.append)
    assert again == first
    assert len(said) == 1
    assert not (tmp_path / "runs").exists()
    assert len(list((tmp_path / "cells").iterdir())) == 1


def test_a_cell_that_another_process_runs_is_left_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "_LOOK_AGAIN", 0.0)
    asked, said = ask(tmp_path), []
    tables = asked.tables("fedbuff")
    theirs = cells.folder(cells.where(from_tables({**tables, "seed": 0}), tmp_path), asked.data)
    theirs.mkdir(parents=True)
    held = lock(theirs)

    def say(text):
        said.append(text)
        if "waiting" in text:
            held.close()  # it was killed, and its run goes on here

    found = cells.measure_all([(tables, 0), (tables, 1)], tmp_path, asked.data, say, workers=1)
    assert [cell.seed for cell in found] == [0, 1]
    assert ["seed1" in said[0], f"{theirs} is in use by another process: waiting" in said[1], "seed0" in said[2]] == [True] * 3
    assert len(said) == 3


def test_clients_of_asynchronous_methods_arrive_as_in_the_paper(tmp_path):
    starts = {m: from_tables({**ask(tmp_path).tables(m, concurrency=50), "seed": 0}).server.start for m in methods.TITLES}
    assert starts["fedbuff"] == starts["fedasync"] == arrivals(concurrency=50)
    assert starts["fedavgm"] == starts["fedavg"] == starts["fedprox"] == cohort(50)


def test_other_settings_and_seeds_are_other_cells(tmp_path):
    asked = ask(tmp_path)
    made = [asked.tables("fedbuff"), asked.tables("fedbuff", buffer_size=5), asked.tables("fedavgm"), asked.tables("fedavg")]
    made += [asked.tables("fedavgm", over_selection=0.3), asked.tables("fedbuff", timing={"uniform": {}})]
    where = {cells.where(experiments.from_tables({**tables, "seed": seed}), tmp_path) for tables in made for seed in (0, 1)}
    assert len(where) == 2 * len(made)


def test_a_setting_that_comes_anew_leaves_kept_cells_their_names():
    """Else hours of runs would be asked for again, and interrupted ones could not go on."""
    kept = sorted((Path(__file__).parents[1] / "results" / "paper" / "cells").glob("*.json"))
    one_of_each = {path.name.rsplit("-", 2)[0]: path for path in kept}.values()
    assert len(one_of_each) > 5
    for path in one_of_each:
        cell = json.loads(path.read_text())
        assert cells.where(from_tables({**cell["settings"], "seed": cell["seed"]}), Path()).name == path.name


def test_a_cell_of_other_data_is_refused(tmp_path):
    asked, tables = ask(tmp_path), ask(tmp_path).tables("fedbuff")
    cells.measure(tables, 0, tmp_path, asked.data, workers=1, say=silent)
    task = asked.dataset.load()
    x, y = task.clients[0]
    relabelled = data_of(replace(task, clients=[(x, (y + 1) % 10), *list(task.clients)[1:]]))
    assert (relabelled.name, relabelled.sizes) == (asked.data.name, asked.data.sizes)
    (split, (x, y)), *others = task.splits.items()
    judged_otherwise = data_of(replace(task, evaluate={split: (x, (y + 1) % 10), **dict(others)}))
    assert judged_otherwise.digest == asked.data.digest
    for other in (relabelled, judged_otherwise, asked.data._replace(name="digits (subset: 7 images)")):
        with pytest.raises(fb.FolderError, match=r"other data \(.*\) than what is at hand"):
            cells.measure(tables, 0, tmp_path, other)
    path = next((tmp_path / "cells").iterdir())
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in kept.items() if key not in ("data", "held_out")}))
    assert cells.measure(tables, 0, tmp_path, asked.data).summary == kept["summary"], "the earliest cells do not say"


def test_a_cell_is_the_run_of_its_settings(tmp_path):
    cell = cells.measure(ask(tmp_path).tables("fedavgm"), 3, tmp_path, ask(tmp_path).data, workers=1, say=silent)
    task = fb.tasks.digits(clients=120, model=fb.models.linear())
    rates = methods.UNTUNED["digits"]["fedavgm"]
    server, client = fb.presets.fedavgm(
        fb.LocalSGD(lr=rates.client, lr_norm=True), concurrency=20, lr=rates.server, beta=rates.beta
    )
    run = fb.simulate(
        server, task, client=client, until=fb.accuracy(0.3) | fb.trips(600), evaluate_every=100, seed=3, workers=1
    )
    assert cell.to_target("trips") == run.summary["trips_to_target"]
    assert cell.curve["accuracy"] == [m["accuracy"] for m in run.metrics]


def test_a_mean_is_over_all_seeds_or_a_bound():
    def cell(reached: int | None) -> cells.Cell:
        return cells.Cell({}, 0, {"trips_to_target": reached, "trips": 600}, {})

    assert cells.to_target([cell(100), cell(200)], "trips") == Number(150, math.sqrt(5000))
    assert cells.to_target([cell(100)], "trips") == Number(100)
    assert cells.to_target([cell(100), cell(None)], "trips") == Number(350, bound=True)


def test_methods_are_compared_over_the_seeds_that_both_have():
    def some(**reached):
        return [cells.Cell({}, int(seed[1:]), {"trips_to_target": n, "trips": 600}, {}) for seed, n in reached.items()]

    assert cells.times(some(s0=300), some(s0=100, s1=50, s2=20), "trips") == Number(3)
    assert cells.times(some(s0=300, s2=60), some(s2=20, s0=100), "trips") == Number(3)
    assert cells.times(some(s0=None), some(s0=100), "trips") == Number(6, bound=True)
    assert cells.times(some(s0=300), some(s1=100), "trips") is None
    assert cells.times([], some(s1=100), "trips") is None


def test_each_k_is_tuned_with_its_tables_staleness_weights_from_what_comes_nearest(tmp_path, monkeypatch):
    digits, asked, first = DATASETS["digits"], {}, []
    folder = tmp_path / "settings" / "digits"
    folder.mkdir(parents=True)
    for method, lr in (("fedbuff", 2.0), ("fedavgm", 5.0)):
        (folder / f"{method}.toml").write_text(f"[algorithm.{method}]\nlr = {lr}\nbeta = 0.3\n[client]\nlr = 0.25\n")

    def study(tables, *_, **how):
        asked.update(tables)
        first[:] = [guess["algorithm.fedbuff.lr"] for guess in how["first"]]
        return {"best": None, "trials": 1}

    monkeypatch.setattr("fedbuff.paper.tuning.tune", study)
    for k, a, guess, client in ((digits.concurrency, 10.0, 5.0, 0.25), (40, 0.5, 4.0, 0.25), (methods.K, 0.5, 0.96, 5.0)):
        with pytest.raises(ValueError, match="all 1 trials were given up"):
            tune_method(digits, "fedbuff", tmp_path, buffer_size=k)
        assert (asked["algorithm"]["fedbuff"]["buffer_size"], asked["algorithm"]["fedbuff"]["a"]) == (k, a)
        assert first == pytest.approx([guess, guess / 3, guess * 3])
        assert asked["client"]["lr"] == client
    assert table_large_k.cells(ask(tmp_path))["fedbuff"]["algorithm"]["fedbuff"]["a"] == 10.0


def test_tuned_settings_go_before_untuned_ones(tmp_path):
    folder = tmp_path / "settings" / "digits"
    folder.mkdir(parents=True)
    (folder / "fedbuff.toml").write_text("[algorithm.fedbuff]\nlr = 2.0\nbeta = 0.3\n[client]\nlr = 0.5\n[study]\ntrials = 3\n")
    asked = ask(tmp_path)
    assert asked.tables("fedbuff")["algorithm"]["fedbuff"]["lr"] == 2.0
    assert asked.tables("fedbuff", buffer_size=40)["algorithm"]["fedbuff"]["lr"] == 4.0
    (folder / "fedbuff-k40.toml").write_text("[algorithm.fedbuff]\nlr = 7.0\n[client]\nlr = 0.5\n")
    assert asked.tables("fedbuff", buffer_size=40)["algorithm"]["fedbuff"]["lr"] == 7.0
    assert asked.tables("fedavg")["client"]["lr"] == methods.UNTUNED["digits"]["fedavg"].client
    (folder / "fedavg.toml").write_text("[algorithm.fedbuff]\nlr = 7.0\n")
    with pytest.raises(SettingsError, match=r"fedavg\.toml: expected"):
        asked.tables("fedavg")


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_every_setting_of_every_experiment_is_valid(name, tmp_path):
    experiment = experiments.EXPERIMENTS[name]
    for tables in experiment.cells(ask(tmp_path)).values():
        experiments.from_tables(tables)


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_table_cells_are_computed_from_runs(tmp_path):
    request = experiments.Request(tmp_path, workers=1, quiet=True)
    asked = ask(tmp_path, seeds=(0, 1))
    kept = experiments.run_one(table_k.TABLE_K, asked, request, silent)
    assert kept == json.loads((tmp_path / "table-k" / "digits.json").read_text())
    for row in kept["rows"]:
        k = int(row["key"][1:])
        found = [
            json.loads(path.read_text())
            for path in (tmp_path / "cells").iterdir()
            if json.loads(path.read_text())["settings"]["server"]["buffer_size"] == k
        ]
        trips = [cell["summary"]["trips_to_target"] for cell in found]
        assert len(trips) == 2
        assert row["ours"]["mean"] == pytest.approx(np.mean(trips) / 1000)
    path = next(p for p in (tmp_path / "cells").iterdir() if p.stem in kept["cells"] and p.stem.endswith("seed1"))
    changed = json.loads(path.read_text())
    changed["summary"]["trips_to_target"] = None
    path.write_text(json.dumps(changed))
    again = experiments.run_one(table_k.TABLE_K, asked, request, silent)
    assert sum(row["ours"].get("bound", False) for row in again["rows"]) == 1


def test_a_table_of_what_was_run_so_far_runs_nothing_and_claims_nothing_more(tmp_path):
    request = experiments.Request(tmp_path, workers=1, quiet=True, so_far=True)
    asked = ask(tmp_path, seeds=(0, 1))
    table = experiments.EXPERIMENTS["table1"]
    needed = table.cells(asked)
    reached = cells.measure(needed["fedbuff"], 1, tmp_path, asked.data, workers=1, say=silent).to_target("trips")
    begun = cells.folder(cells.where(experiments.from_tables({**needed["fedavg"], "seed": 0}), tmp_path), asked.data)
    begun.mkdir(parents=True)
    first = {"trips": 0, "server_steps": 0, "virtual_time": 0.0, "split": "test", "loss": 2.0, "accuracy": 0.1}
    (begun / "metrics.jsonl").write_text(
        json.dumps(first) + "\n" + json.dumps({**first, "trips": 5000}) + "\n" + '{"trips": 60'
    )
    before = sorted(tmp_path.rglob("*"))
    kept = experiments.run_one(table, asked, request, silent)
    assert [p for p in sorted(tmp_path.rglob("*")) if p not in before and "table1" not in p.parts] == []
    shown = {row[0]: row[2] for row in lines(kept)[1]}
    assert shown["FedBuff"] == f"{reached / 1000:.1f}"
    assert shown["FedAvg"] == "> 5.0" and shown["FedAvgM"] == "not run" and shown["FedAvgM / FedBuff"] == "–"
    assert [c["holds"] for c in kept["checks"]] == [False, False]
    assert "so far: 1 of 10 runs (fedbuff: seed 1); stopped before their end: fedavg 0, fedprox 0" in kept["notes"]
    with pytest.raises(SettingsError, match="fig-curves needs all"):
        experiments.run_one(experiments.EXPERIMENTS["fig-curves"], asked, request, silent)


@pytest.mark.parametrize("name", ["table1", "table-large-k", "table-lrnorm", "fig-stragglers", "fig-curves", "fig-rounds"])
def test_what_is_trained_on_a_tiny_task(name, tmp_path):
    request = experiments.Request(tmp_path, workers=1, quiet=True)
    kept = experiments.run_one(experiments.EXPERIMENTS[name], ask(tmp_path), request, silent)
    assert kept["rows"]
    assert kept["checks"]
    assert all(row["ours"] is None or row["ours"]["mean"] > 0 for row in kept["rows"])
    assert (tmp_path / name / "digits.svg").exists() == name.startswith("fig")
    for path in tmp_path.rglob("*"):
        if path.suffix in (".json", ".md", ".svg") and "runs" not in path.parts:
            assert str(tmp_path) not in path.read_text(), f"{path.name} holds a path of this machine"


def test_the_figures_about_concurrency_share_their_runs(tmp_path):
    asked = ask(tmp_path)
    needed = {name: experiments.EXPERIMENTS[name].cells(asked) for name in ("fig-rounds", "fig-concurrency", "fig-stragglers")}
    assert needed["fig-rounds"].items() <= needed["fig-concurrency"].items()
    assert needed["fig-stragglers"] == needed["fig-concurrency"]


def test_a_quick_version_says_so(tmp_path):
    assert "quick" in quick(experiments.DATASETS["cifar10"]).describe("cifar10", [10] * 5000)
    kept = experiments.run_one(
        fig_delays.FIG_DELAYS, ask(tmp_path, experiments.NO_DATA, quick=True), experiments.Request(tmp_path), silent
    )
    assert "quick" in (tmp_path / "fig-delays" / "result-quick.md").read_text()
    assert kept["quick"]


def test_another_target_is_another_result_beside_the_papers_and_says_so(tmp_path):
    request = experiments.Request(tmp_path, workers=1, quiet=True)
    kept = experiments.run_one(table_k.TABLE_K, ask(tmp_path, aiming(TINY, 0.2)), request, silent)
    assert kept == json.loads((tmp_path / "table-k" / "digits-to-20.json").read_text())
    assert kept["stand_in"] and "to 20 % instead of 30 %" in kept["data"] and " --target 0.2" in kept["command"]
    assert all(row["ours"]["mean"] > 0 for row in kept["rows"])
    experiments.run_one(table_k.TABLE_K, ask(tmp_path), request, silent)
    assert len(list((tmp_path / "cells").iterdir())) == 6, "two targets, two runs for each K"
    text, _ = report(tmp_path, tmp_path / "paper.md")
    assert text.index("### Handwritten digits\n") < text.index("### Handwritten digits, to 20 %\n")
    assert aiming(TINY, TINY.target) is TINY and aiming(TINY, None) is TINY


def test_a_guess_is_tuned_from_where_it_is_or_from_the_nearest_that_is_searched():
    assert within((0.0, 0.3, 0.6, 0.9), 0.5) == 0.6
    assert [within(between(0.3, 100.0), guess) for guess in (0.1, 1.0, 300.0)] == [0.3, 1.0, 100.0]


def test_data_that_is_not_the_papers_is_said_to_be_so():
    celeba = experiments.DATASETS["celeba"]
    part = celeba.describe("celeba (5 images per client)", [4] * 9000)
    assert "5 images per client; the paper has 9,343 clients; numbers can't be compared" in part
    assert "paper" not in celeba.describe("celeba", [19] * 9343)


def test_a_killed_table_goes_on_where_it_stopped(fedbuff, tmp_path):
    """SIGKILL as soon as the first cell is there, and a little later, in the middle of a run."""
    how = ["paper", "table-k", "--quick", "--seeds", "0,1", "--workers", "1", "--quiet"]
    fedbuff(*how, "--out", tmp_path / "whole")
    killed = tmp_path / "killed"
    process = subprocess.Popen(command([*how, "--out", killed]), cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(killed.glob("cells/*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path.name: path.stat().st_mtime_ns for path in killed.glob("cells/*.json")}
    assert 0 < len(before) < 6
    done = fedbuff(*how, "--out", killed)
    assert "K = 10" in done.stdout
    for path in killed.glob("cells/*.json"):
        assert path.stat().st_mtime_ns == before.get(path.name, path.stat().st_mtime_ns)
        one, other = (json.loads((tmp_path / name / "cells" / path.name).read_text()) for name in ("killed", "whole"))
        assert one["curve"] == other["curve"]
    one, other = (json.loads((tmp_path / name / "table-k" / "digits-quick.json").read_text()) for name in ("killed", "whole"))
    assert one["rows"] == other["rows"]


def test_list_says_what_is_cached(fedbuff, tmp_path):
    before = json.loads(fedbuff("paper", "list", "--json", "--out", "r").stdout)
    assert {row["name"] for row in before} == set(experiments.EXPERIMENTS)
    assert not any(row["results"] for row in before)
    fedbuff("paper", "fig-progress", "--quick", "--out", "r", "--seeds", "0")
    after = json.loads(fedbuff("paper", "list", "--json", "--out", "r").stdout)
    assert next(row["results"] for row in after if row["name"] == "fig-progress") == ["result-quick"]
    assert "fig-bias" in fedbuff("paper", "list", "--out", "r").stdout


def test_the_runs_of_every_kept_result_are_kept():
    rows = experiments.status(experiments.Request(Path(__file__).parents[1] / "results" / "paper"))
    whole = [row for row in rows if row["dataset"] in row["results"]]
    assert {("table1", "cifar10"), ("table1", "sent140"), ("table-lrnorm", "sent140")} <= {
        (r["name"], r["dataset"]) for r in whole
    }
    assert [row["cached"] for row in whole] == [row["runs"] for row in whole]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("tabel1",), "paper tabel1: unknown; did you mean table1?"),
        (("table1", "--dataset", "cifar"), "--dataset cifar: unknown; did you mean cifar10?"),
        (("table1", "--seeds", "0,0"), "--seeds 0,0: expected different integers"),
        (("table1", "--seeds", "x"), "--seeds x: expected different integers"),
        (("table1", "--data", "nowhere"), "--data nowhere: no such folder"),
        (("report", "--out", "nowhere"), "--out nowhere: no such folder"),
        (("table1", "--workers", "0"), "--workers 0: expected more than 0"),
        (("fig-bias", "--dataset", "cifar10"), "fig-bias can't be run on it"),
        (("fig-progress", "--dataset", "cifar10"), "fig-progress needs no data"),
        (("table1", "--target", "85"), "--target 85: expected an accuracy between 0 and 1"),
        (("tune", "--dataset", "digits"), "give --dataset and --method"),
        (("tune", "--dataset", "digits", "--method", "fedavgmm"), "did you mean fedavgm?"),
        (("tune", "--dataset", "digits", "--method", "fedavg", "--buffer-size", "3"), "only FedBuff has one"),
        (("tune", "--dataset", "digits", "--method", "fedavg", "--trials", "0"), "--trials 0"),
    ],
)
def test_a_mistake_is_one_line(arguments, complaint, fedbuff):
    done = fedbuff("paper", *arguments, code=2)
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"settings": null, "seed": 0, "summary": {"task": "x"}, "curve": {}}'])
def test_a_damaged_cell_is_named(text, tmp_path):
    asked = ask(tmp_path)
    path = cells.where(experiments.from_tables({**asked.tables("fedbuff"), "seed": 0}), tmp_path)
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(fb.FolderError, match="remove it to run this cell again"):
        cells.measure(asked.tables("fedbuff"), 0, tmp_path, asked.data)


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────


def kept_table(tmp_path: Path, name: str, **changes: object) -> dict[str, object]:
    """A result of table-k on CIFAR-10, as a file holds it; made by the code that makes real ones, from cells of ours."""
    found = {
        f"k{k}": [cells.Cell({}, 0, {"trips_to_target": trips, "trips": trips}, {})]
        for k, trips in ((1, 70_000), (10, 30_000), (100, 25_000))
    }
    asked = Ask(experiments.DATASETS["cifar10"], tmp_path / "settings", (0,))
    asked.__dict__["data"] = Data("cifar10", [10] * 5000, "")
    kept = {**experiments.about(table_k.TABLE_K, asked, {}), **experiments.as_json(table_k.result(asked, found)), **changes}
    (tmp_path / "table-k").mkdir(exist_ok=True)
    (tmp_path / "table-k" / f"{name}.json").write_text(json.dumps(kept))
    return kept


def test_the_report_asks_why_where_ours_differs(tmp_path):
    kept_table(tmp_path, "cifar10")
    text, missing = report(tmp_path, tmp_path / "paper.md")
    assert "| K = 10 | 67.5 ± 7.4 | 30.0 | 0.44 |" in text
    assert missing == ["table-k.cifar10.k10", "table-k.cifar10.k100"]
    assert text.count("**unexplained**") == 3  # and once in the head, where it says what that means
    assert "the other way round with K = 1; the other way round with K = 10" in text
    assert "Not run yet: `fedbuff paper table1`" in text
    assert "K = 1, 10, 100 | CIFAR-10 | 0 of 1 | K = 10 takes at most K = 100's trips (" in text
    (tmp_path / "why.toml").write_text('[table-k.cifar10]\nk10 = "It was tuned for longer."\nk1 = "Nobody asked."\n')
    text, missing = report(tmp_path, tmp_path / "paper.md")
    assert missing == ["table-k.cifar10.k100"]
    assert "0.44 times the paper's): It was tuned for longer." in text
    assert "does not differ any more: table-k.cifar10.k1 " in text


def test_the_report_prefers_full_results_to_quick_ones_and_real_data_to_what_stands_in(tmp_path):
    kept_table(tmp_path, "digits-quick", dataset="digits", quick=True, stand_in=True)
    text, missing = report(tmp_path, tmp_path / "paper.md")
    assert "CIFAR-10, quick" in text
    assert missing == []
    kept_table(tmp_path, "cifar10")
    kept_table(tmp_path, "cifar10-quick", quick=True)
    assert "quick\n" not in report(tmp_path, tmp_path / "paper.md")[0]


def test_figures_are_linked_from_where_the_page_is(tmp_path):
    kept_table(tmp_path, "cifar10", figure=True)
    page = tmp_path / "docs" / "paper.md"
    assert "](../table-k/cifar10.svg)" in report(tmp_path, page)[0]


@pytest.mark.parametrize("bad", ["[table1]\ncifar10 = 3", "[a.b]\nc = 3", "x = [", "[a.b.c]\nd = 'e'"])
def test_bad_explanations_are_one_line(bad, fedbuff, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "why.toml").write_text(bad)
    done = fedbuff("paper", "report", "--out", "r", "--page", "p.md", code=2)
    assert "why.toml" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_report_command_writes_the_page(fedbuff, tmp_path):
    fedbuff("paper", "fig-progress", "--quick", "--out", "r", "--seeds", "0")
    assert "report: docs/paper.md" in fedbuff("paper", "report", "--out", "r").stdout
    text = (tmp_path / "docs" / "paper.md").read_text()
    assert "](../r/fig-progress/result-quick.svg)" in text
    assert str(tmp_path) not in text


values = st.floats(0.1, 1000, allow_nan=False)


@given(st.lists(values, min_size=1, max_size=6, unique=True), st.floats(0.75, 1.25))
def test_what_is_in_proportion_does_not_differ(theirs, factor):
    pairs = [Pair(str(i), str(i), Number(v), Number(v * factor)) for i, v in enumerate(theirs)]
    assert differences(pairs) == {}


@given(st.lists(values, min_size=2, max_size=6, unique=True), st.permutations(range(6)))
def test_an_order_differs_if_and_only_if_two_are_swapped(theirs, order):
    chosen = [i for i in order if i < len(theirs)]
    ours = [theirs[i] for i in chosen]
    pairs = [Pair(str(i), str(i), Number(a), Number(b)) for i, (a, b) in enumerate(zip(theirs, ours, strict=True))]
    swapped = any("other way round" in how for how in differences(pairs).values())
    assert swapped == (np.argsort(theirs).tolist() != np.argsort(ours).tolist())


def test_not_reaching_a_target_differs_from_reaching_it():
    missed, reached = Number(600, bound=True), Number(500)
    assert differences([Pair("a", "a", missed, missed)]) == {}
    assert "> 600.0 instead of 500.0" in differences([Pair("a", "a", reached, missed)])["a"]
    assert "a" in differences([Pair("a", "a", missed, reached)])
    assert ratio(missed, reached) == Number(1.2, bound=True)
    assert ratio(reached, missed) is None


@pytest.mark.parametrize(
    ("a", "b", "known"),
    [
        (Number(3.0), Number(2.0), True),
        (Number(2.0), Number(2.0), False),
        (Number(2.0, bound=True), Number(2.0), True),
        (Number(1.0, bound=True), Number(2.0), False),
        (Number(9.0), Number(2.0, bound=True), False),
        (Number(9.0, bound=True), Number(2.0, bound=True), False),
        (NOT_RUN, Number(0.0), False),
        (Number(9.0), NOT_RUN, False),
    ],
)
def test_more_is_more_only_if_it_is_known(a, b, known):
    assert exceeds(a, b) == known


def reaching(trips: int | None) -> list[cells.Cell]:
    """A cell that took so many trips to its target, or 600 and did not get there."""
    spent = {"trips": 600, "server_steps": 60, "virtual_time": 6.0}
    to = {f"{cost}_to_target": None if trips is None else value * trips / 600 for cost, value in spent.items()}
    return [cells.Cell({}, 0, {**spent, **to}, {})]


def test_a_claim_that_needs_what_nobody_reached_does_not_hold(tmp_path):
    def claim(name: str, found: dict[str, list[cells.Cell]]) -> bool:
        return experiments.EXPERIMENTS[name].result(ask(tmp_path), found).checks[-1].holds

    def by_key(name: str, **trips: int | None) -> dict[str, list[cells.Cell]]:
        needed = experiments.EXPERIMENTS[name].cells(ask(tmp_path))
        return {
            key: reaching(next(t for start, t in trips.items() if key.replace("-", "_").startswith(start))) for key in needed
        }

    assert claim("table-large-k", by_key("table-large-k", fedbuff=100, fedavgm=300, over_selection=200))
    assert claim("table-large-k", by_key("table-large-k", fedbuff=100, fedavgm=None, over_selection=200))
    assert not claim("table-large-k", by_key("table-large-k", fedbuff=100, fedavgm=300, over_selection=None))
    assert not claim("table-large-k", by_key("table-large-k", fedbuff=None, fedavgm=300, over_selection=200))
    assert claim("fig-concurrency", by_key("fig-concurrency", fedbuff=100, fedavgm_5=100, fedavgm_20=300))
    assert not claim("fig-concurrency", by_key("fig-concurrency", fedbuff=100, fedavgm_5=None, fedavgm_20=300))
    assert not claim("fig-concurrency", by_key("fig-concurrency", fedbuff=None, fedavgm_5=100, fedavgm_20=300))
    assert not claim("fig-stragglers", by_key("fig-stragglers", fedbuff=None, fedavgm=300))
    assert claim("fig-rounds", by_key("fig-rounds", fedavgm_5=300, fedavgm_20=200))
    assert not claim("fig-rounds", by_key("fig-rounds", fedavgm_5=300, fedavgm_20=None))
    same = by_key("table-delays", fedbuff=100, fedasync=200, fedavgm=300)
    assert claim("table-delays", same)
    assert not claim("table-delays", {**same, "fedasync-exponential": reaching(90)})
    assert not claim("table-delays", {**same, "fedasync-uniform": reaching(None), "fedavgm": reaching(None)})


def test_nobody_can_tell_what_a_bound_below_stands_for():
    stopped, one, other = Number(40, bound=True), Number(100), Number(300)
    assert differences([Pair("a", "a", other, stopped), Pair("b", "b", one, one)]) == {}
    assert differences([Pair("a", "a", other, NOT_RUN), Pair("b", "b", one, one)]) == {}
    assert "other way round" in differences([Pair("a", "a", one, Number(120, bound=True)), Pair("b", "b", other, one)])["b"]


def test_a_stand_in_is_not_divided_by_the_paper(tmp_path):
    kept = kept_table(tmp_path, "digits", stand_in=True)
    assert lines(kept)[0] == ["thousand trips to the target", "paper (CIFAR-10)", "ours"]


# ── what needs no training ───────────────────────────────────────────────────────────────────────────────────────────


def test_active_clients_are_those_that_started_and_did_not_end():
    t = fb.timeline(start=cohort(7, 0.3), buffer_size=7, clients=60, trips=200)
    times = np.linspace(0, float(t.end_time.max()), 57)
    by_hand = [sum(s <= x < e for s, e in zip(t.start_time, t.end_time, strict=True)) for x in times]
    assert fig_progress.active(t, times).tolist() == by_hand


@pytest.mark.parametrize(("over_selection", "started"), [(0.0, 50), (0.3, 65)])
def test_a_synchronous_step_takes_as_long_as_its_slowest_trip(over_selection, started):
    """The expected 50th of so many half-normal durations, by integration."""
    k = 50
    half_normal = stats.halfnorm()
    later = lambda x: stats.binom.cdf(k - 1, started, half_normal.cdf(x))  # noqa: E731
    expected = integrate.quad(later, 0, 10)[0] / half_normal.mean()
    measured = table_large_k.step_time(cohort(k, over_selection), k, (0, 1, 2, 3, 4))
    assert measured.mean == pytest.approx(expected, rel=0.03)


def test_an_asynchronous_step_takes_k_trips_at_m_in_flight():
    assert table_large_k.step_time(refill(50), 50, (0, 1, 2)).mean == pytest.approx(1.0, rel=0.05)


def test_over_selection_loses_clients_with_many_examples_and_fedbuff_does_not(tmp_path):
    sizes = [1 + (i % 10 == 0) * 30 for i in range(300_000)]
    asked = ask(tmp_path, replace(SIZES, paper="sent140"))
    asked.__dict__["data"] = Data("synthetic", sizes, "")
    result = fig_bias.result(asked, {})
    assert [check.holds for check in result.checks] == [True, True, True]
    share = {pair.key: pair.ours.mean for pair in result.pairs if pair.ours is not None}
    assert share["all-many"] == pytest.approx(1 / 10)
    assert share["over-selection-many"] < 0.3 * share["all-many"]
    assert share["fedbuff-many"] == pytest.approx(1 / 10, rel=0.1)


def test_equal_clients_can_not_be_biased(tmp_path):
    asked = ask(tmp_path)
    asked.__dict__["data"] = Data("cifar10", [10] * 5000, "")
    with pytest.raises(ValueError, match="nothing to be biased by"):
        fig_bias.result(asked, {})


def test_the_theorem_holds(tmp_path):
    result = theorem.result(ask(tmp_path, quick=True), {})
    assert [check.text() for check in result.checks if not check.holds] == []


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_the_quick_theorem_holds_for_other_seeds_and_says_which_it_used(seed, tmp_path):
    asked = ask(tmp_path, experiments.NO_DATA, seeds=(seed, 0), quick=True)
    kept = experiments.run_one(theorem.THEOREM, asked, experiments.Request(tmp_path), silent)
    assert all(check["holds"] for check in kept["checks"])
    assert kept["seeds"] == [seed]


def test_the_problem_of_the_theorem_is_what_it_says():
    z, rng = theorem.points(0), np.random.default_rng(0)
    w, step = rng.normal(size=theorem.DIMENSIONS), 1e-6
    slope = [(theorem.loss(w + step * e, z) - theorem.loss(w - step * e, z)) / (2 * step) for e in np.eye(theorem.DIMENSIONS)]
    assert theorem.gradient(w, z).mean((0, 1)) == pytest.approx(slope, abs=1e-6)
    squared, met = theorem.constants_at(w, z)
    assert squared == pytest.approx(float(np.square(slope).sum()), abs=1e-5)
    for far in (0.0, 1.0, 1e6):
        _, here = theorem.constants_at(w * far, z)
        assert here + theorem.ANYWHERE == theorem.ANYWHERE  # bounded for every w
    v = rng.normal(size=theorem.DIMENSIONS)
    change = theorem.gradient(w, z).mean(1) - theorem.gradient(v, z).mean(1)
    assert (np.linalg.norm(change, axis=1) <= theorem.L * np.linalg.norm(w - v)).all()  # L-smooth
    assert theorem.minimum(z) <= theorem.loss(z.mean((0, 1)), z)
    assert met.variance > 0


def test_the_bound_is_the_theorems():
    """α(Q), β(Q) as the theorem has them, before its corollary simplifies."""
    eta_g, eta_l, q, steps, tau, gap = 3.0, 0.02, 4, 500, 7, 11.0
    c = theorem.Constants(0.7, 1.1, 2.3)
    alpha, beta = q * eta_l, q * eta_l**2
    expected = 2 * gap / (eta_g * alpha * steps) + 0.5 * eta_g * beta / alpha * 0.7
    expected += 3 * q * beta * (eta_g**2 * tau**2 + 1) * (0.7 + 1.1 + 2.3)
    assert theorem.bound(gap, eta_g, eta_l, q, steps, tau, c) == pytest.approx(expected)


def test_one_client_at_a_time_is_plain_sgd():
    z, steps = theorem.points(0), 40
    t = theorem.run(1, 1, steps, 0)
    measured, _ = theorem.play(t, z, 1, 1, steps, 1.0, 0.1, 0)
    rng, w, total = theorem.generator(0, "theorem steps", 1, 1, steps), np.full(theorem.DIMENSIONS, 3.0), 0.0
    for client in t.client[:steps]:
        whole = theorem.gradient(w, z).mean((0, 1))
        total += float(whole @ whole)
        w = w - 0.1 * theorem.gradient(w, z[client, rng.integers(theorem.POINTS, size=1)[0]])
    assert measured == pytest.approx(total / steps)


def test_fedprox_with_one_local_step_is_fedavg():
    """Which is why CIFAR-10's runs of one stand for the other's."""
    task = {"digits": {"clients": 200, "split": {"dirichlet": {"alpha": 0.1}}}}  # eight or nine examples each
    runs = [
        from_tables(
            {
                "task": task,
                "algorithm": {name: {"concurrency": 20, "lr": 1.0, **own}},
                "client": {"lr": 0.5, "batch_size": 32},
                "until": {"server_steps": 5},
            }
        ).run(workers=1)
        for name, own in (("fedavg", {}), ("fedprox", {"mu": 1.0}))
    ]
    assert all(np.array_equal(tensor, runs[1].weights[name]) for name, tensor in runs[0].weights.items())
    cifar = DATASETS["cifar10"]
    assert cifar.one_step and methods.tables(cifar, Path("none"), "fedprox") == methods.tables(cifar, Path("none"), "fedavg")
    assert methods.tables(DATASETS["sent140"], Path("none"), "fedprox")["name"] == "fedprox"
    with pytest.raises(SettingsError, match="it is FedAvg; tune that"):
        tune_method(cifar, "fedprox", Path("none"))


@pytest.mark.parametrize(("sizes", "whose"), [([4, 32], "fedavg"), ([4, 33], "fedprox")])
def test_data_with_one_local_step_a_client_has_no_runs_of_fedprox_s_own(sizes, whose):
    """What is at hand of CelebA has five images a person, the paper's twenty; unread, nobody knows."""
    asked = Ask(DATASETS["celeba"], Path("none"))
    asked.__dict__["data"] = Data("celeba", sizes, "")
    assert asked.tables("fedprox")["name"] == whose
    assert Ask(DATASETS["celeba"], Path("none"), read=False).tables("fedprox")["name"] == "fedprox"


def some_cells(**reached: int | None) -> list[cells.Cell]:
    """Cells of these seeds, s0 and so on, and the trips they took to the target; None for more than 15,000."""

    def cell(seed: int, trips: int | None) -> cells.Cell:
        spent = {"trips": trips or 15_000, "server_steps": 1, "virtual_time": 1.0}
        to_target = {f"{cost}_to_target": None if trips is None else value for cost, value in spent.items()}
        curve = {"trips": [0, trips or 15_000], "accuracy": [0.1, 0.9]}
        return cells.Cell({}, seed, {**spent, **to_target, "stopped_by": "x"}, curve)

    return [cell(int(seed[1:]), trips) for seed, trips in reached.items()]


SLOW, LUCKY = some_cells(s0=14_000, s1=14_000, s2=14_000), some_cells(s0=1_000, s1=1_000, s2=None)  # "> 5.7"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("table1", {"fedbuff": SLOW, **dict.fromkeys(("fedasync", "fedavgm", "fedavg", "fedprox"), LUCKY)}),
        ("table-k", {"k1": SLOW, "k10": SLOW, "k100": LUCKY}),
        ("table-lrnorm", {f"k{k}-{w}": SLOW if w == "lr-norm" else LUCKY for k in (1, 10, 100) for w in WEIGHTINGS}),
        *(
            (name, {"fedavgm": LUCKY} | {f"{m}-{t}": SLOW for m in ("fedbuff", "fedasync") for t in TIMINGS})
            for name in ("table-delays", "fig-curves")
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
def test_nothing_holds_because_one_seed_of_a_rival_did_not_get_there(name, found):
    asked = Ask(DIGITS, Path("none"), quick=True)
    assert not any(check.holds for check in experiments.EXPERIMENTS[name].result(asked, found).checks)


def test_claims_are_of_the_seeds_that_both_have():
    ours, theirs = some_cells(s1=4_000), some_cells(s0=10_000, s1=2_000, s2=2_000)
    asked = Ask(DIGITS, Path("none"), quick=True)
    for name, found in (
        ("table1", {"fedbuff": ours, **dict.fromkeys(("fedasync", "fedavgm", "fedavg", "fedprox"), theirs)}),
        ("table-k", {"k1": ours, "k10": ours, "k100": theirs}),
        (
            "table-delays",
            {"fedavgm": theirs} | {f"{m}-{t}": ours for m in ("fedbuff", "fedasync") for t in TIMINGS},
        ),
    ):
        *first, last = experiments.EXPERIMENTS[name].result(asked, found).checks
        assert not any(check.holds for check in first) and (name == "table-delays" or not last.holds)


def test_so_far_is_complete_when_all_is_there(tmp_path):
    asked = ask(tmp_path, seeds=(0,))
    experiments.run_one(table_k.TABLE_K, asked, experiments.Request(tmp_path, workers=1, quiet=True), silent)
    kept = experiments.run_one(table_k.TABLE_K, asked, experiments.Request(tmp_path, so_far=True), silent)
    assert not kept["so_far"] and not any("so far" in note for note in kept["notes"])


def test_a_run_that_was_killed_while_it_finished_has_got_there(tmp_path):
    asked, tables = ask(tmp_path), ask(tmp_path).tables("fedbuff")
    done = cells.measure(tables, 0, tmp_path, asked.data, workers=1, say=silent)
    next((tmp_path / "cells").iterdir()).unlink()
    found = cells.so_far(tables, 0, tmp_path, asked.data)
    assert done.to_target("trips") is not None
    assert [found.to_target(cost) for cost in ("trips", "virtual_time")] == [
        done.to_target(cost) for cost in ("trips", "virtual_time")
    ]


@pytest.mark.parametrize(
    "change",
    [{"curve": {}}, {"curve": {"trips": [1], "server_steps": [1], "virtual_time": [1], "loss": [1], "accuracy": []}},
     {"seed": 7}, {"seed": "0"}, {"summary": {"trips_to_target": "x"}}, {"summary": {"trips": None}},
     {"summary": {"trips_to_target": float("nan")}}, {"summary": {"trips_to_target": -1}}, {"summary": {"trips": True}},
     {"summary": {"trips_to_target": 10**9}}, {"settings": {"name": "fedavgm"}}],
)  # fmt: skip
def test_a_cell_that_no_table_can_be_made_of_is_named(change, tmp_path):
    asked, tables = ask(tmp_path), ask(tmp_path).tables("fedbuff")
    cells.measure(tables, 0, tmp_path, asked.data, workers=1, say=silent)
    path = next((tmp_path / "cells").iterdir())
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(kept | ({"summary": kept["summary"] | change["summary"]} if "summary" in change else change)))
    with pytest.raises(fb.FolderError, match=r"seed0\.json is damaged"):
        cells.measure(tables, 0, tmp_path, asked.data)


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"quick": true}'])
def test_a_result_that_is_none_is_named(text, fedbuff, tmp_path):
    (tmp_path / "out" / "table1").mkdir(parents=True)
    (tmp_path / "out" / "table1" / "cifar10.json").write_text(text)
    done = fedbuff("paper", "report", "--out", tmp_path / "out", "--page", tmp_path / "page.md", code=2)
    assert "cifar10.json is damaged" in done.stderr and len(done.stderr.splitlines()) == 1


RATES = "[algorithm.fedbuff]\nlr = 2.0\n[client]\nlr = 0.5\n"


@pytest.mark.parametrize(
    "text", [f"{RATES}[study]\ntrials = 3\n", f"study = 4\n{RATES}", RATES.replace("lr = 2.0", "lr = 2.0\nbeta = 'x'")]
)
def test_tuned_settings_that_are_none_are_named(text, tmp_path):
    (tmp_path / "settings" / "digits").mkdir(parents=True)
    (tmp_path / "settings" / "digits" / "fedbuff.toml").write_text(text)
    with pytest.raises(SettingsError, match=r"fedbuff\.toml: "):
        experiments.EXPERIMENTS["table-hyper"].result(Ask(DIGITS, tmp_path / "settings"), {})


def test_budgets_are_equal_only_with_the_same_ranges_and_target(tmp_path):
    folder = tmp_path / "digits"
    folder.mkdir()
    study = {"trials": 3, "trips": 100, "best": 90.0, "reached": True, "target": 0.9, "ranges": "narrow", "seeds": [1, 2]}

    def holds(**odd):
        for method in methods.TITLES:
            own = {"algorithm": {method: {"lr": 1.0}}, "client": {"lr": 1.0}}
            own["study"] = study | (odd if method == "fedbuff" else {})
            (folder / f"{method}.toml").write_text(toml.dumps(own))
        (check,) = experiments.EXPERIMENTS["table-hyper"].result(Ask(DIGITS, tmp_path), {}).checks
        return check.holds

    assert holds() and not holds(ranges="paper") and not holds(target=0.5) and not holds(trips=200)


def test_a_digest_is_of_inputs_and_of_what_the_model_holds_too():
    def of(first=0.0, vectors=1.0, clients=None):
        words = torch.nn.Embedding.from_pretrained(torch.full((3, 2), vectors))
        some = clients or [(np.full((2, 3), first, np.float32), np.array([0, 1]))]
        model = lambda: torch.nn.Sequential(copy.deepcopy(words), torch.nn.Linear(2, 2))  # noqa: E731
        return data_of(fb.Task(model=model, loss=torch.nn.functional.cross_entropy, clients=some, evaluate=some[0]))

    assert of() == of() and of().labels == of(first=1.0).labels
    assert len({of().digest, of(first=1.0).digest, of(vectors=2.0).digest}) == 3

    class Augmented:
        """Inputs that are never the same."""

        def __len__(self):
            return 1

        def __getitem__(self, client):
            if client:
                raise IndexError(client)
            return np.random.default_rng().normal(size=(2, 3)), np.array([0, 1])

    assert of(clients=Augmented()).digest == of(clients=Augmented()).digest
