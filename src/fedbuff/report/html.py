"""Blocks of HTML pages, each a single file that opens offline, on a phone and on paper.

Everything that is said is escaped, and a page's content security policy lets no script run but its own, page.js, which draws
figures from numbers in JSON.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

_COLOURS = 7  # in page.css; the next seven groups have them again, with another shape


def page(title: str, sections: Sequence[str], lead: str = "", figures: Mapping[str, Any] | None = None) -> str:
    """A whole HTML document; `sections` are HTML, as `section` makes it, `title` and `lead` are plain text."""
    script, style = (files("fedbuff.report").joinpath(name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'; connect-src 'self'"
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
        f"<header><h1>{escape(title)}</h1>" + (f'<p class="lead">{escape(lead)}</p>' if lead else "") + "</header>",
        "<main>",
        *sections,
        "</main>",
        f'<script type="application/json" id="figures">{in_script(figures)}</script>' if figures is not None else "",
        f"<script>{script}</script>\n</body>\n</html>\n",
    ]
    return "\n".join(part for part in parts if part)


def section(name: str, heading: str, *parts: str) -> str:
    """A part of a page with a heading; `name` is its anchor."""
    return f'<section id="{escape(name)}">\n<h2>{escape(heading)}</h2>\n' + "\n".join(parts) + "\n</section>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def figure(svg: str, caption: str) -> str:
    """A picture: the text of an SVG file, embedded so that its styles stay its own."""
    data = base64.b64encode(svg.encode()).decode()
    said = escape(caption)
    picture = f'<img class="picture" alt="{said}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{picture}<figcaption>{said}</figcaption></figure>"


def table(header: Sequence[str], body: Sequence[Sequence["str | Cell"]], caption: str = "", name: str = "") -> str:
    """A table of plain text, in a frame of its own that scrolls if it is wider than the screen."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    rows = "\n".join(_row(row) for row in body)
    said = f"<caption>{escape(caption)}</caption>" if caption else ""
    label = escape(caption or header[0] or "table")
    of = f' data-table="{escape(name)}"' if name else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"{of}><table>{said}\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
    )


@dataclass(frozen=True)
class Cell:
    """A cell with more than text: a remark below, a bar as long as `share`, a group's colour, or a mark that it differs.

    dotted   it is the path of a setting, to be broken at its dots and nowhere else
    """

    text: str
    remark: str = ""
    share: float | None = None
    group: int | None = None
    differs: bool = False
    dotted: bool = False


def _row(cells: Sequence[str | Cell]) -> str:
    first, *others = (cell if isinstance(cell, Cell) else Cell(cell) for cell in cells)
    named = f'<th scope="row">{_inside(first)}</th>'
    return "<tr>" + named + "".join(f"<td{' class=differs' if c.differs else ''}>{_inside(c)}</td>" for c in others) + "</tr>"


def _inside(cell: Cell) -> str:
    chip = "" if cell.group is None else _chip(cell.group)
    text = escape(cell.text).replace(".", ".<wbr>") if cell.dotted else escape(cell.text)
    bar = "" if cell.share is None else f'<span class="bar" style="width:{100 * cell.share:.1f}%"></span>'
    return chip + text + (f"<small>{escape(cell.remark)}</small>" if cell.remark else "") + bar


def _chip(group: int) -> str:
    return f'<span class="chip" data-group="{group % _COLOURS}" data-lap="{group // _COLOURS}"></span>'


def in_script(value: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028")
