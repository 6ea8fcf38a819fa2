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
    """Print a table; a column with a number in it, after the first, is set to the right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for i, name in enumerate(header):
        number = i > 0 and any(line[i][:1].isdigit() for line in body)
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for line in body:
        table.add_row(*line)
    console().print(table)
