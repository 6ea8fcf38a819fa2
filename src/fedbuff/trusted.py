"""The trusted aggregator as a process of its own, whose state survives a kill −9: `python -m fedbuff.trusted FOLDER`.

    with TrustedProcess(folder, policy) as trusted:       # FOLDER/policy.json is written on first use
        slots = trusted.issue([client, …])
        reasons = trusted.submit([seed, …])
        release = trusted.release(version, serials)

Requests go in by stdin and replies come out by stdout, each a length and a message. The state is a journal: a record is on
the disk before its answer is out. A counter beside it stands in for the one in hardware that cannot be turned back.

This process is a SIMULATION of an enclave: it keeps the server's code away from the seeds, but nothing keeps the operator of
the machine away from this process, its memory or its files.
"""

import contextlib
import fcntl
import hashlib
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from fedbuff.secagg import sealing
from fedbuff.secagg.attestation import ReferenceValues, simulated_attester
from fedbuff.secagg.enclave import SNAPSHOT, Enclave, Noise, measurement
from fedbuff.secagg.messages import RefusedError, Release, Reply, Request, Seed
from fedbuff.secagg.policy import TaskPolicy

_MOST = 1 << 30  # bytes in a message


# ── the server's side of the pipe ────────────────────────────────────────────────────────────────────────────────────


class TrustedProcess:
    """The trusted aggregator behind a pipe, with the methods of `Enclave`; a refusal over there is a `RefusedError` here.

    folder    its state; a process that is started again on the same folder goes on where the last one stopped
    version   of the model, when the folder is new
    command   what to run in place of `python -m fedbuff.trusted`
    """

    def __init__(self, folder: Path, policy: TaskPolicy, version: int = 0, command: Sequence[str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / "policy.json"
        if not path.exists():
            try:
                _write_whole(path, policy.to_bytes())
            except OSError as e:
                raise RefusedError(f"{path}: {_why(e)}") from e
        run = [sys.executable, "-m", "fedbuff.trusted"] if command is None else command
        self._process = subprocess.Popen([*run, str(folder), str(version)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            started = self._reply()
        except (RefusedError, ConnectionError):
            self.close()
            raise
        if started.parts != (policy.id,):
            self.close()
            raise RefusedError(f"{folder}: the trusted aggregator there runs another policy")

    @property
    def pid(self) -> int:
        return self._process.pid

    def evidence(self) -> bytes:
        return self._ask(Request("evidence"))[0]

    def version(self) -> int:
        return int.from_bytes(self._ask(Request("version"))[0], "big")

    def accepted(self) -> list[tuple[int, bytes]]:
        return [(int.from_bytes(part[:8], "big"), part[8:]) for part in self._ask(Request("accepted"))]

    def issue(self, clients: Sequence[int]) -> list[bytes]:
        return list(self._ask(Request("issue", tuple(clients))))

    def submit(self, seeds: Sequence[Seed]) -> list[str | None]:
        answers = self._ask(Request("submit", (), tuple(seed.to_bytes() for seed in seeds)))
        return [answer.decode() or None for answer in answers]

    def release(self, version: int, serials: Sequence[int]) -> Release:
        return Release.from_bytes(self._ask(Request("release", (version, *serials)))[0])

    def abort(self, version: int) -> None:
        self._ask(Request("abort", (version,)))

    def ask(self, message: bytes) -> bytes:
        """Any bytes as a message, and the reply's."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            _send(self._process.stdin, message)
            reply = _receive(self._process.stdout)
        except (OSError, ValueError):  # a broken pipe, or one that is closed on this side
            reply = None
        if reply is None:
            raise ConnectionError("the trusted aggregator's process has ended; start it again on the same folder")
        return reply

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def kill(self) -> None:
        """Kill −9, as a crash would."""
        self._process.send_signal(signal.SIGKILL)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, request: Request) -> tuple[bytes, ...]:
        reply = Reply.from_bytes(self.ask(request.to_bytes()))
        if reply.refused:
            raise RefusedError(reply.refused)
        return reply.parts

    def _reply(self) -> Reply:
        assert self._process.stdout is not None
        message = _receive(self._process.stdout)
        if message is None:
            raise ConnectionError("the trusted aggregator's process has ended; start it again on the same folder")
        reply = Reply.from_bytes(message)
        if reply.refused:
            raise RefusedError(reply.refused)
        return reply


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(struct.pack(">I", len(message)) + message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    head = pipe.read(4)
    if len(head) < 4:
        return None
    (size,) = struct.unpack(">I", head)
    if size > _MOST:
        return None
    message = pipe.read(size)
    return message if len(message) == size else None


# ── the process itself ───────────────────────────────────────────────────────────────────────────────────────────────


def main(folder: str, version: str = "0", noise: Noise | None = None) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then closes the pipe
    requests, replies, started = sys.stdin.buffer, sys.stdout.buffer, False
    try:
        policy = TaskPolicy.from_bytes((Path(folder) / "policy.json").read_bytes())
        with Journal(Path(folder)) as journal:
            enclave = opened(journal, policy, int(version), noise)
            _send(replies, Reply("", (policy.id,)).to_bytes())
            started = True
            while (message := _receive(requests)) is not None:
                _send(replies, answered(enclave, message).to_bytes())
    except RefusedError as e:
        with contextlib.suppress(OSError):
            _send(replies, Reply(str(e)).to_bytes())
        return 2
    except BrokenPipeError:
        return 1
    except OSError as e:
        said = f"{folder}: the trusted aggregator's state can't be read or written: {_why(e)}"
        if started:  # no reply: nobody may take a request for refused that may have been written down
            print(said, file=sys.stderr)
        else:
            with contextlib.suppress(OSError):
                _send(replies, Reply(said).to_bytes())
        return 2
    return 0


def opened(journal: "Journal", policy: TaskPolicy, version: int, noise: Noise | None = None) -> Enclave:
    """The enclave whose journal this is, or a new one in an empty folder."""
    attester = simulated_attester(_root(), own_measurement())
    records, counter = journal.read()
    if not records and not counter:
        return Enclave.create(policy, attester, os.urandom, journal.write, noise, version)
    enclave = Enclave.restore(records, counter, policy, attester, journal.write, noise)
    journal.resume(enclave.number)
    return enclave


def answered(enclave: Enclave, message: bytes) -> Reply:
    """What the enclave says to a request."""
    try:
        request = Request.from_bytes(message)
        numbers, parts, now = request.numbers, request.parts, time.time()
        match request.word, len(numbers), len(parts):
            case "evidence", 0, 0:
                return Reply("", (enclave.evidence(now),))
            case "version", 0, 0:
                return Reply("", (enclave.version.to_bytes(8, "big"),))
            case "accepted", 0, 0:
                return Reply("", tuple(serial.to_bytes(8, "big") + digest for serial, digest in enclave.accepted()))
            case "issue", _, 0:
                return Reply("", tuple(enclave.issue(numbers, now)))
            case "submit", 0, _:
                reasons = enclave.submit([Seed.from_bytes(part) for part in parts], now)
                return Reply("", tuple((reason or "").encode() for reason in reasons))
            case "release", count, 0 if count > 0:
                return Reply("", (enclave.release(numbers[0], numbers[1:]).to_bytes(),))
            case "abort", 1, 0:
                enclave.abort(numbers[0])
                return Reply("")
        raise RefusedError(f"request: no {request.word[:20]!r} with {len(numbers)} numbers and {len(parts)} parts")
    except RefusedError as e:
        return Reply(str(e))


class Journal:
    """Records in FOLDER/journal, the newest number in FOLDER/counter; a snapshot starts the journal anew.

    A record is a length, a check sum and the bytes. A tail that is not whole was being written when the process was killed, and
    nobody was answered for it, so it is cut off. A record that can't be written, on a full disk, is cut off at once, and its
    request is refused. Where that can't be (the snapshot has replaced the journal, the counter has moved), the OSError ends the
    process without an answer, as a kill would: the next one may find one more record than was answered for.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = (folder / "lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self._lock.close()
            raise RefusedError(f"{folder}: another trusted aggregator runs on this state") from e
        self._file: int | None = None
        self._whole = 0  # bytes of whole records

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            os.close(self._file)
        self._lock.close()

    def read(self) -> tuple[list[bytes], int]:
        """The records since the last snapshot, and the counter."""
        path, counter = self._folder / "journal", self._counted()
        data = path.read_bytes() if path.exists() else b""
        records, at = [], 0
        while at + 12 <= len(data):
            size = int.from_bytes(data[at : at + 4], "big")
            record = data[at + 12 : at + 12 + size]
            if len(record) < size or _sum(record) != data[at + 4 : at + 12]:
                break
            records.append(record)
            at += 12 + size
        self._whole = at
        return records, counter

    def resume(self, number: int) -> None:
        """Go on after record `number`: cut off what was being written, and count what was not counted, when a kill came."""
        self._open(self._folder / "journal")
        assert self._file is not None
        os.ftruncate(self._file, self._whole)
        self.count(number)

    def write(self, record: bytes) -> None:
        """Put a record on the disk, then the counter; only then may anybody hear of it."""
        framed = struct.pack(">I", len(record)) + _sum(record) + record
        kind, number = struct.unpack(">BQ", record[:9])
        if kind == SNAPSHOT or self._file is None:  # a snapshot: what was before, seeds included, is gone
            try:
                _write_whole(self._folder / "journal", framed)
            except OSError as e:
                if self._file is None or not self._is_open():
                    raise
                raise self._refused(e) from e
            self._open(self._folder / "journal")
            self._whole = len(framed)
            self.count(number)
        else:
            try:
                _write_all(self._file, framed)
                os.fsync(self._file)
                self.count(number)
            except OSError as e:
                if self._counted() >= number:
                    raise
                os.ftruncate(self._file, self._whole)
                os.fsync(self._file)
                raise self._refused(e) from e
            self._whole += len(framed)

    def count(self, number: int) -> None:
        _write_whole(self._folder / "counter", number.to_bytes(8, "big"))

    def _counted(self) -> int:
        path = self._folder / "counter"
        found = path.read_bytes() if path.exists() else bytes(8)
        if len(found) != 8:
            raise RefusedError(f"{path}: expected 8 bytes, found {len(found)}: the counter is damaged")
        return int.from_bytes(found, "big")

    def _is_open(self) -> bool:
        """Whether the file that records are added to is still the journal: no snapshot has replaced it."""
        assert self._file is not None
        return os.path.samestat(os.fstat(self._file), (self._folder / "journal").stat())

    def _refused(self, error: OSError) -> RefusedError:
        return RefusedError(f"{self._folder}: nothing was changed, since it can't be written down: {_why(error)}")

    def _open(self, path: Path) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)


def _sum(record: bytes) -> bytes:
    return hashlib.sha256(record).digest()[:8]


def _why(error: OSError) -> str:
    return f"{error.strerror or error}" + (f" ({Path(error.filename).name})" if isinstance(error.filename, str) else "")


def _write_all(file: int, data: bytes) -> None:
    """All of it, or an OSError: one call may write less than it was given."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _write_whole(path: Path, data: bytes) -> None:
    """There whole or not at all, and on the disk."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write_all(file, data)
            os.fsync(file)
        finally:
            os.close(file)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def own_measurement() -> bytes:
    """The hash of the code that runs in the trusted aggregator: this file and all of `secagg`."""
    files = [Path(__file__), *sorted((Path(__file__).parent / "secagg").glob("*.py"))]
    return measurement(b"".join(file.name.encode() + b"\0" + file.read_bytes() for file in files))


def simulated_reference() -> ReferenceValues:
    """What a client of the simulated enclave accepts: this very code, vouched for by nobody."""
    return ReferenceValues(sealing.signer(_root()), (own_measurement(),), allow_simulated=True)


def _root() -> bytes:
    """The private key that stands in for a maker of hardware: everybody has it, so simulated evidence proves nothing."""
    return hashlib.sha256(b"fedbuff: a simulated root of attestation, known to all").digest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
