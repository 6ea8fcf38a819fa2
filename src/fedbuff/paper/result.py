"""What an experiment comes to: numbers beside the paper's, claims that hold or don't, and a figure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbuff.report.plot import Plot

FAR = 0.30  # ours may differ from the paper by so much before the report asks why


@dataclass(frozen=True)
class Number:
    """A mean with its standard deviation over seeds, or with `bound` a number that was not enough ("> 600"); see `NOT_RUN`."""

    mean: float
    std: float | None = None
    bound: bool = False

    def text(self, digits: int = 1) -> str:
        """With `digits` after the point; digits < 0: four significant ones.

        >>> Number(67.5, 7.4).text(), Number(600.0, bound=True).text(), Number(0.00102).text(-1)
        ('67.5 ± 7.4', '> 600.0', '0.00102')
        """
        if self == NOT_RUN:
            return "not run"
        if digits < 0:
            return f"{self.mean:.4g}"
        shown = f"{self.mean:,.{digits}f}"
        return f"> {shown}" if self.bound else shown + (f" ± {self.std:,.{digits}f}" if self.std is not None else "")


NOT_RUN = Number(0.0, bound=True)  # more than nothing is all that is known


def spread(values: Sequence[float]) -> Number:
    """Mean and standard deviation; of one value, just that."""
    return Number(mean(values), stdev(values) if len(values) > 1 else None)


def ratio(a: Number, b: Number) -> Number | None:
    """Quotient of two; a bound if only the first is one, nothing if the second is."""
    return None if b.bound or b.mean == 0 or a == NOT_RUN else Number(a.mean / b.mean, bound=a.bound)


def exceeds(a: Number, b: Number) -> bool:
    """Whether `a` is known to be more than `b`: of a number that was not enough, only that it is more is known.

    >>> exceeds(Number(3.0), Number(2.0)), exceeds(Number(2.0, bound=True), Number(3.0)), exceeds(Number(3.0), NOT_RUN)
    (True, False, False)
    """
    return not b.bound and (a.mean >= b.mean if a.bound and a != NOT_RUN else a.mean > b.mean)


@dataclass(frozen=True)
class Pair:
    """One number of the paper beside ours; either may be missing.

    key     its name within the table: explanations in why.toml are kept under it
    group   pairs of one group are in one order in the paper, and should be in ours; "" if their order means nothing
    """

    key: str
    label: str
    paper: Number | None
    ours: Number | None
    group: str = "all"
    digits: int = 1


@dataclass(frozen=True)
class Check:
    """A claim of the paper, whether it holds here, and the numbers that say so."""

    claim: str
    holds: bool
    facts: str

    def text(self) -> str:
        return f"{'holds' if self.holds else 'DOES NOT HOLD'}: {self.claim} ({self.facts})"


@dataclass(frozen=True)
class Result:
    """Everything an experiment found on one dataset; `unit` is that of the numbers, `beside` what they stand beside."""

    pairs: list[Pair]
    unit: str = ""
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plot: "Plot | None" = None
    beside: str = "paper"


# ── as JSON and Markdown ─────────────────────────────────────────────────────────────────────────────────────────────


def as_json(result: Result) -> dict[str, Any]:
    def number(n: Number | None) -> dict[str, Any] | None:
        if n is None:
            return None
        return {"mean": _finite(n.mean), **({} if n.std is None else {"std": n.std}), **({"bound": True} if n.bound else {})}

    return {
        "unit": result.unit,
        "beside": result.beside,
        "rows": [
            {
                "key": p.key,
                "label": p.label,
                "paper": number(p.paper),
                "ours": number(p.ours),
                "group": p.group,
                "digits": p.digits,
            }
            for p in result.pairs
        ],
        "checks": [{"claim": c.claim, "holds": bool(c.holds), "facts": c.facts} for c in result.checks],
        "notes": result.notes,
        "figure": result.plot is not None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def pairs_of(kept: Mapping[str, Any]) -> list[Pair]:
    """The rows of a kept result."""

    def number(n: Mapping[str, Any] | None) -> Number | None:
        return None if n is None else Number(math.inf if n["mean"] is None else n["mean"], n.get("std"), n.get("bound", False))

    return [Pair(r["key"], r["label"], number(r["paper"]), number(r["ours"]), r["group"], r["digits"]) for r in kept["rows"]]


def lines(kept: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and body of the table that people see; a stand-in's numbers are not divided by the paper's."""
    pairs, stand_in = pairs_of(kept), kept["stand_in"]
    with_paper = any(p.paper is not None for p in pairs)
    compared = not stand_in and any(times(p) for p in pairs)
    beside = kept["beside"] + (f" ({kept['paper_dataset']})" if stand_in and kept["beside"] == "paper" else "")
    header = [kept["unit"], *([beside] if with_paper else []), "ours", *(["ours / paper"] if compared else [])]
    body = []
    for p in pairs:
        line = [p.label]
        line += [_text(p.paper, p.digits)] if with_paper else []
        line += [_text(p.ours, p.digits)]
        line += [times(p)] if compared else []
        body.append(line)
    return header, body


def times(pair: Pair) -> str:
    """The quotient of ours and the paper's, where that says something."""
    if pair.paper is None or pair.ours is None or pair.paper.bound or not pair.group:
        return ""
    of = ratio(pair.ours, pair.paper)
    return "" if of is None else f"{'> ' if of.bound else ''}{of.mean:.2f}"


def _text(number: Number | None, digits: int) -> str:
    return "–" if number is None else number.text(digits)


# ── where ours differs ───────────────────────────────────────────────────────────────────────────────────────────────


def differences(pairs: Sequence[Pair]) -> dict[str, str]:
    """By key, how ours differs from the paper's: by more than 30 %, in reaching the target at all, or in its order."""
    found: dict[str, list[str]] = {}
    both = [p for p in pairs if p.paper is not None and p.ours is not None and p.group]
    for p in both:
        assert p.paper is not None and p.ours is not None
        if p.paper.bound or p.ours.bound:
            if p.paper.bound != p.ours.bound and _before(p.paper, p.ours):
                found.setdefault(p.key, []).append(f"{p.ours.text(p.digits)} instead of {p.paper.text(p.digits)}")
        elif abs(p.ours.mean / p.paper.mean - 1) > FAR:
            found.setdefault(p.key, []).append(f"{p.ours.mean / p.paper.mean:.2f} times the paper's")
    for i, p in enumerate(both):
        for q in both[i + 1 :]:
            if p.group == q.group and _before(p.paper, q.paper) * _before(p.ours, q.ours) < 0:
                found.setdefault(q.key, []).append(f"the other way round with {p.label}")
    return {key: "; ".join(words) for key, words in found.items()}


def _before(a: Number | None, b: Number | None) -> int:
    """−1 if a comes first, 1 if b does, 0 if nobody can tell: what a bound stands for is above it, and that is all."""
    assert a is not None and b is not None
    if a.bound or b.bound:
        return int(a.bound and not b.bound and a.mean >= b.mean) - int(b.bound and not a.bound and b.mean >= a.mean)
    return (a.mean > b.mean) - (a.mean < b.mean)
