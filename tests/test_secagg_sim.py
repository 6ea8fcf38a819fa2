"""A secure buffer in a simulation: bit for bit the plain sum, and nothing else to be seen."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import fedbuff.sim.secure as secure
from fedbuff.core.staleness import polynomial
from fedbuff.secagg import server as server_module
from fedbuff.secagg.messages import Masked, MaskedElements, Release, Seed
from fedbuff.sim.secure import NotFiniteError, SecureAggregation

COMMITTEE = {"helpers": 5, "recovery": 4, "privacy": 2}


def made(mode, buffer_size, length=61, dropout=0.0, like="enclave", **how):
    chosen = SecureAggregation(mode, clip=1.0, like=like, max_staleness=20, dropout=dropout, **COMMITTEE)
    return chosen.buffer(length, buffer_size, polynomial(0.5), seed=7, **how)


def buffers(steps, buffer_size, length=61, first=0):
    """The arguments of `sum`, step after step: mixed staleness, some updates longer than the clip bound, any rows."""
    rng = np.random.default_rng(buffer_size)
    for version in range(steps):
        updates = (rng.standard_normal((2 * buffer_size, length)) * rng.choice([0.01, 0.1, 1.0])).astype(np.float32)
        staleness = np.minimum(version, rng.integers(0, 20, buffer_size)).tolist()
        trips = list(range(version * buffer_size, (version + 1) * buffer_size))
        clients, rows = rng.permutation(3 * buffer_size)[:buffer_size].tolist(), rng.permutation(2 * buffer_size)[:buffer_size]
        if version >= first:
            yield version, trips, clients, staleness, updates, rows.tolist()


@pytest.mark.parametrize("mode", ["enclave", "helpers"])
@pytest.mark.parametrize("buffer_size", [2, 10, 100])
def test_masked_sums_are_the_plain_ones_bit_for_bit(mode, buffer_size):
    masked, plain = made(mode, buffer_size, dropout=0.3), made("plain", buffer_size, like=mode)
    for arguments in buffers(100, buffer_size):
        assert masked.sum(*arguments).tobytes() == plain.sum(*arguments).tobytes()


@pytest.mark.parametrize("mode", ["enclave", "helpers"])
def test_a_plain_sum_is_the_weighted_sum_but_for_the_grid(mode):
    plain = made("plain", 10, like=mode)
    grid = 10 / plain.policy.scale
    for version, trips, clients, staleness, updates, rows in buffers(30, 10):
        exact = np.zeros(61)
        for row, old in zip(rows, staleness, strict=True):
            long = np.linalg.norm(updates[row].astype(float))
            weight = (1 + old) ** -0.5
            weight = weight if mode == "enclave" else round(64 * weight) / 64
            exact += weight * min(1.0, 1.0 / long) * updates[row]
        assert np.allclose(plain.sum(version, trips, clients, staleness, updates, rows), exact, rtol=0, atol=grid + 1e-6)


@pytest.mark.parametrize("mode", ["enclave", "helpers"])
def test_drop_outs_really_happen_and_change_nothing(mode, monkeypatch):
    stages = []
    real = secure._dropped
    monkeypatch.setattr(secure, "_dropped", lambda *args, **kw: stages.append(real(*args, **kw)) or stages[-1])
    masked, plain = made(mode, 10, dropout=0.5), made(mode, 10)
    for arguments in buffers(10, 10):
        assert masked.sum(*arguments).tobytes() == plain.sum(*arguments).tobytes()
    assert {0, 1, 2, None} <= set(stages)  # before any message, between two, and after all but the last
    assert 60 < sum(stage is not None for stage in stages) < 150


@pytest.mark.parametrize("mode", ["enclave", "helpers"])
def test_a_resumed_run_goes_on_with_new_parties_and_the_same_bits(mode):
    first = made(mode, 4)
    whole = [first.sum(*arguments) for arguments in buffers(9, 4)]
    resumed = made(mode, 4, version=5)
    for arguments, expected in zip(buffers(9, 4, first=5), whole[5:], strict=True):
        assert resumed.sum(*arguments).tobytes() == expected.tobytes()


@pytest.mark.parametrize(("mode", "like"), [("plain", "enclave"), ("plain", "helpers"), ("enclave", ""), ("helpers", "")])
def test_updates_that_are_not_finite_are_named_and_leave_no_trace(mode, like):
    buffer, plain = made(mode, 4, like=like or mode), made("plain", 4, like=like or mode)
    version, trips, clients, staleness, updates, rows = next(buffers(1, 4))
    bad = updates.copy()
    bad[rows[1], 3], bad[rows[3], 0] = np.nan, np.inf
    with pytest.raises(NotFiniteError, match="2 updates") as caught:
        buffer.sum(version, trips, clients, staleness, bad, rows)
    assert caught.value.places == [1, 3]
    expected = plain.sum(version, trips, clients, staleness, updates, rows)
    assert buffer.sum(version, trips, clients, staleness, updates, rows).tobytes() == expected.tobytes()


@pytest.mark.parametrize("mode", ["plain", "enclave", "helpers"])
def test_too_stale_an_update_is_an_error_that_says_what_to_do(mode):
    version, trips, clients, _, updates, rows = next(buffers(1, 4))
    with pytest.raises(ValueError, match=r"staleness 21.*max_staleness"):
        made(mode, 4).sum(version + 30, trips, clients, [0, 1, 21, 2], updates, rows)


@pytest.mark.parametrize("mode", ["enclave", "helpers"])
def test_noise_is_the_same_wherever_it_is_added(mode):
    noise = lambda step: np.random.default_rng(step).standard_normal(61)  # noqa: E731
    masked, plain = (made(m, 4, like=mode, noise=noise, noise_bound=8.0) for m in (mode, "plain"))
    silent = made("plain", 4, like=mode)
    for arguments in buffers(5, 4):
        total = masked.sum(*arguments)
        assert total.tobytes() == plain.sum(*arguments).tobytes()
        grid = 5 / plain.policy.scale
        assert np.allclose(total - silent.sum(*arguments), noise(arguments[0]), rtol=0, atol=grid)


@pytest.mark.parametrize(("mode", "like"), [("plain", "enclave"), ("plain", "helpers"), ("enclave", ""), ("helpers", "")])
def test_a_grid_too_coarse_for_the_updates_is_said_once(mode, like, capsys):
    chosen = SecureAggregation(mode, clip=1e6, like=like or mode, **COMMITTEE)
    said = []
    buffer = chosen.buffer(61, 4, polynomial(0.0), say=said.append)
    updates = np.random.default_rng(0).normal(0, 1e-4, (3, 4, 61)).astype(np.float32)
    updates[0] = 0.0  # nothing to be seen yet
    for version in range(3):
        total = buffer.sum(version, [0, 1, 2, 3], [0, 1, 2, 3], [0] * 4, updates[version], [0, 1, 2, 3])
        assert not total.any()
        assert len(said) == (version > 0)
    grid = "0.002" if "enclave" in (mode, like) else "0.25"
    assert said[0].startswith(f"fedbuff: secure_aggregation.clip=1e+06 makes a grid of {grid}, on which 100% of the")
    assert "100% of their length is lost" in said[0] and "\n" not in said[0]
    assert capsys.readouterr().err == ""


def test_of_a_grid_that_is_fine_enough_nothing_is_said(capsys):
    def first(update, clip=1.0):
        buffer = SecureAggregation("plain", clip).buffer(61, 2, polynomial(0.0))
        buffer.sum(0, [0, 1], [0, 1], [0, 0], np.stack([update, update]), [0, 1])
        return capsys.readouterr().err

    usual = np.random.default_rng(0).normal(0, 1e-4, 61).astype(np.float32)
    sparse, tiny, huge = np.zeros(61, np.float32), np.full(61, 1e-12, np.float32), np.full(61, 1.7e308)
    sparse[3] = tiny[3] = 0.1  # numbers that are zero anyway, or next to nothing
    for update in (usual, sparse, tiny, huge):
        assert first(update) == ""
    assert first(usual, clip=1e6).count("\n") == 1  # to stderr, if nobody else is told


def test_settings_that_make_no_sense_are_refused():
    for wrong in ({"mode": "magic"}, {"clip": 0.0}, {"like": "plain"}, {"dropout": 1.0}, {"max_staleness": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SecureAggregation(**{"mode": "enclave", "clip": 1.0, **wrong})
    with pytest.raises(ValueError, match="buffer_size=1"):
        made("enclave", 1)


# ── what the server holds ────────────────────────────────────────────────────────────────────────────────────────────


def seen_by_the_server(monkeypatch, mode, change=None, steps=2, buffer_size=10, length=500, random_bytes=None):
    """Everything that reaches the server, in order, when all updates are the same; `change` replaces that of one client."""
    seen = []

    class EnclaveServer(server_module.EnclaveServer):
        def seed(self, seed):
            seen.append(seed)
            super().seed(seed)

        def masked(self, masked):
            seen.append(masked)
            super().masked(masked)

        def unmask(self, release):
            seen.append(release)
            return super().unmask(release)

    class CommitteeServer(server_module.CommitteeServer):
        def masked(self, masked):
            seen.append(masked)
            super().masked(masked)

        def answer(self, answer):
            seen.append(answer)
            super().answer(answer)

    monkeypatch.setattr(server_module, "EnclaveServer", EnclaveServer)
    monkeypatch.setattr(server_module, "CommitteeServer", CommitteeServer)
    if random_bytes is not None:
        monkeypatch.setattr(secure.secrets, "token_bytes", random_bytes)
    buffer = made(mode, buffer_size, length=length)
    updates = np.full((buffer_size, length), 0.01, np.float32)
    if change is not None:
        updates[3] = change
    for version in range(steps):
        trips = [version * buffer_size + i for i in range(buffer_size)]
        buffer.sum(version, trips, list(range(buffer_size)), [0] * buffer_size, updates, list(range(buffer_size)))
    monkeypatch.undo()
    return seen, buffer


def chi_square(values, cells):
    counts = np.bincount(values, minlength=cells)
    expected = len(values) / cells
    return float(((counts - expected) ** 2).sum() / expected)


@pytest.mark.parametrize("mode", ["enclave", "helpers"])
def test_masked_updates_are_uniform_even_if_all_updates_are_the_same(monkeypatch, mode):
    seen, _ = seen_by_the_server(monkeypatch, mode, steps=20, length=1000)
    masked = [m for m in seen if isinstance(m, Masked | MaskedElements)]
    assert len(masked) == 200
    words = np.concatenate([m.words for m in masked])
    parts = words.view(np.uint8) if mode == "enclave" else (words >> 23).astype(np.uint8)  # 31 bits: the highest eight
    assert 150 < chi_square(parts, 256) < 380  # 255 degrees of freedom: 255 ± 22.6; five standard deviations
    for one in masked:
        own = one.words.view(np.uint8) if mode == "enclave" else (one.words >> 23).astype(np.uint8)
        assert chi_square(own, 256) < 420
    assert len({m.words.tobytes() for m in masked}) == 200
    # without the pad it would be seen at once
    plain = np.full(1000, 0.01, np.float32).view(np.uint8)
    assert chi_square(plain, 256) > 10_000


def counting():
    """Random bytes that are not: the same in both worlds."""
    calls = np.random.default_rng(0)
    return lambda n: calls.bytes(n)


def test_one_clients_data_changes_only_what_its_pad_hides(monkeypatch):
    """Two worlds with the same randomness and another update of client 3, seen by the server up to the release."""
    worlds = [seen_by_the_server(monkeypatch, "enclave", change, steps=1, random_bytes=counting()) for change in (None, -0.02)]
    (here, buffer), (there, _) = worlds
    number = buffer.policy.fixed_point
    difference = number.encode(np.full(500, -0.02, np.float32)) - number.encode(np.full(500, 0.01, np.float32))
    changed = 0
    for a, b in zip(here, there, strict=True):
        assert type(a) is type(b) and len(a.to_bytes()) == len(b.to_bytes())
        match a:
            case Seed():  # the opening is sealed with an ephemeral key that is new each time
                assert (a.slot, a.start, a.version) == (b.slot, b.start, b.version)
                assert (a.digest == b.digest) == (a.locked == b.locked)
            case Masked():
                moved = (b.words - a.words).view(np.int32)
                assert np.array_equal(moved, difference) or not moved.any()
                changed += bool(moved.any())
            case Release():  # the pads' sum does not know the updates
                assert np.array_equal(a.words, b.words)
    assert changed == 1


@pytest.mark.parametrize("mode", ["enclave", "helpers"])
def test_no_seed_is_used_twice(monkeypatch, mode):
    drawn = []

    def recorded(n):
        drawn.append(np.random.default_rng().bytes(n))
        return drawn[-1]

    monkeypatch.setattr(secure.secrets, "token_bytes", recorded)
    buffer = made(mode, 10, dropout=0.3)
    used = []
    real = {"enclave": "fedbuff.secagg.client.mask", "helpers": "fedbuff.secagg.field.uniform"}[mode]
    original = __import__(real.rsplit(".", 1)[0], fromlist=["x"]).__dict__[real.rsplit(".", 1)[1]]

    def watched(first, second):
        used.append(second if mode == "enclave" else (first, second))
        return original(first, second)

    monkeypatch.setattr(real, watched)
    for arguments in buffers(20, 10):
        buffer.sum(*arguments)
    if mode == "enclave":
        assert len(used) >= 200 and len(set(used)) == len(used)  # one pad for each masked update, dropped ones included
    else:
        masks = [seed for seed, length in used if length == 61]
        rows = [seed for seed, length in used if length != 61]
        assert len(rows) >= 200 and len(set(rows)) == len(rows) and not set(rows) & set(masks)
        assert len(set(masks)) == len(rows)  # a mask is drawn to be shared, and once more to be added
    assert {bytes(seed) for seed in used if isinstance(seed, bytes)} <= set(drawn)


# ── the command line ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_demo_shows_both_modes_and_that_attacks_are_refused(fedbuff):
    import json

    shown = json.loads(fedbuff("secagg", "demo", "--weights", 300, "--buffer-size", 3, "--helpers", "5,4,2", "--json").stdout)
    assert shown["enclave"]["exact"] and shown["helpers"]["exact"]
    assert all(attack["refused"] for attack in shown["attacks"])
    assert "SIMULATED" in shown["threats"]["enclave"]
    sizes = {line["message"]: line["size"] for line in shown["enclave"]["messages"]}
    assert sizes["masked update"] == 1 + 40 + 4 + 4 * 300
    text = fedbuff("secagg", "demo", "--weights", 300, "--buffer-size", 3).stdout
    assert "NOT REFUSED" not in text and "masked update" in text and "rolled back" in text


def test_the_bench_measures(fedbuff):
    import json

    found = json.loads(fedbuff("secagg", "bench", "--weights", "2000", "--repeats", 2, "--json", "--quiet").stdout)
    assert found["enclave"]["2000"]["client_mask_ms"] > 0
    assert found["helpers"]["2000"]["32,24,12"]["client_encode_ms"] > 0
    assert found["simulation"]["2000"]["enclave_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "--helpers", "5,5,5"], "privacy < recovery"),
        (["demo", "--helpers", "five"], "expected 3 integers"),
        (["demo", "--buffer-size", "1"], "buffer_size=1"),
        (["demo", "--weights", "0"], "weights=0"),
        (["bench", "--weights", "x"], "expected integers"),
    ],
)
def test_mistakes_are_one_line(fedbuff, arguments, says):
    failed = fedbuff("secagg", *arguments, code=2)
    assert says in failed.stderr and len(failed.stderr.strip().splitlines()) == 1


def test_without_cryptography_it_says_what_to_install():
    code = "import sys; sys.modules['cryptography'] = None; from fedbuff.cli import main; sys.exit(main(['secagg', 'demo']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip() == "fedbuff: secure aggregation needs cryptography: pip install 'fedbuff[secagg]'"


def test_replacing_a_field_of_the_choice_checks_it_again():
    with pytest.raises(ValueError, match="dropout"):
        replace(SecureAggregation("plain", 1.0), dropout=2.0)
