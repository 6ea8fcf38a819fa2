"""The benchmark: every way to train a workload in turn, several times over, each in a process of its own; medians.

Machines are noisy, so what counts are ratios within one run.
"""

import contextlib
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fedbuff.bench.engine import CASES, microseconds_per_trip
from fedbuff.sim.memory import together_mb
from fedbuff.sim.workers import cores
from fedbuff.version import __version__

SPEED = ("cifar", "sent140", "tweets", "celeba", "logistic")
# of trips per second, at most; nothing is promised of masking a million weights
COSTS = {"cifar-again": {"tree": 0.10, "blt": 0.10, "enclave": 0.05}, "million": {"tree": 0.10, "blt": 0.10}}
MANY = 1_000_000  # clients
ENGINE_TRIPS, ENGINE_ROUNDS = 5_000, 10  # of a turn, and turns for every repeat
GOALS = {"cifar": (4.0, 2.0), "sent140": (8.0, 1.0), "celeba": (2.5, 1.5), "logistic": (30.0, 0.8)}


def bench(
    workloads: Sequence[str], repeats: int, share: float, workers: int, say: Callable[[str], None], *, ray: bool, bfloat16: bool
) -> dict[str, Any]:
    """Measure everything; the result is what `--json` prints."""
    result: dict[str, Any] = {"machine": machine(), "repeats": repeats, "workers": workers, "workloads": {}}
    for name in (w for w in workloads if w in SPEED):
        ways = ["loop", "central", "ours-1", f"ours-{workers}"]
        ways += ([f"bfloat16-{workers}"] if bfloat16 else []) + (["ray-1", f"ray-{workers}"] if ray else [])
        found: dict[str, list[dict[str, float]]] = {way: [] for way in dict.fromkeys(ways)}
        for repeat in range(repeats):  # alternating: what slows the machine down slows all of them
            for way in found:
                found[way].append(measure(name, way, share))
                say(f"{name} {repeat + 1}/{repeats} {way}: {found[way][-1]['trips_per_second']:,.0f} trips/s")
        result["workloads"][name] = summary(found, workers)
    if "large" in workloads:
        result["large"] = measure("large", f"ours-{workers}", share)
        say(f"ten million weights: {result['large']['peak_mb']:,.0f} MB")
    if "layers" in workloads:
        result["layers"] = layers(share, say)
    if "engine" in workloads:
        result["engine"] = engine(repeats, share, say)
    if "flat" in workloads:
        result["flat"] = flat(repeats, share, say)
    return result


def measure(name: str, way: str, share: float) -> dict[str, Any]:
    """One measurement: trips per second, and the most memory that the process and its children took, as seen now and then."""
    command = [sys.executable, "-m", "fedbuff.bench.measure", name, way, str(share)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak = 0.0
    while process.poll() is None:
        began = time.perf_counter()
        peak = max(peak, together_mb(tree(process.pid)) or 0.0)
        # adding up Ray's processes takes 35 ms, and these machines have no core to spare for it
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(2.0, max(0.25, 50 * (time.perf_counter() - began))))
    out, err = process.communicate()
    if process.returncode:
        raise ValueError(f"measuring {name} {way} failed: {err.strip().splitlines()[-1] if err.strip() else 'no message'}")
    return {**json.loads(out.splitlines()[-1]), "peak_mb": peak}


def tree(pid: int) -> list[int]:
    """A process and all that came of it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return [pid]
    return [pid, *(grandchild for child in children for grandchild in tree(int(child)))]


def summary(found: dict[str, list[dict[str, float]]], workers: int) -> dict[str, Any]:
    """Medians, and ratios of what was measured in the same repeat."""
    rate = {way: median(m["trips_per_second"] for m in ms) for way, ms in found.items()}

    def ratio(a: str, b: str) -> float:
        pairs = zip(found[a], found[b], strict=True)
        return median(x["trips_per_second"] / y["trips_per_second"] for x, y in pairs)

    ours, data = f"ours-{workers}", found["ours-1"][0]["data_mb"]
    result: dict[str, Any] = {
        "trips_per_second": rate,
        "ours / loop": ratio(ours, "loop"),
        "ours / central": ratio(ours, "central"),
        "ours / one worker": ratio(ours, "ours-1"),
        "data_mb": data,
        "peak_mb_beyond_data": {way: max(m["peak_mb"] for m in ms) - data for way, ms in found.items()},
        "all": {way: [m["trips_per_second"] for m in ms] for way, ms in found.items()},
    }
    if f"bfloat16-{workers}" in found:
        result["bfloat16 / loop"] = ratio(f"bfloat16-{workers}", "loop")
        result["bfloat16 / float32"] = ratio(f"bfloat16-{workers}", ours)
    if "ray-1" in found:
        result["ray / here, one worker"] = ratio("ray-1", "ours-1")
        result["ray, workers / one"] = ratio(f"ray-{workers}", "ray-1")
    return result


def layers(share: float, say: Callable[[str], None]) -> dict[str, dict[str, dict[str, Any]]]:
    """What differential privacy and secure aggregation cost: the share of trips per second that is lost to each, and of CPU."""
    lost: dict[str, dict[str, dict[str, Any]]] = {}
    for name in COSTS:
        found = measure(name, "turns", share)["turns"]
        plain, lost[name] = found.pop("ours"), {}
        for way, turns in found.items():
            pairs = list(zip(plain, turns, strict=True))
            elapsed, cpu = (sorted(1.0 - without[i] / each[i] for without, each in pairs) for i in (0, 1))
            quarter = len(pairs) // 4
            lost[name][way] = {
                "lost": median(elapsed),
                "half_between": [elapsed[quarter], elapsed[-1 - quarter]],
                "cpu": median(cpu),
                "turns": len(pairs),
            }
            say(f"{name} with {way}: {100 * median(elapsed):.1f} % lost, {100 * median(cpu):.1f} % by CPU time")
    return lost


def engine(repeats: int, share: float, say: Callable[[str], None]) -> list[dict[str, float]]:
    """The simulator's own cost per trip, at several concurrencies and numbers of clients, and relative to the first."""
    rows = []
    for weights in dict.fromkeys(case.weights for case in CASES):
        cases = [case for case in CASES if case.weights == weights]
        found = microseconds_per_trip(cases, ENGINE_TRIPS, max(1, round(ENGINE_ROUNDS * repeats * share)))
        for case, times in zip(cases, found, strict=True):
            relative = median(mine / first for mine, first in zip(times, found[0], strict=True))  # turn by turn
            rows.append({**case._asdict(), "microseconds_per_trip": median(times), "relative": relative})
            say(
                f"engine at concurrency {case.concurrency:,} of {case.clients:,} clients, {weights:,} weights: "
                f"{median(times):.1f} µs per trip, {relative:.2f} times the first"
            )
    return rows


def flat(repeats: int, share: float, say: Callable[[str], None]) -> list[dict[str, float]]:
    """The whole time per trip, training included, of the workload whose trips are shortest, at several concurrencies."""
    found: dict[int, list[float]] = {concurrency: [] for concurrency in (100, 1_000, 10_000, 100_000)}
    for _ in range(min(repeats, 3)):
        for concurrency, times in found.items():
            times.append(1e6 / measure("logistic", f"at-{concurrency}-{MANY}", share)["trips_per_second"])
            say(f"logistic at concurrency {concurrency:,} of {MANY:,} clients: {times[-1]:.1f} µs per trip")
    return [{"concurrency": m, "clients": MANY, "microseconds_per_trip": median(times)} for m, times in found.items()]


def machine() -> dict[str, Any]:
    """What was measured, and on what."""
    import numpy as np
    import torch

    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
        about = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        family = about.get("cpu family")  # "AMD EPYC" is several kinds of core, of which one computes twice as fast as another
        cpu = about.get("model name", cpu) + (f" (family {family})" if family else "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": cores(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "memory_gb": round(memory, 1),
        "system": platform.platform(),
        "fedbuff": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def tables(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m, workers = result["machine"], result["workers"]
    lines = [
        f"{m['cpu']}, {m['cores']} cores, {m['instructions']}, torch {m['torch']}, {m['date']}; medians of {result['repeats']}"
    ]
    notes: list[str] = []
    if result["workloads"]:
        ways = list(next(iter(result["workloads"].values()))["trips_per_second"])
        lines += ["", f"| trips per second | {' | '.join(ways)} | ours / loop | ours / central | MB beyond the data |"]
        lines += ["|---|" + "---:|" * (len(ways) + 3)]
    for name, found in result["workloads"].items():
        rates = [f"{found['trips_per_second'][way]:,.0f}" for way in ways]
        goals = [f" (≥ {goal:g})" for goal in GOALS[name]] if name in GOALS else ["", ""]
        ratios = [f"{found[f'ours / {way}']:.1f}{goal}" for way, goal in zip(("loop", "central"), goals, strict=True)]
        lines += [f"| {name} | {' | '.join(rates + ratios)} | {found['peak_mb_beyond_data'][f'ours-{workers}']:,.0f} |"]
        if "bfloat16 / loop" in found:
            loop, ours = found["bfloat16 / loop"], found["bfloat16 / float32"]
            notes += [f"{name} in bfloat16: {loop:.1f} × the loop in float32, {ours:.2f} × ours"]
        if "ray / here, one worker" in found:
            one, more = found["ray / here, one worker"], found["ray, workers / one"]
            notes += [f"{name} on Ray: one worker {one:.2f} × one here, {workers} workers {more:.2f} × one"]
    for note in notes:
        lines += ["", note]
    if "large" in result:
        beyond = result["large"]["peak_mb"] - result["large"]["data_mb"]
        lines += [
            "",
            f"ten million weights: {beyond:,.0f} MB beyond the data, {result['large']['trips_per_second']:.1f} trips/s",
        ]
    if "layers" in result:
        ways = list(COSTS["cifar-again"])
        lines += ["", f"| trips per second lost to | {' | '.join(ways)} |", "|---|" + "---:|" * len(ways)]
        for name, lost in result["layers"].items():
            most = {way: f" (≤ {100 * cost:g} %)" for way, cost in COSTS[name].items()}
            cells = [f"{100 * lost[way]['lost']:.1f} %{most.get(way, '')}" for way in ways]
            lines += [f"| {name} | {' | '.join(cells)} |"]
    if "engine" in result:
        lines += ["", "| concurrency | clients | weights | engine, µs per trip | relative |", "|---:|---:|---:|---:|---:|"]
        for row in result["engine"]:
            cells = [f"{row[key]:,}" for key in ("concurrency", "clients", "weights")]
            lines += [f"| {' | '.join(cells)} | {row['microseconds_per_trip']:.1f} | {row['relative']:.2f} |"]
    if "flat" in result:
        lines += ["", "| concurrency | clients | logistic regression, µs per trip |", "|---:|---:|---:|"]
        lines += [f"| {r['concurrency']:,} | {r['clients']:,} | {r['microseconds_per_trip']:.1f} |" for r in result["flat"]]
    return "\n".join(lines) + "\n"


def file_name(result: dict[str, Any]) -> str:
    """Where the result is kept: by date and machine."""
    words = "".join(c if c.isalnum() else " " for c in result["machine"]["cpu"].lower()).split()
    machine = result["machine"]
    return "-".join([machine["date"], *words[:4], machine["instructions"].lower(), str(machine["cores"]), "cores.json"])
