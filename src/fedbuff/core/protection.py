"""What a server needs of differential privacy: the interface that `privacy/protection.py` fills.

Algorithm 1's DP lines are three calls: an update is clipped and weighted by `factor` when it arrives, its client is noted by
`admit`, and `noise` is added to the sum of a server step before it is divided by K.
"""

from typing import TYPE_CHECKING, Any, Protocol

from fedbuff.core.schedule import Limits
from fedbuff.core.versions import Vector

if TYPE_CHECKING:
    from fedbuff.core.server import Server


class Protection(Protocol):
    @property
    def limits(self) -> Limits:
        """Who may start a trip."""

    def check(self, server: "Server") -> None:
        """ValueError if the promise would not hold for a server with these settings."""

    def factor(self, update: Vector, weight: float) -> float:
        """What to multiply an update by: clipped first, then weighted."""

    def over(self, step: int) -> bool:
        """Whether there is no noise for this server step, nor for any after it."""

    def refusal(self, client: int, step: int) -> str | None:
        """Why a client's update may not be part of this server step, or None."""

    def admit(self, client: int, step: int) -> None:
        """Note that it is."""

    def noise(self, step: int) -> Vector:
        """To be added to the sum of this server step; the same for the same step, whatever happened in between."""

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]: ...

    def restore(self, arrays: dict[str, Any], facts: dict[str, Any]) -> None: ...
