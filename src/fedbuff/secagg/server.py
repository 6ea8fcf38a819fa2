"""The server's half: adds up masked updates, asks for the sum of their masks, and subtracts it. It never holds anything else.

    server.seed(seed); server.masked(masked)      # in any order; when both are there, the pair is `ready`
    server.add(seeds, reasons)                    # what the trusted aggregator said to those in `ready()`
    total = server.unmask(release)                # the sum, as integers

What a client began and did not finish waits until it is forgotten; only complete pairs that the trusted
aggregator has taken are added, so a drop-out between any two messages costs a slot and nothing else.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedbuff.secagg import field, sealing
from fedbuff.secagg.committee import Directory
from fedbuff.secagg.enclave import check_release
from fedbuff.secagg.messages import Answer, List, Masked, MaskedElements, RefusedError, Release, Seed, digest, serial
from fedbuff.secagg.pad import signed
from fedbuff.secagg.policy import TaskPolicy


class EnclaveServer:
    """The masked sum of one buffer at a time, and uploads that are not complete yet.

    check_hashes   that a masked update is the one its seed is for; off in a simulation, where nothing happens on the way
    """

    def __init__(self, policy: TaskPolicy, signer: bytes, check_hashes: bool = True) -> None:
        self.policy, self._signer, self._check_hashes = policy, signer, check_hashes
        self._sum = np.zeros(policy.length, np.uint32)
        self._added: dict[int, bytes] = {}  # serial -> digest
        self._seeds: dict[bytes, Seed] = {}  # by slot
        self._masked: dict[bytes, Masked] = {}

    @property
    def serials(self) -> list[int]:
        """The slots in the masked sum."""
        return list(self._added)

    def seed(self, seed: Seed) -> None:
        self._new(seed.slot, self._seeds)
        if seed.slot in self._masked:
            self._match(seed, self._masked[seed.slot])
        self._seeds[seed.slot] = seed

    def masked(self, masked: Masked) -> None:
        self._new(masked.slot, self._masked)
        if masked.words.shape != (self.policy.length,):
            raise RefusedError(f"masked update: {len(masked.words)} numbers, and the policy's model has {self.policy.length}")
        if masked.slot in self._seeds:
            self._match(self._seeds[masked.slot], masked)
        self._masked[masked.slot] = masked

    def ready(self) -> list[Seed]:
        """Seeds whose masked updates are here as well: to be submitted to the trusted aggregator now."""
        return [seed for slot, seed in self._seeds.items() if slot in self._masked]

    def add(self, seeds: Sequence[Seed], reasons: Sequence[str | None]) -> None:
        """Add the updates whose seeds the trusted aggregator has taken, and drop those it has refused."""
        for seed, reason in zip(seeds, reasons, strict=True):
            del self._seeds[seed.slot]
            masked = self._masked.pop(seed.slot)
            if reason is None:
                self._sum += masked.words
                self._added[serial(seed.slot)] = seed.digest

    def forget(self, slot: bytes) -> None:
        """Drop what is there of an upload that will not be completed."""
        self._seeds.pop(slot, None)
        self._masked.pop(slot, None)

    def unmask(self, release: Release) -> NDArray[np.int64]:
        """The sum of the buffer as integers (plus the noise, if the trusted aggregator adds it); the next buffer is empty."""
        check_release(release, self.policy, self._signer)
        if dict(release.accepted) != self._added:
            raise RefusedError(f"release: for {len(release.accepted)} updates that are not the {len(self._added)} added here")
        if release.words.shape != self._sum.shape:
            raise RefusedError(f"release: {len(release.words)} numbers, expected {len(self._sum)}")
        total = signed(self._sum - release.words).astype(np.int64)
        self._sum.fill(0)
        self._added = {}
        return total

    def state(self) -> bytes:
        pending = sorted(self._seeds.items()), sorted((slot, m.words.tobytes()) for slot, m in self._masked.items())
        return repr((self._added, self._sum.tobytes(), pending)).encode()

    def _match(self, seed: Seed, masked: Masked) -> None:
        """Or else its hash in the release would not be ours, and the whole buffer could not be unmasked."""
        if self._check_hashes and digest(masked.words) != seed.digest:
            raise RefusedError(f"slot {serial(seed.slot)}: the masked update is not the one that its seed is for")

    def _new(self, slot: bytes, known: dict[bytes, Seed] | dict[bytes, Masked]) -> None:
        if slot in known or serial(slot) in self._added:
            raise RefusedError(f"slot {serial(slot)}: uploaded already")


class CommitteeServer:
    """The weighted masked sum of one buffer at a time, at the server's version."""

    def __init__(self, policy: TaskPolicy, directory: Directory, version: int = 0) -> None:
        self.policy, self.version, self._directory = policy, version, directory
        self._sum = np.zeros(policy.length, np.uint64)
        self._lines: dict[bytes, tuple[int, int]] = {}  # mask -> start, weight
        self._clients: set[int] = set()
        self._answers: dict[int, Answer] = {}

    @property
    def count(self) -> int:
        return len(self._lines)

    def masked(self, masked: MaskedElements) -> None:
        """Add an update: staleness is that of its arrival, which is that of the step, since the version changes only there."""
        if masked.words.shape != (self.policy.length,):
            raise RefusedError(f"masked update: {len(masked.words)} numbers, and the policy's model has {self.policy.length}")
        if masked.mask in self._lines or masked.client in self._clients:
            raise RefusedError(f"client {masked.client}: uploaded already")
        weight = int(self.policy.weight(masked.start, self.version))
        if self.count >= self.policy.buffer_size:  # the integers have no room, and the helpers may have been shown the list
            raise RefusedError(
                f"client {masked.client}: the buffer of version {self.version} is full with {self.count} updates; "
                "upload again after its step"
            )
        self._sum = field.add(self._sum, field.scale(masked.words.astype(np.uint64), weight))
        self._lines[masked.mask] = masked.start, weight
        self._clients.add(masked.client)

    def list(self) -> List:
        """What to show to all helpers: a full buffer, to which nothing is added any more."""
        if self.count < self.policy.buffer_size:
            raise RefusedError(
                f"{self.count} updates in the buffer: helpers answer to no list of fewer than {self.policy.buffer_size}"
            )
        return List(self.policy.id, self.version, tuple((mask, *line) for mask, line in self._lines.items()))

    def answer(self, answer: Answer) -> None:
        if answer.digest != self.list().digest() or answer.helper in self._answers:
            raise RefusedError(f"answer of helper {answer.helper}: to another list, or the second one")
        if not sealing.signed_by(self._directory.signer(answer.helper), answer.body(), answer.signature):
            raise RefusedError(f"answer of helper {answer.helper}: not signed by it")
        if answer.words.shape != (self.policy.code.width(self.policy.length),):
            raise RefusedError(f"answer of helper {answer.helper}: {len(answer.words)} numbers")
        self._answers[answer.helper] = answer

    def unmask(self) -> NDArray[np.int64]:
        """The weighted sum of the buffer as integers, from any U answers; the next buffer is empty.

        Answers beyond U are compared with what the others say theirs should be, so that a wrong one is noticed.
        """
        code = self.policy.code
        if len(self._answers) < code.recovery:
            raise RefusedError(f"{len(self._answers)} helpers have answered: the masks' sum needs {code.recovery}")
        shares = {helper: answer.words.astype(np.uint64) for helper, answer in self._answers.items()}
        if not code.agree(shares):
            names = ", ".join(map(str, sorted(shares)))
            raise RefusedError(f"the answers of helpers {names} do not fit together: one or more are wrong")
        total = field.to_signed(field.subtract(self._sum, code.decode(shares, self.policy.length)))
        self._sum.fill(0)
        self._lines, self._clients, self._answers = {}, set(), {}
        self.version += 1
        return total

    def state(self) -> bytes:
        answers = sorted((helper, answer.to_bytes()) for helper, answer in self._answers.items())
        return repr((self.version, self._sum.tobytes(), self._lines, sorted(self._clients), answers)).encode()
