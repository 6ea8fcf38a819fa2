"""What a network has to do for us: carry bytes to nodes and back. Flower's Grid does; tests have one without a network."""

from collections.abc import Sequence
from typing import Protocol


class Transport(Protocol):
    """Messages to nodes and their answers; nothing here waits."""

    def nodes(self) -> dict[int, str]:
        """The nodes that can be reached now, with the names they are registered under ("" for none)."""
        ...

    def push(self, messages: Sequence[tuple[int, bytes]]) -> list[str | None]:
        """Send these bytes to these nodes; a name for each message, or None for one that could not be sent."""
        ...

    def pull(self, messages: Sequence[str]) -> list[tuple[str, bytes | None]]:
        """Answers to these messages that are there; None is for a message that will not be answered any more."""
        ...
