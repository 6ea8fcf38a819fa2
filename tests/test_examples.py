"""The examples and the README's own code run as they stand."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_runs(path, tmp_path):
    done = subprocess.run([sys.executable, "-W", "error", path], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_bring_your_own_takes_fewer_than_20_lines():
    code = (ROOT / "examples" / "bring_your_own.py").read_text().split("import fedbuff as fb\n")[1]
    assert len([line for line in code.splitlines() if line.strip()]) < 20


def test_the_example_settings_run(fedbuff):
    fedbuff("run", ROOT / "examples" / "fedbuff.toml", "--set", "until.trips=200", "--out", "run")


PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "```python" in page.read_text()]


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES])
def test_python_in_the_docs_runs(page, tmp_path):
    """Blocks of one page run one after another, as a reader would paste them."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    code = "\n".join(map(textwrap.dedent, blocks))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")))]
)
def test_links_in_the_docs_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
