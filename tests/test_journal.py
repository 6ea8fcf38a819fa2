"""The journal: whatever was committed is there again, wherever the file was cut, whoever was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fedbuff.deploy import journal as journals
from fedbuff.deploy.journal import Journal, Position, read
from fedbuff.report.files import FolderError

FACTS = st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text())
RECORDS = st.lists(st.tuples(FACTS, st.binary(max_size=40)), min_size=1, max_size=6)
SOME = [({"kind": "update", "trip": trip}, bytes([trip]) * (7 * trip % 23)) for trip in range(6)]


def write(folder: Path, records: list) -> list[Position]:
    """Commit these records one by one; where each of them begins, and where the last one ends."""
    with Journal(folder) as journal:
        places = [journal.position]
        for facts, blob in records:
            journal.append(facts, blob)
            journal.commit()
            places.append(journal.position)
    return places


def only_segment(folder: Path) -> Path:
    (path,) = folder.glob("*.journal")
    return path


@given(RECORDS)
@hypothesis_settings(max_examples=50)
def test_what_was_written_is_read_again(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("journal")
    places = write(folder, records)
    assert list(read(folder)) == records
    for n, place in enumerate(places):
        assert list(read(folder, place)) == records[n:]


def test_bytes_of_any_kind_are_written_whole(tmp_path):
    """A vector's memory has elements of four bytes: their number is not the number of bytes."""
    vector = np.arange(5, dtype=np.float32)
    write(tmp_path, [({"kind": "header"}, vector.data), ({"kind": "next"}, b"")])
    (_, blob), (facts, _) = read(tmp_path)
    assert np.array_equal(np.frombuffer(blob, np.float32), vector)
    assert facts == {"kind": "next"}


def test_a_journal_cut_anywhere_opens_with_the_records_before_the_cut_and_goes_on(tmp_path):
    places = write(tmp_path / "whole", SOME)
    whole = only_segment(tmp_path / "whole").read_bytes()
    for cut in range(len(whole) + 1):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / "00000000.journal").write_bytes(whole[:cut])
        before = SOME[: sum(place.offset <= cut for place in places[1:])]
        assert list(read(folder)) == before
        write(folder, [({"kind": "goes on"}, b"!")])
        assert list(read(folder)) == [*before, ({"kind": "goes on"}, b"!")]


@pytest.mark.parametrize("zeros", [1, 11, 16, 5000])
def test_zeros_that_a_power_cut_left_at_the_end_are_cut_off(tmp_path, zeros):
    """A file system may have made the file longer before it wrote what belongs there."""
    places = write(tmp_path, SOME)
    with only_segment(tmp_path).open("ab") as file:
        file.write(bytes(zeros))
    assert list(read(tmp_path)) == SOME
    with Journal(tmp_path) as journal:
        assert journal.position == places[-1]


def test_a_flipped_byte_before_the_last_record_is_an_error_and_nothing_is_cut_off(tmp_path):
    """Also in a length, where the damaged record seems to reach beyond the end of the file."""
    places = write(tmp_path, SOME)
    path = only_segment(tmp_path)
    whole = path.read_bytes()
    for at in range(places[-2].offset):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :])
        with pytest.raises(FolderError, match="damaged"):
            list(read(tmp_path))
        with pytest.raises(FolderError, match="damaged"), Journal(tmp_path):  # finds it at once, or when it is read
            list(read(tmp_path))
        assert len(path.read_bytes()) == len(whole)


def test_flipped_content_of_the_last_record_is_a_record_that_was_being_written(tmp_path):
    places = write(tmp_path, SOME)
    path = only_segment(tmp_path)
    whole = path.read_bytes()
    for at in range(places[-2].offset + 16, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert list(read(tmp_path)) == SOME[:-1]
        with Journal(tmp_path) as journal:
            assert journal.position == places[-2]
        assert path.read_bytes() == whole[: places[-2].offset]


def test_large_segments_are_followed_by_new_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "_SEGMENT", 100)
    places = []
    with Journal(tmp_path) as journal:
        for facts, blob in SOME * 5:
            places.append(journal.position)
            journal.append(facts, blob)
            journal.commit()
            journal.rotate()
    assert len(list(tmp_path.glob("*.journal"))) > 5
    assert list(read(tmp_path)) == SOME * 5
    for n, place in enumerate(places):
        assert list(read(tmp_path, place)) == (SOME * 5)[n:]
    write(tmp_path, SOME)
    assert list(read(tmp_path)) == SOME * 6


def test_a_segment_that_is_missing_or_shorter_than_it_was_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "_SEGMENT", 1)
    with Journal(tmp_path) as journal:
        for facts, blob in SOME:
            journal.append(facts, blob)
            journal.rotate()
    with pytest.raises(FolderError, match=r"00000002\.journal: shorter than it was"):
        list(read(tmp_path, Position(2, 10_000)))
    (tmp_path / "00000003.journal").write_bytes(b"")
    assert len(list(read(tmp_path))) == len(SOME) - 1  # nothing tells an empty segment from one that had nothing in it
    (tmp_path / "00000003.journal").unlink()
    with pytest.raises(FolderError, match="no segment 00000003"):
        list(read(tmp_path))
    with pytest.raises(FolderError, match="no segment 00000009"):
        list(read(tmp_path, Position(9)))


def test_only_the_last_segment_may_be_cut_short(tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "_SEGMENT", 1)
    with Journal(tmp_path) as journal:
        for facts, blob in SOME:
            journal.append(facts, blob)
            journal.rotate()
    path = tmp_path / "00000002.journal"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FolderError, match=r"00000002\.journal: the record at byte 0 is damaged"):
        list(read(tmp_path))


def test_a_commit_returns_when_everything_is_on_the_disk(tmp_path, monkeypatch):
    synced, fdatasync = [], os.fdatasync

    def noted(handle):
        synced.append(os.fstat(handle).st_size)
        fdatasync(handle)

    monkeypatch.setattr(os, "fdatasync", noted)
    with Journal(tmp_path) as journal:
        for facts, blob in SOME:
            journal.append(facts, blob)
            journal.commit()
            assert synced[-1] == journal.position.offset
    assert len(synced) == len(SOME)


def test_updates_are_nobody_elses_to_read(tmp_path):
    write(tmp_path / "journal", SOME)
    assert (tmp_path / "journal").stat().st_mode & 0o077 == 0


WRITER = """
import os, sys
from pathlib import Path
from fedbuff.deploy.journal import Journal
with Journal(Path(sys.argv[1])) as journal:
    number = int(sys.argv[2])
    while True:
        for _ in range(1 + number % 3):
            journal.append({"number": number}, number.to_bytes(4, "big") * (number % 50_000))
            number += 1
        journal.commit()
        os.write(1, number.to_bytes(8, "big"))
"""


def test_kill_9_loses_nothing_that_was_committed(tmp_path):
    expected = 0
    for kill in range(4):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(expected)], stdout=subprocess.PIPE)
        told = b""
        while len(told) < 8 * (10 + 37 * kill):
            told += os.read(process.stdout.fileno(), 1 << 16)
        process.send_signal(signal.SIGKILL)
        told += process.stdout.read()
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        committed = int.from_bytes(told[-8:], "big")
        with Journal(tmp_path):
            pass
        records = list(read(tmp_path))
        assert [facts["number"] for facts, _ in records] == list(range(len(records)))
        assert all(blob == n.to_bytes(4, "big") * (n % 50_000) for n, (_, blob) in enumerate(records))
        assert len(records) >= committed > expected
        expected = len(records)
