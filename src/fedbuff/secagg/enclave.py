"""The trusted aggregator: adds up the pads of a buffer and hands out their sum, once, for exactly the updates it accepted.

    enclave = Enclave.create(policy, attester, random_bytes)
    enclave.issue([client, …], now)         # slots, to hand out at check-in
    enclave.submit([seed, …], now)          # per seed None, or why it is refused
    enclave.release(version, serials)       # a signed `Release`

It never sees an update, masked or not: a seed comes in, is expanded, added to one vector and forgotten. So its memory is a few
vectors however large K is. It decides by itself what the server must not: how many updates make a buffer, which version it
steps from, that a slot is used once and a client is in a buffer once.

**Write-ahead.** Every change is first given to `write` as a record, which returns when the record is safe; only then does the
state change, and only then comes the answer. `restore(records)` is the same enclave again. Records are numbered; if the
newest number is behind a counter that nobody can turn back, the state was rolled back, and there is no enclave.
"""

import hashlib
import hmac
import json
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.core import check
from fedbuff.secagg import sealing
from fedbuff.secagg.attestation import Attester, report_data
from fedbuff.secagg.messages import NAME, SESSION_SEALED, Reader, RefusedError, Release, Seed, Slot, text_bytes, words_bytes
from fedbuff.secagg.pad import SEED, expand
from fedbuff.secagg.policy import TaskPolicy
from fedbuff.secagg.sealing import RandomBytes

Noise = Callable[
    [int], NDArray[np.float64]
]  # server step -> increment, on the sum, in units of the update; the same whenever asked
Write = Callable[[bytes], None]

SNAPSHOT, _ISSUED, _ACCEPTED = 0x31, 0x32, 0x33  # kinds of records; a snapshot makes all earlier ones unnecessary


def session_info(policy: bytes, epoch: bytes, client: int) -> bytes:
    return b"fedbuff-session-v1" + policy + epoch + struct.pack(">Q", client)


def seed_info(policy: bytes, epoch: bytes, seed: Seed) -> bytes:
    return b"fedbuff-seed-v1" + policy + epoch + seed.bound()


class Enclave:
    """The trusted aggregator's state: keys, slots that are out, the open buffer, the last release, who took part when."""

    def __init__(
        self,
        facts: dict[str, Any],
        policy: TaskPolicy,
        attester: Attester,
        write: Write | None = None,
        noise: Noise | None = None,
    ) -> None:
        if policy.mode != "enclave":
            raise ValueError(f"mode={policy.mode!r}: the trusted aggregator takes a policy of mode 'enclave'")
        if (noise is None) != (policy.noise == "none"):
            raise ValueError(
                f"the policy says noise={policy.noise!r}, and a source of noise {'is missing' if noise is None else 'is there'}"
            )
        self.policy, self._attester, self._write, self._noise = policy, attester, write, noise
        self._facts = facts  # what survives a buffer; ready for JSON
        self._sum = np.zeros(policy.length, "<u4")  # of the pads
        self._room = np.empty(policy.length, "<u4")
        self._accepted: dict[int, tuple[int, bytes, bytes]] = {}  # serial -> client, digest, seed
        self._released: Release | None = None

    @classmethod
    def create(
        cls,
        policy: TaskPolicy,
        attester: Attester,
        random_bytes: RandomBytes,
        write: Write | None = None,
        noise: Noise | None = None,
        version: int = 0,
    ) -> "Enclave":
        """A new enclave in a new epoch: with keys of its own, at the model's `version`."""
        check.integer(0, version=version)
        keys = {name: random_bytes(32).hex() for name in ("private", "signing", "slots")}
        facts = {
            **keys,
            "policy": policy.id.hex(),
            "epoch": random_bytes(NAME).hex(),
            "number": 0,  # of the last record
            "version": version,
            "serial": 0,  # of the next slot
            "out": {},  # slots that are out: serial -> expiry
            "sessions": {},  # client -> key
            "took_part": {},  # client -> versions, only if the policy limits it
        }
        enclave = cls(facts, policy, attester, write, noise)
        enclave._keep(facts, None)
        return enclave

    # ── what it tells anybody ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def epoch(self) -> bytes:
        return bytes.fromhex(self._facts["epoch"])

    @property
    def version(self) -> int:
        """The version that the open buffer's step starts from: server steps released so far, and those before this epoch."""
        return int(self._facts["version"])

    @property
    def number(self) -> int:
        """How many records were written."""
        return int(self._facts["number"])

    def evidence(self, now: float) -> bytes:
        """Its keys and its epoch, then the attester's evidence for them."""
        public, signer = sealing.public(self._key("private")), sealing.signer(self._key("signing"))
        return public + signer + self.epoch + self._attester(report_data(public, signer, self.policy.id, self.epoch), now)

    def accepted(self) -> list[tuple[int, bytes]]:
        """What is in the open buffer: serial numbers of slots and digests, for a server that lost count."""
        return [(serial, digest) for serial, (_, digest, _) in self._accepted.items()]

    # ── what it does ─────────────────────────────────────────────────────────────────────────────────────────────────

    def issue(self, clients: Sequence[int], now: float) -> list[bytes]:
        """A slot for each of these clients."""
        expiry, first = now + self.policy.lifetime, self._facts["serial"]
        if not math.isfinite(expiry) or any(not 0 <= client < 1 << 64 for client in clients):
            raise RefusedError("issue: expected a time, and clients as numbers below 2⁶⁴")
        expired = [serial for serial, until in self._facts["out"].items() if until < now]
        self._record(
            _ISSUED,
            struct.pack(">QdQI", first, expiry, len(clients), len(expired)) + struct.pack(f">{len(expired)}Q", *expired),
        )
        self._apply_issue(first, expiry, len(clients), expired)
        slots = (Slot(first + i, client, expiry) for i, client in enumerate(clients))
        return [slot.body() + self._tag(slot) for slot in slots]

    def submit(self, seeds: Sequence[Seed], now: float) -> list[str | None]:
        """Take these seeds into the open buffer, each if it may be; for each None, or why it is refused."""
        reasons: list[str | None] = []
        taken: dict[int, tuple[int, bytes, bytes]] = {}
        sessions: dict[int, bytes] = {}
        present = {client for client, _, _ in self._accepted.values()}
        for seed in seeds:
            try:
                slot, secret, session = self._checked(seed, taken, present, sessions, now)
            except RefusedError as e:
                reasons.append(str(e))
                continue
            taken[slot.serial] = slot.client, seed.digest, secret
            present.add(slot.client)
            if str(slot.client) not in self._facts["sessions"]:
                sessions[slot.client] = session
            reasons.append(None)
        if taken:
            lines = [
                struct.pack(">QQ", serial, client) + digest + secret + text_bytes(sessions.get(client, b""))
                for serial, (client, digest, secret) in taken.items()
            ]
            self._record(_ACCEPTED, struct.pack(">I", len(lines)) + b"".join(lines))
            self._apply_accept(taken, sessions)
        return reasons

    def release(self, version: int, serials: Sequence[int]) -> Release:
        """The sum of the pads of exactly these slots, less the noise; then the buffer is closed and the next one is open."""
        last = self._released
        if last is not None and version == self.version - 1:
            if {serial for serial, _ in last.accepted} == set(serials):
                return last  # the same bytes again: the answer may have been lost
            raise RefusedError(f"the buffer of version {version} was released already, for other slots")
        if version != self.version:
            raise RefusedError(f"the open buffer steps from version {self.version}, not {version}")
        if set(serials) != self._accepted.keys() or len(serials) != len(self._accepted):
            raise RefusedError(
                f"asked for {len(serials)} slots, of which {len(set(serials) & self._accepted.keys())} are among the "
                f"{len(self._accepted)} accepted: a buffer is released for exactly its accepted updates"
            )
        if len(self._accepted) < self.policy.buffer_size:
            raise RefusedError(
                f"{len(self._accepted)} updates in the buffer: nothing is released below {self.policy.buffer_size}"
            )
        if len(self._accepted) > self.policy.buffer_size:  # in a journal from before there was a limit
            raise RefusedError(
                f"{len(self._accepted)} updates in the buffer: the integers have room for {self.policy.buffer_size}; abort it"
            )
        words = self._sum.copy()
        if self._noise is not None:
            increment = np.asarray(self._noise(version), np.float64)
            if increment.shape != words.shape or not np.isfinite(increment).all():
                raise ValueError(f"noise for step {version}: expected {len(words)} finite numbers, got shape {increment.shape}")
            words -= self.policy.fixed_point.noise(increment).astype(np.uint32)
        words.setflags(write=False)  # kept, to say the same again
        lines = tuple((serial, self._accepted[serial][1]) for serial in serials)
        body = Release(self.epoch, version, lines, words)
        made = replace(body, signature=sealing.sign(self._key("signing"), body.signed(self.policy.id)))
        self._close(made, version + 1)
        return made

    def abort(self, version: int) -> None:
        """Give the open buffer up: its slots are burned, its pads forgotten. For a server that lost the masked sum."""
        if version != self.version:
            raise RefusedError(f"the open buffer steps from version {self.version}, not {version}")
        self._close(self._released, version)

    # ── what it checks ───────────────────────────────────────────────────────────────────────────────────────────────

    def _checked(
        self, seed: Seed, taken: dict[int, Any], present: set[int], opened: dict[int, bytes], now: float
    ) -> tuple[Slot, bytes, bytes]:
        """The slot, the seed and the session's key, or a refusal."""
        slot = Slot.from_bytes(seed.slot)
        if not hmac.compare_digest(slot.tag, self._tag(slot)):
            raise RefusedError("slot: not issued here")
        if slot.serial in self._accepted or slot.serial in taken or slot.serial not in self._facts["out"]:
            raise RefusedError(f"slot {slot.serial}: used before, or given up")
        if slot.expiry < now:
            raise RefusedError(f"slot {slot.serial}: expired")
        if slot.client in present:
            raise RefusedError(f"client {slot.client} is in this buffer already")
        if seed.version != self.version:
            raise RefusedError(f"sealed for the step from version {seed.version}; the open buffer's is {self.version}")
        self.policy.weight(seed.start, seed.version)  # refuses what is too stale
        self._may_take_part(slot.client)
        known = opened.get(slot.client) or bytes.fromhex(self._facts["sessions"].get(str(slot.client), ""))
        session = known
        if seed.opening:
            info = session_info(self.policy.id, self.epoch, slot.client)
            session = sealing.unseal(self._key("private"), info, seed.opening)
            if len(session) != 32 or (known and not hmac.compare_digest(known, session)):
                raise RefusedError(f"client {slot.client} has another session in this epoch")
        if not session:
            raise RefusedError(f"client {slot.client} has no session in this epoch: its first seed must open one")
        info = seed_info(self.policy.id, self.epoch, seed)
        secret = sealing.unlock(sealing.subkey(session, info), info, seed.locked)
        if len(self._accepted) + len(taken) >= self.policy.buffer_size:  # last: what is wrong in itself is refused for that
            raise RefusedError(f"the buffer is full: the integers have room for {self.policy.buffer_size} updates; release it")
        return slot, secret, session

    def _may_take_part(self, client: int) -> None:
        policy = self.policy
        before = self._facts["took_part"].get(str(client), [])
        if policy.participations and len(before) >= policy.participations:
            raise RefusedError(f"client {client} took part {len(before)} times, which is all the policy allows")
        if before and self.version - before[-1] < policy.separation:
            raise RefusedError(
                f"client {client} took part at version {before[-1]}; the policy's separation is {policy.separation}"
            )

    # ── how it changes, and what is kept ─────────────────────────────────────────────────────────────────────────────

    def _apply_issue(self, first: int, expiry: float, count: int, expired: Iterable[int]) -> None:
        out = self._facts["out"]
        for serial in expired:
            out.pop(serial, None)
        out.update((first + i, expiry) for i in range(count))
        self._facts["serial"] = first + count

    def _apply_accept(self, taken: dict[int, tuple[int, bytes, bytes]], sessions: dict[int, bytes]) -> None:
        self._accepted.update(taken)
        for serial, (_, _, secret) in taken.items():
            del self._facts["out"][serial]
            self._sum += expand(secret, self._room)
        self._facts["sessions"].update((str(client), session.hex()) for client, session in sessions.items())

    def _close(self, released: Release | None, version: int) -> None:
        facts = {**self._facts, "version": version}
        if version > self.version and (self.policy.participations or self.policy.separation > 1):
            took_part = {client: list(versions) for client, versions in self._facts["took_part"].items()}
            for client, _, _ in self._accepted.values():
                took_part.setdefault(str(client), []).append(self.version)
            facts["took_part"] = took_part
        self._keep(facts, released)  # closed before anything is said
        self._facts, self._released, self._accepted = facts, released, {}
        self._sum.fill(0)
        self._room.fill(0)

    def _record(self, kind: int, body: bytes) -> None:
        if self._write is not None:
            self._write(struct.pack(">BQ", kind, self._facts["number"] + 1) + body)
        self._facts["number"] += 1

    def _keep(self, facts: dict[str, Any], released: Release | None) -> None:
        if self._write is not None:
            self._write(self._snapshot(facts, released))
        facts["number"] += 1

    def _snapshot(self, facts: dict[str, Any], released: Release | None) -> bytes:
        """A record that makes all earlier ones unnecessary, and with them the seeds in them."""
        number = facts["number"] + 1
        kept = json.dumps({**facts, "number": number}, sort_keys=True, separators=(",", ":")).encode()
        return struct.pack(">BQ", SNAPSHOT, number) + text_bytes(kept) + text_bytes(released.to_bytes() if released else b"")

    def state(self) -> bytes:
        """All that it knows, as bytes: equal if and only if the state is."""
        taken = b"".join(struct.pack(">QQ", s, c) + d + k for s, (c, d, k) in self._accepted.items())
        return self._snapshot(self._facts, self._released) + text_bytes(taken) + words_bytes(self._sum)

    @classmethod
    def restore(
        cls,
        records: Sequence[bytes],
        counter: int,
        policy: TaskPolicy,
        attester: Attester,
        write: Write | None = None,
        noise: Noise | None = None,
    ) -> "Enclave":
        """The enclave that wrote these records, the first of them a snapshot; `counter` is the newest number it ever wrote."""
        if not records:
            raise RefusedError(f"no records, and the counter is at {counter}: the state was removed")
        read = Reader(records[0], SNAPSHOT, "snapshot")
        (number,) = read.numbers("Q")
        facts, released = json.loads(read.text()), read.text()
        read.end()
        if facts["policy"] != policy.id.hex():
            raise RefusedError("this state was written under another policy")
        facts["out"] = {int(serial): expiry for serial, expiry in facts["out"].items()}
        enclave = cls(facts, policy, attester, write, noise)
        enclave._released = Release.from_bytes(released) if released else None
        for record in records[1:]:
            number += 1
            kind, found = struct.unpack(">BQ", record[:9])
            if found != number:
                raise RefusedError(f"record {found} where {number} should be: the state was tampered with")
            enclave._replay(kind, record)
            facts["number"] = number
        if number < counter:
            raise RefusedError(f"the state was rolled back: its last record is {number}, and {counter} were written")
        if number > counter + 1:  # a record is written, then counted
            raise RefusedError(f"the counter was turned back, or lost: it is at {counter}, and the last record is {number}")
        return enclave

    def _replay(self, kind: int, record: bytes) -> None:
        read = Reader(record, kind, "record")
        read.numbers("Q")
        if kind == _ISSUED:
            first, expiry, count, expired = struct.unpack(">QdQI", read.take(28))
            self._apply_issue(first, expiry, count, read.numbers(f"{expired}Q"))
        elif kind == _ACCEPTED:
            taken, sessions = {}, {}
            for _ in range(read.numbers("I")[0]):
                serial, client = read.numbers("QQ")
                taken[serial] = client, read.take(32), read.take(SEED)
                if session := read.text():
                    sessions[client] = session
            self._apply_accept(taken, sessions)
        else:
            raise RefusedError(f"a record of kind {kind}: the state was tampered with")
        read.end()

    def _key(self, name: str) -> bytes:
        return bytes.fromhex(self._facts[name])

    def _tag(self, slot: Slot) -> bytes:
        return sealing.tag(self._key("slots"), self.epoch + slot.body())


def check_release(release: Release, policy: TaskPolicy, signer: bytes) -> None:
    """Refuse a release that this trusted aggregator has not signed."""
    if not sealing.signed_by(signer, release.signed(policy.id), release.signature):
        raise RefusedError("release: not signed by the trusted aggregator")


def measurement(source: bytes) -> bytes:
    """The hash of the code that runs in an enclave."""
    return hashlib.sha256(b"fedbuff-code-v1" + source).digest()


assert SESSION_SEALED == 32 + sealing.SEALED
