"""Tables for a terminal, and 140 columns wide where there is none."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console() -> "Console":
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=140)


def print_table(
    header: Sequence[str], body: Sequence[Sequence[str]], title: str | None = None, caption: str | None = None
) -> None:
    """Print a table; a column after the first is set to the right if most of it are numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for i, name in enumerate(header):
        filled = [line[i] for line in body if line[i] not in ("", "–")]
        numbers = sum(cell.lstrip("> −-")[:1].isdigit() for cell in filled)
        table.add_column(name, justify="right" if i > 0 and 2 * numbers >= len(filled) else "left", overflow="fold")
    for line in body:
        table.add_row(*line)
    console().print(table)
