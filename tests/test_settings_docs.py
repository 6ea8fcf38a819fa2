"""docs/settings.md lists every key that a settings file may have, with its type and default, and no other."""

import dataclasses
import inspect
import re
import tomllib
import typing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple

import pytest

import fedbuff as fb
from fedbuff import toml
from fedbuff.presets import PRESETS
from fedbuff.settings import CHOICES, TASKS, ServerSettings, Settings, from_tables, variants
from fedbuff.tune.space import METHOD, RANGES, between, check_space, space_of

TEXT = (Path(__file__).parent.parent / "docs" / "settings.md").read_text()
EXAMPLES = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)]
HEADER = ["key", "type", "default", "meaning"]
WORDS = {int: "integer", float: "number", str: "string", bool: "true or false", Any: "string"}


class Key(NamedTuple):
    """What the code knows of a key; a kind to choose has neither."""

    kind: Any = None
    default: Any = inspect.Parameter.empty


# ── what the page says ───────────────────────────────────────────────────────────────────────────────────────────────


def sections() -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Each heading's name, and the rows of the table under it."""
    for part in re.split(r"^##+ ", TEXT, flags=re.MULTILINE)[1:]:
        heading, *lines = part.splitlines()
        table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        if table:
            assert table[0] == HEADER, heading
            assert all(len(row) == len(HEADER) for row in table), heading
            keys = [row[0].strip("`") for row in table[2:]]
            assert len(set(keys)) == len(keys), heading
            yield heading.strip("`"), dict(zip(keys, table[2:], strict=True))


PAGE = dict(sections())


# ── what the code knows ──────────────────────────────────────────────────────────────────────────────────────────────


def keys_of(make: Callable[..., Any]) -> dict[str, Key]:
    """A table's keys, as `toml.decode` takes them."""
    kinds = typing.get_type_hints(getattr(make, "func", make))
    return {name: Key(kinds[name], default_of(make, name)) for name in toml.parameters(make)}


def default_of(make: Callable[..., Any], name: str) -> Any:
    for field in dataclasses.fields(make) if dataclasses.is_dataclass(make) else ():
        if field.name == name and field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
    return toml.parameters(make)[name].default


def given(kind: Any) -> Any:
    """What a value is if it is not left out."""
    kinds = [option for option in typing.get_args(kind) if option is not NoneType]
    return kinds[0] if len(kinds) == 1 and NoneType in typing.get_args(kind) else kind


def options(kind: Any) -> dict[str, Any]:
    """The kinds that a value may be of, by their names; nothing if they are not tables."""
    return {option.__name__: option for option in typing.get_args(kind) if dataclasses.is_dataclass(option)}


def tables() -> dict[str, dict[str, Key]]:
    """Everything that has keys, by its heading in the page."""
    whole = keys_of(Settings)
    parts = {name: given(key.kind) for name, key in whole.items()} | {"server": ServerSettings, "tune": between}
    found = {f"[{name}]": keys_of(kind) for name, kind in parts.items() if dataclasses.is_dataclass(kind)}
    found |= {f"[task.{name}]": keys_of(task) for name, task in TASKS.items()}
    found |= {f"[algorithm.{name}]": keys_of(partial(preset, fb.LocalSGD(lr=0.1))) for name, preset in PRESETS.items()}
    for choice in sorted(CHOICES - {"task", "algorithm"}):
        holders = [keys[choice] for keys in (whole, *found.values()) if choice in keys]
        kinds = {name: kind for key in holders for name, kind in options(key.kind).items()}
        of_kinds = {f"{name}.{key}": known for name, kind in kinds.items() for key, known in keys_of(kind).items()}
        found["[timing.*]" if choice == "timing" else choice] = dict.fromkeys(kinds, Key()) | of_kinds
    elsewhere = dict.fromkeys(("algorithm", "tune", "compare"), Key(dict, None))
    return {"Top level": whole | elsewhere, **found}


CODE = tables()


def words(kind: Any) -> str:
    """A type as the page says it."""
    kind = given(kind)
    if kind is None:
        return "kind"
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(f"`{toml.show(value)}`" for value in typing.get_args(kind))
    if options(kind):
        return "one of " + ", ".join(f"`{name}`" for name in options(kind))
    if typing.get_origin(kind) is tuple and Ellipsis in typing.get_args(kind):
        return f"list of {WORDS[typing.get_args(kind)[0]]}s"
    return WORDS.get(kind, "table")


# ── that they are the same ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_has_a_table_for_every_table_of_a_file():
    assert PAGE.keys() == CODE.keys()


@pytest.mark.parametrize("heading", CODE)
def test_the_page_lists_the_keys_that_the_code_knows(heading):
    assert PAGE[heading].keys() == CODE[heading].keys()


@pytest.mark.parametrize(("heading", "key"), [(heading, key) for heading in CODE for key in CODE[heading]])
def test_a_key_stands_there_with_its_type_default_and_meaning(heading, key):
    known, (_, kind, default, meaning) = CODE[heading][key], PAGE[heading][key]
    assert kind == words(known.kind)
    assert meaning.endswith(".")
    if known.default is inspect.Parameter.empty:
        assert default == ("required" if known.kind else "")
    elif known.default is None:
        assert default == "none"
    else:
        written = tomllib.loads(f"value = {default.strip('`')}")["value"]
        assert toml.decode_value(known.kind, written, key) == known.default


def test_the_top_level_is_what_a_file_may_have_and_what_other_commands_take():
    with pytest.raises(fb.SettingsError, match="unknown key") as caught:
        from_tables({"?": 0})
    allowed = set(str(caught.value).partition("allowed: ")[2].split(", "))
    assert allowed < PAGE["Top level"].keys()
    for key in PAGE["Top level"].keys() - allowed:
        with pytest.raises(fb.SettingsError, match=f"this file .* `fedbuff {key}`"):
            from_tables({key: {}})


def test_the_examples_of_the_page_are_settings():
    whole, tune, compare = EXAMPLES
    assert from_tables(whole)
    assert [from_tables(variant).name for variant in variants(whole | compare).values()] == list(compare["compare"])
    space, rest = space_of(whole | tune, RANGES["narrow"])
    check_space(rest, space)


def test_links_within_the_page_lead_to_a_heading():
    headings = re.findall(r"^##+ (.*)", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert len(anchors) == len(headings)
    assert set(re.findall(r"\]\(#([^)]*)\)", TEXT)) <= anchors


def test_what_can_be_searched_is_named():
    said = re.search(r"Settings of (.*?) and of a task's model can be searched", TEXT)
    assert said is not None
    assert re.findall(r"`(\w+)`", said[1]) == list(METHOD)
