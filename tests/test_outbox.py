"""The outbox: a result that was kept is there until the server says otherwise, whoever was killed."""

import os
import signal
import subprocess
import sys

import pytest

from fedbuff.deploy.outbox import Outbox, digest
from fedbuff.deploy.wire import Result

FIRST, SECOND = Result(4, 7, b"update", 12, 0.25), Result(5, 8, b"", 1, 0.0, "ValueError: no data")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gateway" / "outbox.sqlite"


@pytest.fixture
def outbox(path):
    opened = Outbox(path)
    yield opened
    opened.close()


def test_a_result_is_found_as_it_was_kept(outbox, path):
    outbox.keep("job", [FIRST, SECOND])
    assert outbox.find("job", [4, 5, 6]) == {4: FIRST, 5: SECOND}
    assert outbox.holding("job") == [4, 5]
    again = Outbox(path)
    assert again.find("job", [4, 5, 6]) == {4: FIRST, 5: SECOND}
    again.close()


def test_the_first_result_of_a_trip_is_the_one_that_counts(outbox):
    outbox.keep("job", [FIRST])
    outbox.keep("job", [Result(4, 7, b"another"), SECOND])
    assert outbox.find("job", [4, 5]) == {4: FIRST, 5: SECOND}
    outbox.keep("job", [FIRST, FIRST])
    assert outbox.holding("job") == [4, 5]


def test_a_forgotten_result_leaves_its_line_and_cannot_be_kept_again(outbox):
    outbox.keep("job", [FIRST, SECOND])
    outbox.forget("job", [4, 99])
    assert outbox.find("job", [4, 5]) == {5: SECOND}
    assert outbox.holding("job") == [5]
    outbox.keep("job", [FIRST])
    outbox.forget("job", [4])
    assert outbox.holding("job") == [5]
    assert outbox.lines("job") == [(4, 7, digest(b"update"), True), (5, 8, digest(b""), False)]


def test_runs_do_not_mix(outbox):
    outbox.keep("one", [FIRST])
    outbox.keep("other", [Result(4, 1, b"x")])
    outbox.forget("one", [4])
    assert outbox.holding("one") == []
    assert outbox.find("other", [4]) == {4: Result(4, 1, b"x")}


def test_text_that_is_no_unicode_is_kept_all_the_same(outbox):
    """An exception may quote a file name whose bytes are no text."""
    outbox.keep("job", [Result(4, 7, problem="OSError: \udcff")])
    assert outbox.find("job", [4])[4].problem.startswith("OSError")


def test_nobody_else_can_read_the_updates(outbox, path):
    assert path.parent.stat().st_mode & 0o077 == 0


KEEPER = """
import os, sys
from pathlib import Path
from fedbuff.deploy.outbox import Outbox
from fedbuff.deploy.wire import Result
outbox, trip = Outbox(Path(sys.argv[1])), int(sys.argv[2])
while True:
    results = [Result(trip + i, 0, (trip + i).to_bytes(8, "big") * 5000) for i in range(3)]
    outbox.keep("job", results)
    os.write(1, (trip + 3).to_bytes(8, "big"))
    outbox.forget("job", [trip])
    trip += 3
"""


def test_kill_9_loses_nothing_that_was_kept_and_brings_back_nothing_that_was_forgotten(path):
    expected = 0
    for kill in range(4):
        process = subprocess.Popen([sys.executable, "-c", KEEPER, str(path), str(expected)], stdout=subprocess.PIPE)
        told = b""
        while len(told) < 8 * (5 + 11 * kill):
            told += os.read(process.stdout.fileno(), 1 << 16)
        process.send_signal(signal.SIGKILL)
        told += process.stdout.read()
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        kept = int.from_bytes(told[-8:], "big")
        outbox = Outbox(path)
        lines = outbox.lines("job")
        assert [trip for trip, *_ in lines] == list(range(len(lines)))
        assert len(lines) >= kept > expected
        held = outbox.find("job", range(len(lines)))
        assert {trip for trip, _, _, gone in lines if not gone} == held.keys()
        assert {trip for trip in range(kept) if trip % 3} <= held.keys()
        assert not set(range(expected, kept - 3, 3)) & held.keys()
        assert all(result.payload == trip.to_bytes(8, "big") * 5000 for trip, result in held.items())
        assert all(digest(held[trip].payload) == found for trip, _, found, gone in lines if not gone)
        outbox.close()
        expected = len(lines)
