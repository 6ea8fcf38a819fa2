"""The trusted aggregator as a real process, really killed: it never releases twice, never reuses a slot, notices rollback."""

import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedbuff.core.staleness import polynomial
from fedbuff.secagg.client import EnclaveClient, check_offer
from fedbuff.secagg.messages import Offer, RefusedError, Reply
from fedbuff.secagg.policy import enclave_policy
from fedbuff.secagg.server import EnclaveServer
from fedbuff.trusted import TrustedProcess, simulated_reference

LENGTH, BUFFER_SIZE = 40, 2
POLICY = enclave_policy(LENGTH, BUFFER_SIZE, 1.0, polynomial(0.5), 5)

# runs the trusted aggregator and kills it −9 at the nth time it touches the disk, a write being half done at every second
DYING = """
import os, signal, sys
from fedbuff.trusted import main
left = int(os.environ["DIE_AT"])
def dying(real, half=None):
    def call(*args, **kw):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if half is not None:
            left -= 1
            if left == 0:
                half(*args)
                os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kw)
    return call
write = os.write
os.write = dying(os.write, lambda file, data: write(file, data[: len(data) // 2]))
os.fsync, os.replace, os.ftruncate = dying(os.fsync), dying(os.replace), dying(os.ftruncate)
sys.exit(main(sys.argv[1], sys.argv[2]))
"""


# runs it on a disk that is full as soon as FULL (a file) is there: half of what is given to the disk is still written
FULL = """
import errno, os, sys
from fedbuff.trusted import main
write = os.write
flag, stage = os.environ["FULL"], os.environ["STAGE"]
def short(file, data):
    if os.path.exists(flag) and os.path.basename(os.readlink(f"/proc/self/fd/{file}")) == stage:
        if len(data) < 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[: len(data) // 2]
    return write(file, data)
os.write = short
sys.exit(main(sys.argv[1], sys.argv[2]))
"""


def update(client: int) -> np.ndarray:
    return (np.random.default_rng(client).standard_normal(LENGTH) / 10).astype(np.float32)


def plain(*clients: int) -> np.ndarray:
    return sum(POLICY.fixed_point.encode(update(client)).astype(int) for client in clients)


def clients_of(trusted: TrustedProcess, count: int = BUFFER_SIZE) -> tuple[EnclaveServer, list[EnclaveClient]]:
    offer = Offer(POLICY.to_bytes(), trusted.evidence(), bytes(40), 0)
    aggregator = check_offer(offer, simulated_reference(), time.time())
    return EnclaveServer(POLICY, aggregator.signer), [EnclaveClient(i, aggregator, os.urandom) for i in range(count)]


def fill(trusted: TrustedProcess) -> EnclaveServer:
    server, clients = clients_of(trusted)
    for i, (client, slot) in enumerate(zip(clients, trusted.issue(range(BUFFER_SIZE)), strict=True)):
        seed, masked = client.upload(slot, 0, 0, update(i))
        server.seed(seed)
        server.masked(masked)
    seeds = server.ready()
    server.add(seeds, trusted.submit(seeds))
    return server


def test_a_buffer_by_way_of_a_process(tmp_path):
    with TrustedProcess(tmp_path / "state", POLICY) as trusted:
        assert trusted.pid != os.getpid()
        server = fill(trusted)
        release = trusted.release(0, server.serials)
        assert np.array_equal(server.unmask(release), plain(0, 1))
        assert trusted.version() == 1
        assert trusted.release(0, [s for s, _ in release.accepted]).to_bytes() == release.to_bytes()
    assert (tmp_path / "state" / "journal").stat().st_mode & 0o777 == 0o600


class Killed:
    """A trusted aggregator that is started again whenever it has been killed, and what the server has to do then."""

    def __init__(self, folder: Path, die_at: int) -> None:
        self.folder, self.deaths = folder, 0
        os.environ["DIE_AT"] = str(die_at)
        self.trusted = self.start([sys.executable, "-c", DYING])

    def start(self, command: list[str] | None = None) -> TrustedProcess:
        try:
            return TrustedProcess(self.folder, POLICY, command=command)
        except ConnectionError:
            self.deaths += 1
            return TrustedProcess(self.folder, POLICY)

    def ask(self, question):
        """The answer, and whether the process died over it, in which case nobody knows whether it has happened."""
        try:
            return question(self.trusted), False
        except ConnectionError:
            self.deaths += 1
            self.trusted.close()
            self.trusted = self.start()
            return None, True


def whole_buffer(folder: Path, die_at: int) -> int:
    """One buffer with a process that dies once, as a careful server would bring it to its end; how often it died."""
    run = Killed(folder, die_at)
    try:
        server, clients = clients_of(run.trusted)
        releases = set()
        slots, died = run.ask(lambda trusted: trusted.issue(range(BUFFER_SIZE)))
        if died:  # slots may be out that nobody has: they expire
            slots = run.trusted.issue(range(BUFFER_SIZE))
        for i, client in enumerate(clients):
            seed, masked = client.upload(slots[i], 0, 0, update(i))
            server.seed(seed)
            server.masked(masked)
            reasons, died = run.ask(lambda trusted, seed=seed: trusted.submit([seed]))
            if died:  # was it taken? either it is there, or it is taken now, never twice
                there = {digest for _, digest in run.trusted.accepted()}
                reasons = [None] if seed.digest in there else run.trusted.submit([seed])
            assert reasons == [None]
            server.add([seed], reasons)
            assert "used before" in run.trusted.submit([seed])[0]
        serials = server.serials
        for _ in range(2):
            release, died = run.ask(lambda trusted: trusted.release(0, serials))
            if died:
                release = run.trusted.release(0, serials)
            releases.add(release.to_bytes())
        with pytest.raises(RefusedError, match="released already"):
            run.trusted.release(0, serials[:1])
        assert run.trusted.version() == 1
        assert len(releases) == 1
        assert np.array_equal(server.unmask(release), plain(*range(BUFFER_SIZE)))
    finally:
        run.trusted.close()
    return run.deaths


def test_killed_between_any_two_writes_it_neither_releases_twice_nor_reuses_a_slot(tmp_path):
    deaths, die_at = 1, 0
    while deaths:
        die_at += 1
        deaths = whole_buffer(tmp_path / str(die_at), die_at)
    assert die_at > 40  # times that it touches the disk in a buffer, and one more at which it lives


def test_state_that_was_rolled_back_is_noticed(tmp_path):
    folder = tmp_path / "state"
    with TrustedProcess(folder, POLICY) as trusted:
        _, clients = clients_of(trusted)
        slots = trusted.issue([0, 1])
        seed, _ = clients[0].upload(slots[0], 0, 0, update(0))
        shutil.copy(folder / "journal", tmp_path / "older")
        assert trusted.submit([seed]) == [None]
    shutil.copy(tmp_path / "older", folder / "journal")
    with pytest.raises(RefusedError, match="rolled back: its last record is 2, and 3 were written"):
        TrustedProcess(folder, POLICY)
    (folder / "journal").unlink()
    with pytest.raises(RefusedError, match="the state was removed"):
        TrustedProcess(folder, POLICY)


def test_one_state_has_one_process_and_one_policy(tmp_path):
    folder = tmp_path / "state"
    with TrustedProcess(folder, POLICY), pytest.raises(RefusedError, match="another trusted aggregator runs"):
        TrustedProcess(folder, POLICY)
    with pytest.raises(RefusedError, match="another policy"):
        TrustedProcess(folder, enclave_policy(LENGTH, 3, 1.0, polynomial(0.5), 5))


def test_nonsense_is_answered_and_leaves_no_trace(tmp_path):
    rng = np.random.default_rng(0)
    with TrustedProcess(tmp_path, POLICY) as trusted:
        before = (tmp_path / "journal").read_bytes()
        for size in [0, 1, 2, 9, 50, 1000, 100_000]:
            assert Reply.from_bytes(trusted.ask(rng.bytes(size))).refused
        assert (tmp_path / "journal").read_bytes() == before
        assert np.array_equal(plain(0, 1), finish(trusted, fill(trusted)))


def finish(trusted: TrustedProcess, server: EnclaveServer) -> np.ndarray:
    return server.unmask(trusted.release(trusted.version(), server.serials))


def test_killed_outright_it_goes_on_where_it_was(tmp_path):
    trusted = TrustedProcess(tmp_path, POLICY)
    server = fill(trusted)
    trusted.kill()
    with pytest.raises(ConnectionError, match="start it again"):
        trusted.version()
    with TrustedProcess(tmp_path, POLICY) as again:
        assert np.array_equal(finish(again, server), plain(0, 1))


def full_disk(tmp_path: Path, monkeypatch, stage: str) -> tuple[TrustedProcess, Path]:
    """A process whose disk can be filled, where it writes the file `stage`, by touching the path."""
    full = tmp_path / "full"
    monkeypatch.setenv("FULL", str(full))
    monkeypatch.setenv("STAGE", stage)
    return TrustedProcess(tmp_path / "state", POLICY, command=[sys.executable, "-c", FULL]), full


@pytest.mark.parametrize("stage", ["journal", "counter.tmp"])
def test_what_can_not_be_written_down_is_refused_and_leaves_no_trace(tmp_path, monkeypatch, stage):
    trusted, full = full_disk(tmp_path, monkeypatch, stage)
    journal = tmp_path / "state" / "journal"
    with trusted:
        server, clients = clients_of(trusted)
        slots = trusted.issue(range(BUFFER_SIZE))
        before = journal.read_bytes()
        work = [client.upload(slot, 0, 0, update(i)) for i, (client, slot) in enumerate(zip(clients, slots, strict=True))]
        full.touch()
        for ask in (lambda: trusted.submit([work[0][0]]), lambda: trusted.issue([7]), lambda: trusted.submit([work[1][0]])):
            with pytest.raises(RefusedError, match=r"nothing was changed, since it can't be written down: No space left"):
                ask()
            assert journal.read_bytes() == before
        assert trusted.accepted() == []
        full.unlink()  # somebody has tidied up
        for seed, masked in work:
            server.seed(seed)
            server.masked(masked)
        seeds = server.ready()
        server.add(seeds, trusted.submit(seeds))
    with TrustedProcess(tmp_path / "state", POLICY) as again:
        assert np.array_equal(finish(again, server), plain(0, 1))


def test_a_release_that_can_not_be_written_down_is_refused_and_can_be_had_later(tmp_path, monkeypatch):
    trusted, full = full_disk(tmp_path, monkeypatch, "journal.tmp")
    with trusted:
        server = fill(trusted)
        full.touch()
        with pytest.raises(RefusedError, match="can't be written down: No space left"):
            trusted.release(0, server.serials)
        assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["counter", "journal", "lock", "policy.json"]
        full.unlink()
        assert np.array_equal(finish(trusted, server), plain(0, 1))


def test_a_release_that_may_have_been_written_down_is_not_answered(tmp_path, monkeypatch, capfd):
    """The snapshot has replaced the journal and can't be counted: it ends, in one line, and the next process has it."""
    trusted, full = full_disk(tmp_path, monkeypatch, "counter.tmp")
    server = fill(trusted)
    full.touch()
    with trusted, pytest.raises(ConnectionError, match="start it again"):
        trusted.release(0, server.serials)
    said = capfd.readouterr().err
    assert said == f"{tmp_path / 'state'}: the trusted aggregator's state can't be read or written: No space left on device\n"
    with TrustedProcess(tmp_path / "state", POLICY) as again:
        assert again.version() == 1
        assert np.array_equal(server.unmask(again.release(0, server.serials)), plain(0, 1))


def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path):
    """The kernel's own short write: a part of the record fits, and no more."""
    code = (
        "import resource, sys; from fedbuff.trusted import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)); sys.exit(main(sys.argv[1], sys.argv[2]))"
    )
    issued = 0
    with TrustedProcess(tmp_path, POLICY, command=[sys.executable, "-c", code]) as trusted:
        with pytest.raises(RefusedError, match="can't be written down: File too large"):
            for issued in range(400):
                trusted.issue([issued])
        assert issued > 5 and trusted.version() == 0
    with TrustedProcess(tmp_path, POLICY) as again:
        assert np.array_equal(finish(again, fill(again)), plain(0, 1))


def test_a_state_that_can_not_be_read_is_one_line(tmp_path, capfd):
    for number, name in enumerate(("journal", "counter", "lock")):
        folder = tmp_path / str(number)
        TrustedProcess(folder, POLICY).close()
        (folder / name).unlink()
        (folder / name).mkdir()
        with pytest.raises(RefusedError, match=rf"{folder}: .* can't be read or written: Is a directory \({name}\)"):
            TrustedProcess(folder, POLICY)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [(Path.unlink, "turned back, or lost"), (lambda path: path.write_bytes(b"abc"), "expected 8 bytes, found 3")],
)
def test_a_counter_that_is_damaged_or_gone_is_missed(harm, complaint, tmp_path):
    with TrustedProcess(tmp_path, POLICY) as trusted:
        fill(trusted)
    harm(tmp_path / "counter")
    with pytest.raises(RefusedError, match=complaint):
        TrustedProcess(tmp_path, POLICY)


def test_with_noise_inside_the_server_gets_sum_plus_noise(tmp_path):
    noisy = enclave_policy(LENGTH, BUFFER_SIZE, 1.0, polynomial(0.5), 5, noise_bound=10.0, noise="gaussian")
    code = (
        "import sys; import numpy as np; from fedbuff.trusted import main\n"
        f"sys.exit(main(sys.argv[1], sys.argv[2], lambda step: np.random.default_rng(step).standard_normal({LENGTH})))"
    )
    with TrustedProcess(tmp_path, noisy, version=3, command=[sys.executable, "-c", code]) as trusted:
        offer = Offer(noisy.to_bytes(), trusted.evidence(), bytes(40), 0)
        aggregator = check_offer(offer, simulated_reference(), time.time())
        server = EnclaveServer(noisy, aggregator.signer)
        for i, slot in enumerate(trusted.issue(range(BUFFER_SIZE))):
            seed, masked = EnclaveClient(i, aggregator, os.urandom).upload(slot, 3, 3, update(i))
            server.seed(seed)
            server.masked(masked)
        seeds = server.ready()
        server.add(seeds, trusted.submit(seeds))
        total = server.unmask(trusted.release(3, server.serials))
    noise = np.random.default_rng(3).standard_normal(LENGTH)
    clear = sum(noisy.fixed_point.encode(update(i)).astype(int) for i in range(BUFFER_SIZE))
    assert np.array_equal(total, clear + np.floor(noise * noisy.scale + 0.5))
