"""The demo's settings, shipped with the package."""

from pathlib import Path

DEMO = Path(__file__).with_name("demo.toml")
