"""Settings files: the same shape as the Python arguments, complete when written, and clear when wrong."""

import dataclasses
import inspect
import tomllib
import typing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedbuff as fb
from fedbuff import settings, toml
from fedbuff.presets import PRESETS
from fedbuff.settings import CHOICES, TASKS, ServerSettings, Settings, change, from_tables, merge, variants

MINIMAL = {
    "task": {"digits": {"clients": 50}},
    "algorithm": {"fedbuff": {"concurrency": 20}},
    "client": {"lr": 0.1},
    "until": {"trips": 100},
}


def changed(*assignments: str) -> settings.Table:
    tables = MINIMAL
    for assignment in assignments:
        tables = change(tables, assignment)
    return tables


def test_a_server_in_a_file_takes_what_server_in_python_takes():
    """ServerSettings spells out for TOML what Server's signature leaves open to any function."""
    in_python = inspect.signature(fb.Server).parameters
    in_file = {f.name: f for f in dataclasses.fields(ServerSettings)}
    assert set(in_file) == set(in_python) - {"weights", "clients", "seed", "available", "protection", "sealed"}
    for name, field in in_file.items():
        if field.default is not dataclasses.MISSING:
            assert field.default == in_python[name].default, name


def test_settings_hold_every_argument_of_simulate():
    arguments = set(inspect.signature(fb.simulate).parameters)
    how = {"out", "resume", "checkpoint_every", "settings", "progress", "workers", "engine", "address", "say"}
    assert {f.name for f in dataclasses.fields(Settings)} - {"name", "deploy"} == arguments - how - {"algorithm"}


def test_choices_are_the_keys_whose_values_are_one_of_several_kinds():
    found = {"algorithm", "task"}
    parts = [ServerSettings, Settings, *TASKS.values(), fb.delay_adaptive, fb.per_client, fb.per_example]
    for part in parts:
        for name, kind in typing.get_type_hints(part).items():
            if sum(dataclasses.is_dataclass(option) for option in typing.get_args(kind)) > 1:
                found.add(name)
    assert found == CHOICES


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "assignments",
    [
        (),
        ("timing.per_client={timing={lognormal={sigma=0.3}}, spread=0.2}", "dropout=0.1", "timeout=5"),
        ("timing.per_example.timing.exponential.mean=2", "availability={period=24, open=8}", "target=0.5", "evaluate_every=7"),
        ("task={synthetic={clients=100, model={mlp={hidden=[3, 4]}}}}", "until.accuracy=0.9"),
    ],
)
def test_a_complete_file_reproduces_the_settings(preset, assignments):
    """settings.toml of a run folder, read again, is the same experiment and the same file."""
    once = from_tables(changed(f"algorithm={preset}", *assignments))
    text = toml.dumps(once.tables())
    again = from_tables(tomllib.loads(text))
    assert toml.dumps(again.tables()) == text
    assert again.name == preset
    assert vars(again.server)["optimizer"] == once.server.optimizer
    assert (again.client, again.timing, again.until) == (once.client, once.timing, once.until)


def test_what_a_file_spells_out_goes_before_its_preset():
    got = from_tables(changed("server.weigh=constant", "server.buffer_size=3", "algorithm.fedbuff.beta=0.5"))
    assert (got.server.weigh, got.server.buffer_size) == (fb.constant(), 3)
    assert got.server.optimizer == fb.momentum(1.0, 0.5)
    assert from_tables(changed("algorithm=fedprox")).client.proximal == 0.01
    assert from_tables(changed("algorithm=fedprox", "client.proximal=0.5")).client.proximal == 0.5


@pytest.mark.parametrize("first", PRESETS)
def test_a_preset_named_later_takes_back_the_earlier_one(first):
    """Also over a complete file, as `fedbuff presets` and every run folder hold: else an algorithm is compared with itself."""
    complete = from_tables(changed(f"algorithm={first}")).tables()
    for second in PRESETS:
        got = from_tables(change(complete, f"algorithm={second}"))
        if second != first:
            assert got.tables() == from_tables(changed(f"algorithm={second}")).tables()
        assert got.name == second
    kept = from_tables(change(changed("server.weigh=constant"), "algorithm.fedbuff.beta=0.5"))
    assert kept.server.weigh == fb.constant()


def test_paths_in_a_file_are_relative_to_it(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "trace.csv").write_text("2.0\n")
    (tmp_path / "deep" / "s.toml").write_text('[timing.per_client]\ntiming.trace.path = "trace.csv"\n')
    assert settings.read(tmp_path / "deep" / "s.toml")["timing"]["per_client"]["timing"]["trace"]["path"] == str(
        (tmp_path / "deep" / "trace.csv").resolve()
    )


def test_numpy_numbers_are_written_as_numbers():
    table = toml.encode(fb.momentum(np.float64(0.5), np.float32(0.25)))
    assert toml.dumps({"optimizer": table}) == "[optimizer]\nmomentum.lr = 0.5\nmomentum.beta = 0.25\n"


def test_another_kind_replaces_and_the_same_kind_is_merged():
    base = {"start": {"cohort": {"size": 5, "over_selection": 0.3}}}
    assert merge(base, {"start": {"refill": {"concurrency": 9}}}) == {"start": {"refill": {"concurrency": 9}}}
    assert merge(base, {"start": {"cohort": {"size": 7}}}) == {"start": {"cohort": {"size": 7, "over_selection": 0.3}}}


def test_variants_are_the_file_with_their_changes():
    tables = {**MINIMAL, "compare": {"slow": {"client": {"lr": 0.01}}, "avg": {"algorithm": {"fedavg": {"concurrency": 20}}}}}
    got = {name: from_tables(table) for name, table in variants(tables).items()}
    assert got["slow"].client.lr == 0.01
    assert got["slow"].server.start == fb.refill(20)
    assert got["avg"].server.start == fb.cohort(20)
    assert [s.name for s in got.values()] == ["slow", "avg"]


@pytest.mark.parametrize(
    ("assignment", "complaint"),
    [
        ("sever.buffer_size=1", "sever = {buffer_size = 1}: unknown key; did you mean server?"),
        (
            "server.bufer_size=1",
            "server.bufer_size = 1: unknown key; did you mean server.buffer_size? (allowed: start, buffer_size",
        ),
        ("server.buffer_size=0", "server.buffer_size=0: expected an integer >= 1"),
        ("server.buffer_size=1.5", "server.buffer_size = 1.5: expected an integer"),
        ("server.buffer_size=ten", 'server.buffer_size = "ten": expected an integer'),
        ("server.mixing=1", "server.mixing = 1: expected true or false"),
        ("server.weight_by=size", 'server.weight_by = "size": expected one of "uniform", "examples"'),
        ("server.weigh=polynomal", 'server.weigh = "polynomal": unknown; did you mean server.weigh.polynomial?'),
        ("server.weigh.polynomial.a=-1", "server.weigh.polynomial.a=-1.0: expected a number >= 0"),
        ("server.weigh=3", "server.weigh = 3: choose one of constant, polynomial, hinge, cutoff"),
        ("server.start.refill.concurency=3", "did you mean server.start.refill.concurrency?"),
        ("server.start={cohort={}}", "server.start.cohort.size: missing"),
        ("server.start={arrivals={}}", "give rate or concurrency"),
        ("server.optimizer.momentum.beta=2", "server.optimizer.momentum.beta=2.0: expected a number >= 0 and <= 1"),
        ("algorithm=fedbuf", 'algorithm = "fedbuf": unknown; did you mean algorithm.fedbuff?'),
        ("algorithm.fedbuff.buffersize=3", "did you mean algorithm.fedbuff.buffer_size?"),
        ("algorithm.fedbuff.concurrency=0", "algorithm.fedbuff.concurrency=0: expected an integer >= 1"),
        ("client.lr=fast", 'client.lr = "fast": expected a number'),
        ('server.weigh="python: mine (0a1b2c3d)"', "a function of a Python program, which a file can't hold"),
        ("client.lr=inf", "client.lr=inf: expected a finite number >= 0"),
        ("tune.client.lr=[1, 2]", "tune: this file is for `fedbuff tune`"),
        ("client.lr=nan", "client.lr=nan: expected a number >= 0"),
        ("client=3", "client = 3: expected a table with lr, epochs"),
        ("client.batch_size=0", "client.batch_size=0"),
        ("timing=gaussian", 'timing = "gaussian": unknown'),
        ("timing.trace.path=nowhere.csv", "nowhere.csv': can't read the trace"),
        ("until.accuracy=90", "until.accuracy=90.0: expected a number >= 0 and <= 1"),
        ("task.digit.clients=3", "did you mean task.digits?"),
        ("seed=1.5", "seed = 1.5: expected an integer"),
        ("compare.a.seed=1", "use `fedbuff compare`"),
        ("server=5", "server = 5: expected a table with start, buffer_size"),
        ("server.optimizer.adam.beta1=1", "server.optimizer.adam.beta1=1.0: expected a number >= 0 and < 1"),
        ("timing.lognormal.sigma=2000", "timing.lognormal.sigma=2000.0: expected a number >= 0 and <= 20"),
        ("timing={per_client={timing={constant={}}, spread=1000}}", "timing.per_client.spread=1000.0"),
        ("availability={period=1e10, open=1}", "availability.open=1.0: expected a number >= 1e+07 and <= 1e+10"),
        ("seed=-1", "seed=-1: expected an integer >= 0"),
        ("dropout=2", "dropout=2.0: expected a number >= 0 and <= 1"),
        ("timeout=0", "timeout=0.0: expected a number > 0"),
        ("target=5", "target=5.0: expected a number >= 0 and <= 1"),
        ("evaluate_every=0", "evaluate_every=0: expected an integer >= 1"),
    ],
)
def test_a_wrong_setting_names_key_value_and_what_is_allowed(assignment: str, complaint: str):
    with pytest.raises(fb.SettingsError) as caught:
        from_tables(changed(assignment))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_sections_are_named():
    with pytest.raises(fb.SettingsError, match="until: give at least one of accuracy, trips, server_steps, virtual_time"):
        from_tables({**MINIMAL, "until": {}})
    for key in ("task", "client", "until"):
        with pytest.raises(fb.SettingsError, match=f"{key}: missing"):
            from_tables({name: table for name, table in MINIMAL.items() if name != key})
    with pytest.raises(fb.SettingsError, match=r"server: missing.*presets: fedbuff, fedasync"):
        from_tables({name: table for name, table in MINIMAL.items() if name != "algorithm"})


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXT, VALUES, max_size=5))
def test_written_toml_reads_back_as_it_was(table):
    assert tomllib.loads(toml.dumps(table)) == table


@given(TEXT, TEXT)
def test_no_assignment_on_the_command_line_crashes(key: str, value: str):
    try:
        from_tables(change(MINIMAL, f"{key}={value}"))
    except fb.SettingsError as e:
        assert str(e)
