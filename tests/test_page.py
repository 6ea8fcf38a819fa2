"""The report in a real browser: it loads, draws what it should, and answers to mouse, keyboard, phone, dark and paper."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import fedbuff as fb
from browser import CHROMIUM, Browser
from fedbuff.report import pages
from fedbuff.report.compare import COSTS
from fedbuff.report.digest import Digest, digest

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no browser: the report is not looked at (apt-get install chromium)"),
    pytest.mark.xdist_group("browser"),
]

LINES = "[...document.querySelectorAll('[data-chart=curves] .line')]"
POINTS = f"{LINES}.map(line => [line.dataset.name, line.getAttribute('d').split(/[ML]/).length - 1])"
TIP = "document.querySelector('[data-chart=curves] .tip')"
TICKS = "[...document.querySelectorAll('[data-chart=curves] text[text-anchor=middle]')].map(text => text.textContent)"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def file(run_folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(pages.report([run_folders]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def crowd(run_folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of fifteen groups with long names, some of them without a space, that differ in settings with long paths."""
    one, other = (digest(fb.load(run_folders / f"{name}-seed0")) for name in ("FedAvg", "FedBuff"))
    groups = []
    for i in range(15):
        d = other if i % 2 else one
        name = f"{'long' * 12}{i}" if i % 3 == 0 else f"FedBuff as it is in the paper by its authors, number {i}"
        groups.append(
            dataclasses.replace(d, summary={**d.summary, "algorithm": name}, settings={**d.settings, "dropout": i / 20})
        )
    path = tmp_path_factory.mktemp("crowd") / "report.html"
    path.write_text(pages.runs_page(pages.view(groups), "crowd"), encoding="utf-8")
    return path


@pytest.fixture
def page(chromium: Browser, file: Path) -> Iterator[Browser]:
    """The report, freshly opened on a desk, in the light."""
    chromium.media()
    chromium.size(1200, 900)
    chromium.open(file)
    yield chromium
    assert chromium.complaints == []


def mean_curve(run_folders: Path, name: str, cost: str) -> tuple[np.ndarray, np.ndarray]:
    """Over seeds, by numpy."""
    runs = [fb.load(path).metrics for path in sorted(run_folders.glob(f"{name}-seed*"))]
    x = np.unique([float(f"{m[cost]:.5g}") for metrics in runs for m in metrics])
    lines = [np.interp(x, [m[cost] for m in metrics], [m["accuracy"] for m in metrics]) for metrics in runs]
    return x, np.mean(lines, axis=0)


def test_it_loads_without_a_word_and_draws_every_point(page, run_folders):
    assert page.complaints == []
    for cost in ("trips", "server_steps", "virtual_time"):
        page.click(f"label[for=against-{cost.replace('_', '-')}]")
        expected = [[name, len(mean_curve(run_folders, name, cost)[0])] for name in ("FedAvg", "FedBuff")]
        assert page.run(POINTS) == expected, cost
    assert page.run("document.querySelectorAll('[data-chart=curves] .band').length") == 2
    assert page.run("document.querySelectorAll('[data-chart=curves] .target').length") == 1
    assert page.run("document.querySelectorAll('[data-chart^=active]').length") == 2


def test_pointing_at_a_curve_reads_the_mean_over_seeds(page, run_folders):
    page.point("[data-chart=curves] svg", 0.6)
    shown = page.run(f"{TIP}.hidden ? '' : {TIP}.innerText")
    at = float(re.match(r"([\d,]+) client trips", shown)[1].replace(",", ""))
    for name in ("FedAvg", "FedBuff"):
        x, y = mean_curve(run_folders, name, "trips")
        said = float(re.search(rf"{name}: ([\d.]+) %", shown)[1])
        assert said == pytest.approx(100 * np.interp(at, x, y), abs=0.11)
    page.point("h1")
    assert page.run(f"{TIP}.hidden")


def test_a_click_in_the_legend_hides_a_group_everywhere_and_another_shows_it(page):
    button = "#legend button[data-name=FedAvg]"
    page.click(button)
    assert [name for name, _ in page.run(POINTS)] == ["FedBuff"]
    assert page.run(f"document.querySelector('{button}').getAttribute('aria-pressed')") == "false"
    assert page.run("document.querySelectorAll('[data-chart^=active]').length") == 1
    assert page.run("document.activeElement.dataset.name") == "FedAvg"
    page.click(button)
    assert [name for name, _ in page.run(POINTS)] == ["FedAvg", "FedBuff"]


def test_dragging_zooms_and_the_button_resets(page):
    whole = page.run(TICKS)
    reset = "document.querySelector('[data-reset=curves]')"
    assert page.run(f"{reset}.hidden")
    page.drag("[data-chart=curves] svg", 0.4, 0.6)
    zoomed = [float(tick.replace(",", "")) for tick in page.run(TICKS)]
    span = float(whole[-1].replace(",", ""))
    assert 0.3 * span < min(zoomed) < max(zoomed) < 0.7 * span
    assert not page.run(f"{reset}.hidden")
    page.click("[data-reset=curves]")
    assert page.run(TICKS) == whole
    assert page.run(f"{reset}.hidden")


def test_however_far_one_zooms_no_two_ticks_say_the_same(page):
    said = "[...document.querySelectorAll('[data-chart=curves] svg text[text-anchor=%s]')].map((text) => text.textContent)"
    for _ in range(4):
        page.drag("[data-chart=curves] svg", 0.6, 0.9)
        for anchor in ("end", "middle"):
            texts = page.run(said % anchor)
            assert len(texts) > 1
            assert len(set(texts)) == len(texts)
    page.click("[data-reset=curves]")


def test_strips_of_active_trips_are_zoomed_together(page):
    paths = "[...document.querySelectorAll('[data-chart^=active] .line')].map(line => line.getAttribute('d'))"
    before = page.run(paths)
    page.drag("[data-chart='active 1'] svg", 0.2, 0.4)
    assert all(a != b for a, b in zip(before, page.run(paths), strict=True))


def test_the_keyboard_reads_zooms_and_keeps_its_place(page):
    page.run("document.querySelector('[data-chart=curves]').focus()")
    whole = page.run(TICKS)
    page.press("End")
    last = page.run(f"{TIP}.innerText")
    page.press("Home")
    assert page.run(f"{TIP}.innerText") != last
    page.press("ArrowRight")
    page.press("+")
    assert page.run(TICKS) != whole
    assert page.run("document.activeElement.dataset.chart") == "curves"
    page.press("Escape")
    assert page.run(TICKS) == whole


def test_everything_that_can_be_used_has_a_name(page):
    unnamed = """[...document.querySelectorAll('button, input, [tabindex], summary, img')].filter(e => !(
        e.getAttribute('aria-label') || e.textContent.trim() || e.alt
        || (e.labels && e.labels.length && e.labels[0].textContent.trim()))).map(e => e.outerHTML.slice(0, 80))"""
    assert page.run(unnamed) == []
    assert page.run("document.documentElement.lang") == "en"
    assert page.run("document.title") == "both"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("width", "phone"), [(1200, False), (390, True), (320, True)])
def test_it_fits_and_can_be_read_on_any_screen_by_day_and_night(page, file, dark, width, phone):
    page.media(dark=dark)
    page.size(width, 800, phone)
    page.open(file)
    assert page.run(OVERFLOW) == 0
    page.point("[data-chart=curves] svg", 0.9)
    assert page.run(OVERFLOW) == 0
    for selector in ("h1", ".lead", "figcaption", "td", "thead th", ".chart text", "button", "td.differs"):
        assert contrast(page, selector) >= 4.5, selector
    assert min(line_contrasts(page)) >= 3


@pytest.mark.parametrize(("width", "media"), [(320, ""), (375, ""), (414, ""), (600, ""), (1280, ""), (688, "print")])
def test_with_many_groups_settings_are_broken_at_their_dots_only(page, crowd, width, media):
    page.media(media)
    page.size(width, 800, width < 700)
    page.open(crowd)
    page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    broken = """[...document.querySelectorAll('[data-slot=settings] tbody th')].flatMap(e => [...e.childNodes]).filter(part => {
        const range = document.createRange();
        range.selectNodeContents(part);
        return part.nodeType === Node.TEXT_NODE && range.getClientRects().length !== 1;
    }).map(part => part.textContent)"""
    assert page.run("document.querySelectorAll('[data-slot=settings] tbody th').length") > 20
    assert page.run(broken) == []
    if media != "print":  # paper can't scroll, and is made smaller instead
        box = "document.querySelector('[data-table=differences]')"
        assert page.run(f"{box}.querySelector('tbody th').offsetWidth / {box}.clientWidth") < 0.5  # room for values beside it
        assert page.run(OVERFLOW) == 0


def test_with_long_names_the_summary_still_fits_a_desk_and_columns_of_settings_stay_narrow(page, crowd):
    page.size(1280, 900)
    page.open(crowd)
    box = "document.querySelector('[data-table=summary]')"
    assert page.run(f"{box}.scrollWidth - {box}.clientWidth") == 0
    widths = page.run("[...document.querySelectorAll('[data-table=differences] thead th')].map(e => e.offsetWidth)")
    assert max(widths[1:]) <= 160


def test_no_two_groups_look_alike(page, crowd):
    page.open(crowd)
    looks = ("stroke", "strokeDasharray", "backgroundColor", "borderRadius", "borderWidth")
    for parts in (LINES, "[...document.querySelectorAll('#legend .chip')]", "[...document.querySelectorAll('#summary .chip')]"):
        found = page.run(f"{parts}.map(e => {json.dumps(looks)}.map(name => getComputedStyle(e)[name]).join())")
        assert len(set(found)) == len(found) == 15


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    return float(
        np.dot([0.2126, 0.7152, 0.0722], [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels])
    )


def ratio(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def contrast(page: Browser, selector: str) -> float:
    """Between a text and what lies behind it."""
    colours = page.run(
        f"""(() => {{
            const e = document.querySelector({json.dumps(selector)});
            const style = getComputedStyle(e);
            let ground = e;
            while (ground && getComputedStyle(ground).backgroundColor === 'rgba(0, 0, 0, 0)') ground = ground.parentElement;
            const text = e instanceof SVGElement ? style.fill : style.color;
            return [text, getComputedStyle(ground || document.body).backgroundColor];
        }})()"""
    )
    return ratio(*colours)


def line_contrasts(page: Browser) -> list[float]:
    """Of all seven colours, on the page's ground."""
    colours = page.run(
        """[0, 1, 2, 3, 4, 5, 6].map(i => {
            const chip = document.body.appendChild(document.createElement('span'));
            chip.className = 'chip'; chip.dataset.group = i;
            const colour = getComputedStyle(chip).backgroundColor;
            chip.remove();
            return colour;
        })"""
    )
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert len(set(colours)) == 7
    return [ratio(colour, ground) for colour in colours]


def test_on_paper_it_is_light_without_buttons_and_with_all_settings(page):
    page.media("print", dark=True)
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.run("getComputedStyle(document.querySelector('.controls')).display") == "none"
    page.media()
    assert page.paper().startswith(b"%PDF")
    assert page.run("[...document.querySelectorAll('details')].every(d => d.open)")


def renamed(run_folders: Path, name: str, algorithm: str) -> Digest:
    d = digest(fb.load(run_folders / f"{name}-seed0"))
    return dataclasses.replace(d, summary={**d.summary, "algorithm": algorithm, "task": algorithm})


@pytest.mark.parametrize("name", ["abc\N{RIGHT-TO-LEFT OVERRIDE}def", "\N{HEBREW LETTER ALEF}\N{HEBREW LETTER BET}"])
def test_the_direction_of_a_name_ends_with_it(page, run_folders, tmp_path, name):
    path = tmp_path / "turned.html"
    path.write_text(pages.runs_page(pages.view([renamed(run_folders, n, name) for n in ("FedAvg", "FedBuff")]), "x"))
    page.open(path)
    page.click("label[for=against-virtual-time]")
    page.point("[data-chart=curves] svg", 0.6)
    for selector, characters in ((".lead", "2runs·960trip"), ("[data-chart=curves] .tip div", "0123456789.%(to)")):
        lines = page.run(f"({PLACES})({json.dumps(selector)}, {json.dumps(characters)})")
        assert lines
        for line in lines:
            assert [c for c, _, _ in line] == [c for c, _, _ in sorted(line, key=lambda place: place[1:])], selector


# of each element, these characters one after another, with the line each is in and where in it
PLACES = """(selector, characters) => [...document.querySelectorAll(selector)].map((element) => {
    const [texts, range, found] = [document.createTreeWalker(element, NodeFilter.SHOW_TEXT), document.createRange(), []];
    while (texts.nextNode())
        [...texts.currentNode.data].forEach((c, i) => {
            range.setStart(texts.currentNode, i);
            range.setEnd(texts.currentNode, i + 1);
            const place = range.getBoundingClientRect();
            if (characters.includes(c)) found.push([c, Math.round(place.y), place.x]);
        });
    return found;
})"""


@pytest.mark.parametrize(("width", "phone"), [(1200, False), (390, True)])
def test_a_very_long_word_stays_on_the_page(page, run_folders, tmp_path, width, phone):
    path = tmp_path / "long.html"
    path.write_text(pages.runs_page(pages.view([renamed(run_folders, n, "x" * 300) for n in ("FedAvg", "FedBuff")]), "x"))
    page.size(width, 800, phone)
    page.open(path)
    page.point("[data-chart=curves] svg", 0.6)
    inside = "e => e.getBoundingClientRect().width < e.parentNode.clientWidth + 1 && e.scrollWidth <= e.clientWidth"
    for selector in ("#legend button", ".tip:not([hidden])"):
        assert page.run(f"[...document.querySelectorAll('{selector}')].map({inside})") in ([True], [True, True]), selector
    assert page.run(OVERFLOW) == 0


@pytest.mark.parametrize("rows", [1, 25])
def test_a_curve_of_one_finite_value_is_a_point(page, run_folders, tmp_path, rows):
    """Of a run that diverged after its first evaluation, and of one that had no other."""
    d = digest(fb.load(run_folders / "FedBuff-seed0"))
    gone = {key: column[:rows] if key in COSTS else [column[0], *[None] * (rows - 1)] for key, column in d.curve.items()}
    path = tmp_path / "one.html"
    path.write_text(pages.runs_page(pages.view([dataclasses.replace(d, curve=gone)]), "one"))
    page.open(path)
    x, y, radius = page.run(
        "(() => { const dot = document.querySelector('[data-chart=curves] .dot').getBoundingClientRect();"
        "const chart = document.querySelector('[data-chart=curves] svg').getBoundingClientRect();"
        "return [dot.x - chart.x, dot.y - chart.y, dot.width / 2]; })()"
    )
    assert x >= 40 and y > 0 and radius >= 3
    ticks = page.run(TICKS)
    assert len(ticks) == len(set(ticks)) >= 2
    assert float(ticks[-1].replace(",", "")) >= (1 if rows == 1 else 400)


def test_names_that_are_attacks_do_nothing(page, run_folders, tmp_path):
    from test_report import HOSTILE, hostile

    folder = hostile(run_folders, tmp_path)
    path = tmp_path / "hostile.html"
    path.write_text(pages.report([folder, run_folders / "FedAvg-seed0"], title=HOSTILE), encoding="utf-8")
    page.open(path)
    page.click("#legend button")
    page.click("#legend button")
    page.point("[data-chart=curves] svg", 0.6)
    assert page.run("window.harmed") is None
    assert page.run("document.querySelectorAll('script').length") == 2
    assert page.run("document.querySelector('#legend button').textContent") == HOSTILE
    assert page.complaints == []
