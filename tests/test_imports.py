"""Imports point one way, the core stays pure, and `import fedbuff` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedbuff

ROOT = Path(fedbuff.__file__).parent
IMPURE = {"torch", "flwr", "ray", "matplotlib"}
IMPURE |= {"asyncio", "os", "pathlib", "random", "socket", "subprocess", "threading", "time"}

# what each part of the package may import from the rest of it
MAY_IMPORT = {
    "arguments.py": {"settings", "toml"},
    "bench": {"arguments", "bench", "core", "learn", "privacy", "report", "sim", "toml", "version"},
    "core": {"core"},
    "compiled": {"compiled"},
    "deploy": {*("compiled", "core", "deploy", "learn", "report", "secagg", "settings", "sim", "toml", "trusted", "version")},
    "learn": {"compiled", "core", "learn", "toml"},
    "privacy": {"compiled", "core", "privacy"},
    "privacy_command.py": {"privacy", "toml"},
    "report": {"report", "toml", "version"},
    "secagg": {"compiled", "core", "secagg"},
    "settings.py": {"core", "deploy", "learn", "presets", "privacy", "report", "sim", "toml"},
    "trusted.py": {"secagg"},
    "secagg_demo": {"core", "report", "secagg", "secagg_demo", "sim", "trusted"},
    "sim": {"compiled", "core", "learn", "privacy", "report", "secagg", "sim", "toml", "version"},
    "toml.py": {"fingerprint"},
    "fingerprint.py": set(),
    "presets.py": {"core", "learn"},
    "paper": {
        *("arguments", "bench", "core", "learn", "paper", "presets", "privacy", "report", "settings", "sim", "toml", "tune"),
    },
    "tune": {"arguments", "core", "learn", "presets", "report", "settings", "sim", "toml", "tune"},
}
# beside these, timing.py has `trace`, which reads its file when it is made, and fastplan.py loads the same as plan.py compiled
TIMELINE = [*(f"sim/{name}.py" for name in ("timeline", "plan", "steps", "clock", "availability", "until")), "core/trips.py"]


def imports(path: Path) -> set[str]:
    """Everything a file imports, wherever it does so, but for type checking only."""
    found = set()
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(part: str) -> list[Path]:
    return [ROOT / part] if part.endswith(".py") else sorted((ROOT / part).rglob("*.py"))


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_one_way(part):
    for path in files(part):
        inside = {name.split(".")[1] for name in imports(path) if name.startswith("fedbuff.")}
        assert inside <= MAY_IMPORT[part], f"{path.name} imports {inside - MAY_IMPORT[part]}"


def test_the_core_and_the_timeline_are_pure():
    for path in [*files("core"), *(ROOT / name for name in TIMELINE)]:
        outside = {name.split(".")[0] for name in imports(path)}
        assert not outside & IMPURE, f"{path.name} imports {outside & IMPURE}"
        assert outside <= {"fedbuff", "numpy"} | set(sys.stdlib_module_names), path.name


def test_secure_aggregation_is_pure_and_needs_cryptography_in_one_file_only():
    for path in files("secagg"):
        outside = {name.split(".")[0] for name in imports(path)}
        assert not outside & IMPURE, f"{path.name} imports {outside & IMPURE}"
        extra = {"cryptography"} if path.name == "sealing.py" else set()
        assert outside <= {"fedbuff", "numpy"} | extra | set(sys.stdlib_module_names), path.name


def test_privacy_is_pure_and_its_libraries_are_imported_late():
    """No clock, file, thread or global random number; what fedbuff[privacy] installs is needed by a call, not by the import."""
    for path in files("privacy"):
        outside = {name.split(".")[0] for name in imports(path)}
        assert not outside & IMPURE, f"{path.name} imports {outside & IMPURE}"
        assert outside <= {"fedbuff", "numpy", "cryptography", "dp_accounting", "scipy"} | set(sys.stdlib_module_names), (
            path.name
        )
    late = ("cryptography", "dp_accounting", "scipy", "torch")
    code = f"import fedbuff.privacy_command, sys; print([m for m in {late} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_import_fedbuff_brings_no_heavy_library():
    heavy = ("torch", "pyarrow", "matplotlib", "optuna", "rich", "sklearn", "scipy", "PIL", "datasets")
    heavy += ("tensorboard", "mlflow", "http.server", "cryptography", "fedbuff.secagg")
    code = f"import fedbuff, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_documented():
    for name in fedbuff.__all__:
        if not name.startswith("_"):
            assert getattr(fedbuff, name).__doc__, name
