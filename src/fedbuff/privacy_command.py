"""`fedbuff privacy epsilon | noise | audit`: what noise promises, what a promise costs, and whether it can be refuted."""

import argparse
import json
import os
from typing import Any

from fedbuff.privacy import prefix, sensitivity
from fedbuff.privacy.audit import audit
from fedbuff.privacy.plan import ADJACENCY, MECHANISMS, SAMPLED_ADJACENCY, Plan, plan
from fedbuff.toml import SettingsError

_MOST = 10_000_000  # server steps: some hundred megabytes, and a second


def parser(commands: Any) -> None:
    """`fedbuff privacy` for the command line's own parser."""
    summary = "Differential privacy: epsilon from noise, noise from epsilon, and an audit of the real path."
    kinds = commands.add_parser("privacy", help=summary, description=summary).add_subparsers(required=True, metavar="KIND")

    def kind(name: str, function: Any, summary: str) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = kinds.add_parser(name, help=summary, description=summary)
        sub.set_defaults(command=function)
        sub.add_argument("--mechanism", choices=MECHANISMS, default="blt", help="(blt)")
        sub.add_argument("--steps", type=int, required=True, metavar="T", help="server steps, at most")
        sub.add_argument("--delta", type=float, required=True)
        sub.add_argument("--max-participations", type=int, metavar="K", help="server steps that one client may be part of (1)")
        sub.add_argument("--min-separation", type=int, default=1, metavar="B", help="between them, |i − j| ≥ B (1)")
        sub.add_argument("--restart-every", type=int, metavar="STEPS", help="begin a new tree or matrix")
        sub.add_argument("--completion", action="store_true", help="complete a tree before the restart")
        sub.add_argument("--accountant", choices=("exact", "pld", "rdp"), help="(exact; for sampled cohorts pld)")
        sub.add_argument("--json", action="store_true", help="print the result as JSON")
        return sub

    def sampled(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--sampling-rate", type=float, metavar="Q", help="gaussian: of Poisson-sampled cohorts")

    sub = kind("epsilon", epsilon, "The epsilon of a noise multiplier.")
    sub.add_argument("--noise-multiplier", type=float, required=True, metavar="σ", help="noise on the sum / clip; in each node")
    sampled(sub)
    sub = kind("noise", noise, "The noise multiplier for an epsilon.")
    sub.add_argument("--epsilon", type=float, required=True)
    sampled(sub)
    sub = kind(
        "audit", run_audit, "A lower bound on epsilon from canaries, in one run through clip, weights, buffer and noise."
    )
    sub.add_argument("--epsilon", type=float, help="what is claimed; or")
    sub.add_argument("--noise-multiplier", type=float, metavar="σ", help="what is claimed follows from it")
    sub.add_argument("--canaries", type=int, default=1000, help="clients that try to be seen (1000)")
    sub.add_argument("--confidence", type=float, default=0.95, help="of the bound (0.95)")
    sub.add_argument("--seed", type=int, help="repeat an audit; by default coins are seed 0 and the noise's key is new")


def epsilon(args: argparse.Namespace) -> None:
    _show(_facts(_plan(args, noise_multiplier=args.noise_multiplier)), args)


def noise(args: argparse.Namespace) -> None:
    _show(_facts(_plan(args, epsilon=args.epsilon)), args)


def run_audit(args: argparse.Namespace) -> None:
    args.sampling_rate = None
    if args.steps > 2000 or not 10 <= args.canaries <= 20_000:
        raise SettingsError(
            f"--steps {args.steps} --canaries {args.canaries}: the audit takes at most 2000 steps, and 10 to 20,000 canaries"
        )
    if not 0.5 < args.confidence < 1:
        raise SettingsError(f"--confidence {args.confidence}: expected more than 0.5 and less than 1")
    if args.seed is not None and args.seed < 0:
        raise SettingsError(f"--seed {args.seed}: expected an integer >= 0")
    planned = _plan(args, epsilon=args.epsilon, noise_multiplier=args.noise_multiplier)
    key = os.urandom(32) if args.seed is None else args.seed
    found = audit(
        planned,
        key,
        seeded=args.seed is not None,
        canaries=args.canaries,
        seed=args.seed or 0,
        confidence=args.confidence,
    )
    found = {"mechanism": planned.mechanism, "noise_multiplier": planned.noise_multiplier, **found}
    if args.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{planned.mechanism}, {planned.horizon:,} server steps, {args.canaries:,} canaries")
    print(f"  claimed      epsilon {found['claimed_epsilon']:.4g} at delta {planned.delta:g}")
    print(f"  found        at least {found['epsilon_lower_bound_gdp']:.4g} (if the noise is Gaussian, as it is)")
    print(f"               at least {found['epsilon_lower_bound_fdp']:.4g} (f-DP in one run)")
    print(f"  {'EXCEEDS THE CLAIM: something is wrong' if found['exceeds_claim'] else 'not refuted, which is no proof'}")


def _plan(args: argparse.Namespace, **goal: float | None) -> Plan:
    if args.steps < 1:
        raise SettingsError(f"--steps {args.steps}: expected more than 0")
    if args.steps > _MOST:
        raise SettingsError(f"--steps {args.steps}: expected at most {_MOST:,}; the noise of each prefix sum is computed")
    limit = args.max_participations
    if limit is None and args.sampling_rate is None:
        limit = 1
    return plan(
        args.mechanism,
        clip=1.0,
        buffer_size=1,
        horizon=args.steps,
        delta=args.delta,
        max_participations=limit,
        min_separation=args.min_separation,
        sampling_rate=args.sampling_rate,
        restart_every=args.restart_every,
        completion=args.completion,
        accountant=args.accountant,
        **goal,
    )


def _facts(planned: Plan) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "mechanism": planned.mechanism,
        "steps": planned.horizon,
        "noise_multiplier": planned.noise_multiplier,
        "epsilon": planned.epsilon(),
        "delta": planned.delta,
        "accountant": planned.accountant,
        "epsilon_rdp": planned.epsilon(accountant="rdp"),
        "max_participations": planned.max_participations,
        "min_separation": planned.min_separation,
        "adjacency": ADJACENCY if planned.sampling_rate is None else SAMPLED_ADJACENCY,
    }
    if planned.sampling_rate is None:
        facts["sensitivity"] = planned.sensitivity()
    else:
        facts["sampling_rate"] = planned.sampling_rate
    if planned.mechanism.startswith("tree"):
        leaves = min(planned.horizon, planned.restart_every or planned.horizon)
        if planned.completion and leaves < planned.horizon:  # a tree that is filled up before the next begins
            leaves = 1 << (leaves - 1).bit_length()
        facts["levels"] = sensitivity.levels(leaves)
    if planned.restart_every is None:
        deviation = planned.noise_multiplier * _prefix(planned) ** 0.5
        facts["prefix_noise_max"], facts["prefix_noise_mean"] = float(deviation.max()), float(deviation.mean())
    else:
        facts["restart_every"], facts["completion"] = planned.restart_every, planned.completion
    return facts


def _prefix(planned: Plan) -> prefix.Variances:
    if planned.mechanism == "gaussian":
        return prefix.of_gaussian(planned.horizon)
    if planned.mechanism == "blt":
        return prefix.of_blt(*sensitivity.constants(planned.horizon), planned.horizon)
    return prefix.of_tree(planned.horizon, honaker=planned.mechanism == "tree-honaker")


def _show(facts: dict[str, Any], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(facts, indent=2))
        return
    levels = f", {facts['levels']} levels" if "levels" in facts else ""
    rdp, times, apart = facts["epsilon_rdp"], facts["max_participations"], facts["min_separation"]
    print(f"{facts['mechanism']}, {facts['steps']:,} server steps{levels}")
    print(f"  noise        {facts['noise_multiplier']:.6g} · clip on the sum{', in each node' if levels else ''}")
    print(f"  epsilon      {facts['epsilon']:.6g} at delta {facts['delta']:g} ({facts['accountant']}; RDP says {rdp:.4g})")
    if "sampling_rate" in facts:
        print(f"  sampling     each client is in each cohort with probability {facts['sampling_rate']:g}")
    else:
        often = "once" if times == 1 else f"{times} times, {apart} steps apart"
        print(f"  one client   takes part at most {often}; sensitivity {facts['sensitivity']:.4g} · clip")
    if "prefix_noise_max" in facts:
        mean, most = facts["prefix_noise_mean"], facts["prefix_noise_max"]
        print(f"  prefix sums  noise of {mean:.4g} · clip on average, {most:.4g} at most, in each weight")
    print(f"  adjacency    {facts['adjacency']}")
