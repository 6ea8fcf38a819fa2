"""A run over a network, once more from its journal: the same bits, whoever was killed on the way."""

import json
import os
import random
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedbuff import toml
from fedbuff.cli import main
from fedbuff.deploy import journal as journals
from fedbuff.deploy import serve as serving
from fedbuff.deploy.journal import read
from fedbuff.deploy.keep import keep_running
from fedbuff.deploy.outbox import Outbox, digest
from fedbuff.deploy.replay import first_difference, replay
from fedbuff.deploy.serve import Service, serve
from fedbuff.deploy.settings import ranges
from fedbuff.deploy.wire import Orders
from fedbuff.deploy.worker import work_of
from fedbuff.report import folder as folders
from fedbuff.report.files import FolderError
from fedbuff.report.run import load
from fedbuff.settings import from_tables

GATEWAYS = {"north": "0-29", "south": "30-59"}
TABLES = {
    "task": {"digits": {"clients": 60}},
    "server": {
        "start": {"refill": {"concurrency": 12}},
        "buffer_size": 3,
        "optimizer": {"momentum": {"lr": 0.5, "beta": 0.5}},
    },
    "client": {"lr": 0.1},
    "until": {"server_steps": 40},
    "deploy": {
        "deadline": 60.0,
        "linger": 0.0,
        "poll": 0.001,
        "checkpoint_every": 0.02,
        "trips_per_message": 1,
        "gateways": GATEWAYS,
    },
}


class Blown(Exception):  # noqa: N818  # it is no error here
    """The fuse has blown, and the server's process with it."""


class Wires:
    """Two gateways with their outboxes, at the other end of a transport that stops the server when its fuse has blown."""

    def __init__(self, folder: Path, tables: dict) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "settings.toml").write_text(toml.dumps(tables))
        self.run = folder / "run"
        self.work = {
            node: work_of(folder / "settings.toml", None, 0, ranges(clients), folder / name)
            for node, (name, clients) in enumerate(GATEWAYS.items(), 1)
        }
        self.replies: dict[str, bytes] = {}
        self.sent, self.fuse, self.whole = 0, None, tables["deploy"].get("keep_journal", True)

    def burn(self) -> None:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise Blown

    def nodes(self):
        self.burn()
        return dict(enumerate(GATEWAYS, 1))

    def push(self, messages):
        """Whatever is acknowledged here must be on the disk by now; the fuse may blow before or after each message."""
        journal = list(read(self.run / "journal")) if self.whole else []
        on_disk = {record.get("trip") for record, _ in journal if record["kind"] in ("update", "sealed", "failed", "refused")}
        names = []
        for node, data in messages:
            self.burn()
            if self.whole:
                assert set(Orders.from_bytes(data).forget) <= on_disk, "acknowledged, and not in the journal"
            self.sent += 1
            names.append(str(self.sent))
            self.replies[names[-1]] = self.work[node](data)
        self.burn()
        return names

    def pull(self, messages):
        self.burn()
        return [(name, self.replies.pop(name)) for name in messages if name in self.replies]


def changed(**deploy: object) -> dict:
    return {**TABLES, "deploy": {**TABLES["deploy"], **deploy}}


def serve_to_the_end(wires: Wires, tables: dict, kills: int = 0, seed: int = 0) -> Path:
    """Serve, with so many kills on the way."""
    rng = random.Random(seed)
    for _ in range(kills):
        wires.fuse = rng.randrange(1, 40)
        with pytest.raises(Blown):
            serve(from_tables(tables), wires.run, wires)
    wires.fuse = None
    serve(from_tables(tables), wires.run, wires)
    return wires.run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose server was killed five times."""
    return serve_to_the_end(Wires(tmp_path_factory.mktemp("killed"), TABLES), TABLES, kills=5)


def test_a_run_that_was_killed_again_and_again_replays_to_the_same_bits(run):
    done = replay(run)
    assert first_difference(done.flat.named(np.array(done.weights)), load_file(run / "weights.safetensors")) is None
    summary = load(run).summary
    assert done.books.server.version == summary["server_steps"] == 40
    assert done.books.trips.ended == summary["trips"]
    assert done.updates >= 3 * 40


def test_what_the_gateways_wrote_down_is_what_the_journal_has(run):
    records = list(read(run / "journal"))
    job = records[0][0]["job"]
    lines = {}
    for name in GATEWAYS:
        outbox = Outbox(run.parent / name / "outbox.sqlite")
        lines |= {trip: (client, found, gone) for trip, client, found, gone in outbox.lines(job)}
        assert not outbox.holding(job)
        outbox.close()
    updates = {record["trip"]: (record["client"], digest(blob)) for record, blob in records if record["kind"] == "update"}
    assert len(updates) == sum(record["kind"] == "update" for record, _ in records)
    for trip, (client, found) in updates.items():
        assert lines[trip] == (client, found, True)


def test_the_command_says_that_it_is_identical(run, capsys):
    assert main(["replay", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["identical"] is True
    assert told["server_steps"] == 40
    assert main(["replay", str(run / "journal")]) == 0
    said = capsys.readouterr().out
    assert f"{told['updates']} updates, 40 server steps" in said
    assert f"sha256 {told['digest']}" in said
    assert "identical to the run's weights.safetensors, bit for bit" in said


def test_the_command_names_the_first_difference_and_fails(run, tmp_path, fedbuff):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    weights = load_file(copy / "weights.safetensors")
    name = sorted(weights)[1]
    weights[name] = weights[name].copy()
    weights[name].flat[5] = np.nextafter(weights[name].flat[5], np.float32(9))
    save_file(weights, copy / "weights.safetensors")
    done = fedbuff("replay", copy, code=1)
    assert f"DIFFERENT from the run's weights.safetensors: {name}[" in done.stdout


def test_a_version_on_the_way_can_be_had(run, tmp_path, capsys):
    out = tmp_path / "weights.safetensors"
    assert main(["replay", str(run), "--until", "40", "--out", str(out)]) == 0
    assert first_difference(load_file(out), load_file(run / "weights.safetensors")) is None
    capsys.readouterr()
    assert main(["replay", str(run), "--until", "17", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["server_steps"] == 17
    assert first_difference(load_file(out), load_file(run / "weights.safetensors")) is not None
    assert main(["replay", str(run), "--until", "41"]) == 2
    assert "--until 41: the journal ends at version 40" in capsys.readouterr().err


def test_measured_durations_become_simulated_ones(run, tmp_path, capsys):
    """A trace has every trip that arrived; a timeline that draws from it has its mean."""
    trace = tmp_path / "durations.csv"
    assert main(["replay", str(run), "--trace", str(trace)]) == 0
    capsys.readouterr()
    header, *rows = [line.split(",") for line in trace.read_text().splitlines()]
    assert header == ["client", "duration", "seconds"]
    durations = np.array([float(row[1]) for row in rows])
    trips = load(run).trips
    arrived = np.isin(trips["outcome"], ("used", "unused", "failed"))
    assert np.array_equal(np.sort(durations), np.sort((trips["end_time"] - trips["start_time"])[arrived]))
    assert sorted(int(row[0]) for row in rows) == sorted(trips["client"][arrived].tolist())
    assert all(0 < float(row[2]) <= float(row[1]) for row in rows)

    error = durations.std() / np.sqrt(50_000)
    how = ["--trips", "50000", "--concurrency", "12", "--buffer-size", "3", "--json"]
    assert main(["timeline", "--trace", str(trace), *how]) == 0
    assert abs(json.loads(capsys.readouterr().out)["duration_mean"] - durations.mean()) < 5 * error
    assert main(["timeline", f"--set=timing.trace.path={trace}", *how]) == 0
    assert abs(json.loads(capsys.readouterr().out)["duration_mean"] - durations.mean()) < 5 * error


def test_an_average_of_versions_is_what_the_run_ends_with_and_is_replayed(tmp_path):
    """Though the server was killed on the way; the last version itself is another."""
    tables = {**TABLES, "server": {**TABLES["server"], "average": 9}, "until": {"server_steps": 20}}
    run = serve_to_the_end(Wires(tmp_path, tables), tables, kills=2)
    done = replay(run)
    kept = load_file(run / "weights.safetensors")
    assert first_difference(done.flat.named(np.array(done.weights)), kept) is None
    assert first_difference(done.flat.named(np.array(done.books.server.weights)), kept) is not None


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_noise_is_replayed_from_the_seed_and_its_key_is_gone_with_the_run(noise, tmp_path, capsys):
    privacy = {"noise_multiplier": 0.5, "delta": 1e-3, "clip": 1.0, "noise": noise, "max_participations": 4}
    tables = {**TABLES, "privacy": privacy, "until": {"server_steps": 10}}
    run = serve_to_the_end(Wires(tmp_path, tables), tables, kills=1)
    if noise == "seeded":
        assert main(["replay", str(run)]) == 0
        assert "identical" in capsys.readouterr().out
    else:
        assert main(["replay", str(run)]) == 2
        told = capsys.readouterr().err
        assert "have one, not private ones that ended" in told
        assert told.count("\n") == 1
        assert not {"journal", "noise.key"} & {path.name for path in run.iterdir()}
        assert not any((run / "checkpoint").iterdir())


def test_noise_is_replayed_while_its_key_is_there(tmp_path, capsys):
    """Of a run that has stopped half-way."""
    privacy = {"noise_multiplier": 0.5, "delta": 1e-3, "clip": 1.0, "noise": "secure", "max_participations": 4}
    tables = {**TABLES, "privacy": privacy}
    wires = Wires(tmp_path, tables)
    wires.fuse = 60
    with pytest.raises(Blown):
        serve(from_tables(tables), wires.run, wires)
    assert main(["replay", str(wires.run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["server_steps"] > 0
    assert told["identical"] is None
    assert main(["replay", str(wires.run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == told["digest"]


def test_what_cannot_be_replayed_is_said_in_one_line(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "journal" / "00000000.journal").rename(copy / "journal" / "00000001.journal")
    (tmp_path / "empty" / "journal").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "00000000.journal").write_bytes(b"")
    for path, told in (
        (copy, "its beginning was deleted (deploy.keep_journal = false)"),
        (tmp_path / "empty", "there is no journal"),
        (tmp_path / "nowhere", "there is no journal"),
        (tmp_path / "other", "it does not begin with the settings of a run"),
    ):
        assert main(["replay", str(path)]) == 2
        said = capsys.readouterr().err
        assert told in said
        assert said.count("\n") == 1


def test_a_short_journal_is_enough_to_go_on(tmp_path, monkeypatch):
    """With keep_journal = false, and a disk that is full just when the checkpoint is written."""
    monkeypatch.setattr(journals, "_SEGMENT", 20_000)
    tables = changed(keep_journal=False)
    wires, write = Wires(tmp_path, tables), folders.write_tensors

    def full(path, *arguments):
        nonlocal room
        room -= path.name == "state.safetensors"
        if room < 0:
            raise FolderError("No space left on device")
        write(path, *arguments)

    monkeypatch.setattr(folders, "write_tensors", full)
    for room in (1, 2, 1, 1):  # noqa: B007  # checkpoints that there is room for
        with pytest.raises(FolderError, match="No space left"):
            serve(from_tables(tables), wires.run, wires)
    monkeypatch.setattr(folders, "write_tensors", write)
    serve(from_tables(tables), wires.run, wires)
    summary = load(wires.run).summary
    assert summary["server_steps"] == 40
    assert not (wires.run / "journal").exists()


def test_without_keep_journal_what_a_checkpoint_has_is_deleted(tmp_path):
    """However small the journal is."""
    tables = changed(keep_journal=False, checkpoint_every=0.0)
    wires = Wires(tmp_path, tables)
    wires.fuse = 60
    with pytest.raises(Blown):
        serve(from_tables(tables), wires.run, wires)
    kept = sorted(path.name for path in (wires.run / "journal").iterdir())
    assert len(kept) == 1 and kept[0] > "00000003.journal"


# ── what was lost ────────────────────────────────────────────────────────────────────────────────────────────────────

PRIVATE = {
    **TABLES,
    "privacy": {"noise_multiplier": 0.5, "delta": 1e-3, "clip": 1.0, "noise": "secure", "max_participations": 4},
}


def half_way(folder: Path, tables: dict) -> Wires:
    """A run whose server was killed on the way, with a checkpoint and a journal."""
    wires = Wires(folder, tables)
    wires.fuse = 60
    with pytest.raises(Blown):
        serve(from_tables(tables), wires.run, wires)
    wires.fuse = None
    assert (wires.run / "checkpoint" / "state.safetensors").exists()
    return wires


@pytest.mark.parametrize("tables", [TABLES, PRIVATE], ids=["plain", "private"])
@pytest.mark.parametrize(
    ("lose", "complaint"),
    [
        (shutil.rmtree, "there is no segment 00000000"),
        (lambda journal: (journal / "00000000.journal").write_bytes(b""), "shorter than it was"),
        (lambda journal: os.truncate(journal / "00000000.journal", 30_000), "shorter than it was"),
    ],
    ids=["removed", "emptied", "shortened"],
)
def test_a_journal_that_a_checkpoint_relies_on_is_missed(lose, complaint, tables, tmp_path):
    """Else updates that were acknowledged would be gone, and noise that was released would hide other sums."""
    wires = half_way(tmp_path, tables)
    lose(wires.run / "journal")
    before = {path: path.read_bytes() for path in sorted(wires.run.rglob("*.journal"))}
    with pytest.raises(FolderError, match=complaint):
        serve(from_tables(tables), wires.run, wires)
    assert {path: path.read_bytes() for path in sorted(wires.run.rglob("*.journal"))} == before, "it was changed all the same"


@pytest.mark.parametrize(
    ("lost", "complaint"),
    [(("noise.key", "checkpoint"), "noise.key is missing"), (("journal", "checkpoint"), "begin in a new folder")],
)
def test_noise_that_was_used_is_not_used_for_other_sums(lost, complaint, tmp_path):
    wires = half_way(tmp_path, PRIVATE)
    for name in lost:
        path = wires.run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(FolderError, match=complaint):
        serve(from_tables(PRIVATE), wires.run, wires)


def test_a_flipped_byte_in_a_checkpoint_is_noticed(tmp_path):
    wires = half_way(tmp_path, TABLES)
    checkpoint = wires.run / "checkpoint" / "state.safetensors"
    data = bytearray(checkpoint.read_bytes())
    data[-1000] ^= 1
    checkpoint.write_bytes(data)
    with pytest.raises(
        FolderError, match=r"is damaged \(its checksum is another\).*remove it: the run goes on from its journal"
    ):
        serve(from_tables(TABLES), wires.run, wires)
    checkpoint.unlink()
    serve(from_tables(TABLES), wires.run, wires)
    assert replay(wires.run).books.server.version == load(wires.run).summary["server_steps"] == 40


def test_a_run_ends_when_every_client_has_taken_part_as_often_as_it_may(tmp_path):
    tables = {**PRIVATE, "privacy": {**PRIVATE["privacy"], "max_participations": 1}, "until": {"server_steps": 1000}}
    serve_to_the_end(Wires(tmp_path, tables), tables, kills=1)
    summary = load(tmp_path / "run").summary
    assert summary["stopped_by"] == "every client has taken part as often as it may: see privacy.max_participations"
    assert summary["server_steps"] == 60 // 3


def test_seconds_that_only_the_journal_knows_of_are_counted(tmp_path):
    wires = half_way(tmp_path, TABLES)
    time.sleep(0.5)
    seconds = [record["time"] for record, _ in read(wires.run / "journal") if "time" in record]
    (wires.run / "checkpoint" / "state.safetensors").unlink()
    with ExitStack() as at_the_end:
        service = Service(from_tables(TABLES), wires.run, at_the_end)
        assert service._before == seconds[-1] > 0


# ── what must not be left ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("by", ["the server", "the keeper"])
@pytest.mark.parametrize("step", ["forget_key", "tidy"])
def test_a_private_run_killed_at_its_very_end_leaves_nothing_behind(step, by, tmp_path, monkeypatch):
    """Between its summary and the deletions."""
    tables = {**PRIVATE, "until": {"server_steps": 10}}
    wires = Wires(tmp_path / "d", tables)

    def die(*_):
        raise Blown

    with monkeypatch.context() as patch, pytest.raises(Blown):
        patch.setattr(*((folders, "forget_key") if step == "forget_key" else (serving, "tidy")), die)
        serve(from_tables(tables), wires.run, wires)
    assert (wires.run / "summary.json").exists()
    assert any((wires.run / "journal").iterdir())
    if by == "the server":
        serve(from_tables(tables), wires.run, wires)
    else:
        (tmp_path / "d" / "app").mkdir()
        (tmp_path / "d" / "app" / "settings.toml").write_text(toml.dumps(tables))
        (tmp_path / "d" / "deployment.toml").write_text('host = "127.0.0.1"\nport = 1\n')
        keep_running(tmp_path / "d")
    assert not {"journal", "noise.key"} & {path.name for path in wires.run.iterdir()}
    assert not any((wires.run / "checkpoint").iterdir())


def test_a_journal_that_lies_elsewhere_is_deleted_there(tmp_path):
    tables = {**PRIVATE, "until": {"server_steps": 10}}
    wires = Wires(tmp_path, tables)
    (tmp_path / "large disk").mkdir()
    wires.run.mkdir()
    (wires.run / "journal").symlink_to(tmp_path / "large disk")
    serve_to_the_end(wires, tables)
    assert not any((tmp_path / "large disk").iterdir())
