"""What everybody has agreed to before the first update: a task's policy, as canonical bytes, named by their hash.

Clients, the trusted aggregator and the helpers hold the same bytes. A server that would like another buffer size, clip bound or
weight needs another policy, which has another id, and nothing sealed or signed under the first fits it.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Self

from fedbuff.core import check
from fedbuff.secagg.coding import Code
from fedbuff.secagg.fixed_point import FIELD, RING, FixedPoint, finest_scale, fits
from fedbuff.secagg.messages import RefusedError

UNIT = 64  # a weight of 1 as an integer, in helpers mode


@dataclass(frozen=True)
class TaskPolicy:
    """One task under secure aggregation.

    mode             "enclave" or "helpers"
    length           weights of the model
    buffer_size      K: a sum of fewer is never released, and for a sum of more the integers have no room
    clip, scale      an update's largest norm, and what it is multiplied by to become integers
    weights          s(τ) for τ = 0, 1, …; a staler update is refused. Integers in units of 1/`unit` in helpers mode
    lifetime         of a slot, or of a share that nobody asks for, in seconds (or whatever unit the parties' clock has)
    participations   how often one client may take part in all; 0: no limit
    separation       server steps from one participation of a client to its next, at least
    noise            which noise the trusted aggregator adds, in words; `noise_bound` is the largest that fits the integers
    helpers, recovery, privacy   N, U and T of the committee
    """

    mode: str
    length: int
    buffer_size: int
    clip: float
    scale: float
    weights: tuple[float, ...]
    unit: int = 1
    lifetime: float = 86_400.0
    participations: int = 0
    separation: int = 1
    noise: str = "none"
    noise_bound: float = 0.0
    helpers: int = 0
    recovery: int = 0
    privacy: int = 0

    def __post_init__(self) -> None:
        check.one_of(("enclave", "helpers"), mode=self.mode)
        check.integer(1, length=self.length, unit=self.unit, separation=self.separation)
        check.integer(2, buffer_size=self.buffer_size)  # a sum of one is no sum
        check.integer(0, participations=self.participations)
        check.number(0, above=True, lifetime=self.lifetime)
        check.number(0, noise_bound=self.noise_bound)
        if not self.weights:
            raise ValueError("weights: expected s(0), s(1), … up to the largest staleness")
        for staleness, weight in enumerate(self.weights):
            if not 0 <= weight <= self.unit:
                raise ValueError(f"weights[{staleness}]={weight!r}: expected a number >= 0 and <= {self.unit}")
            nothing = weight == 0 if self.mode == "helpers" else weight * self.clip * self.scale < 1  # on the grid
            if nothing:  # a list of K − 1 such updates and one other would show that one
                raise ValueError(
                    f"weights[{staleness}]={weight:g}: an update that weighs nothing hides nobody; end the table before it "
                    f"(max_staleness={staleness - 1})" + ("" if self.mode == "enclave" else ", or take a larger unit")
                )
        if self.mode == "helpers":
            Code(self.helpers, self.recovery, self.privacy)
            if self.unit & (self.unit - 1):
                raise ValueError(f"unit={self.unit}: expected a power of two, so that decoding is exact")
            if any(weight != int(weight) for weight in self.weights):
                raise ValueError("weights: expected integers in helpers mode")
        elif self.unit != 1:
            raise ValueError(f"unit={self.unit}: in enclave mode weights are numbers, and the unit is 1")
        if not fits(self.clip, self.fixed_point.scale, self.terms, self.limit, self.noise_bound * self.unit):
            raise ValueError(
                f"buffer_size={self.buffer_size}, clip={self.clip:g}, scale={self.scale:g}, unit={self.unit}, "
                f"noise_bound={self.noise_bound:g}: the sum may exceed {self.limit:,}; take a smaller scale"
            )

    @property
    def limit(self) -> int:
        """What a sum must stay below."""
        return RING if self.mode == "enclave" else FIELD

    @property
    def terms(self) -> int:
        """How many times the largest number a sum may be."""
        return self.buffer_size * self.unit

    @cached_property
    def fixed_point(self) -> FixedPoint:
        return FixedPoint(self.clip, self.scale)

    @cached_property
    def code(self) -> Code:
        return Code(self.helpers, self.recovery, self.privacy)

    @cached_property
    def id(self) -> bytes:
        return hashlib.sha256(b"fedbuff-policy-v1" + self.to_bytes()).digest()

    def weight(self, start: int, version: int) -> float:
        """The weight of an update that started from `start` and arrives at `version`, or a refusal."""
        if not start <= version:
            raise RefusedError(f"the trip started from version {start}, and the server is at version {version} only")
        if version - start >= len(self.weights):
            raise RefusedError(f"staleness {version - start} exceeds the policy's {len(self.weights) - 1}")
        return self.weights[version - start]

    def to_bytes(self) -> bytes:
        """The one way to write it down: JSON with sorted keys, no spaces, and numbers as Python writes them."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        try:
            table: Any = json.loads(data)
            if not isinstance(table, dict) or table.keys() != {f.name for f in fields(cls)}:
                raise ValueError("expected exactly a policy's fields")
            made = cls(**{**table, "weights": tuple(table["weights"])})
            same = made.to_bytes() == data
        except (ValueError, TypeError, OverflowError, RecursionError) as e:
            raise RefusedError(f"policy: {e}") from e
        if not same:
            raise RefusedError("policy: not in canonical form")
        return made


def enclave_policy(
    length: int,
    buffer_size: int,
    clip: float,
    weigh: Callable[[int], float],
    max_staleness: int,
    noise_bound: float = 0.0,
    **more: Any,
) -> TaskPolicy:
    """The policy for the trusted aggregator with the finest scale that fits."""
    check.integer(2, buffer_size=buffer_size)  # a sum of one is no sum
    scale = finest_scale(clip, buffer_size, RING, noise_bound)
    weights = tuple(float(weigh(staleness)) for staleness in range(max_staleness + 1))
    return TaskPolicy("enclave", length, buffer_size, clip, scale, weights, noise_bound=noise_bound, **more)


def helpers_policy(
    length: int,
    buffer_size: int,
    clip: float,
    weigh: Callable[[int], float],
    max_staleness: int,
    code: Code,
    unit: int = UNIT,
    noise_bound: float = 0.0,
    **more: Any,
) -> TaskPolicy:
    """The policy for a committee with the finest scale that fits; weights become integers, `unit` times themselves."""
    check.integer(2, buffer_size=buffer_size)
    scale = finest_scale(clip, buffer_size * unit, FIELD, noise_bound * unit)
    weights = tuple(round(unit * float(weigh(staleness))) for staleness in range(max_staleness + 1))
    more |= {"helpers": code.helpers, "recovery": code.recovery, "privacy": code.privacy}
    return TaskPolicy("helpers", length, buffer_size, clip, scale, weights, unit=unit, noise_bound=noise_bound, **more)
