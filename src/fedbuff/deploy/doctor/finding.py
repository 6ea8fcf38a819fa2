"""What a check has found."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """What was found, and what to change if it is not ok."""

    level: Literal["ok", "warning", "error"]
    about: str
    found: str
    change: str = ""

    def __str__(self) -> str:
        return f"{self.level:8} {self.about:19} {self.found}{f' → {self.change}' if self.change else ''}"
