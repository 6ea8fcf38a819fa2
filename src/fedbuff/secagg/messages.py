"""What the parties send each other, as bytes: a kind, fixed fields in network order, then what varies, with its length.

Every message is a frozen dataclass with `to_bytes` and `from_bytes`. `from_bytes` takes exactly what `to_bytes` makes, and
raises `RefusedError` with the reason for anything else: too short, too long, another kind, a number that can't be.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

SLOT = 40
SEED_LOCKED = 48
SESSION_SEALED = 80
NAME = 16  # of an epoch, of a mask

_P = (1 << 31) - 1  # field.P: that file imports this one


class RefusedError(Exception):
    """A message that a party does not accept, and why; the party is as it was before."""


class Reader:
    """Takes a message apart, from the front."""

    def __init__(self, data: bytes | memoryview, kind: int, name: str) -> None:
        self._data, self._at, self._name = memoryview(data), 0, name
        if (found := self.numbers("B")[0]) != kind:
            raise RefusedError(f"{name}: expected a message of kind {kind}, got {found}")

    def take(self, size: int) -> bytes:
        return bytes(self._view(size))

    def numbers(self, form: str) -> tuple[int, ...]:
        return struct.unpack(f">{form}", self._view(struct.calcsize(f">{form}")))

    def words(self) -> NDArray[np.uint32]:
        (count,) = self.numbers("I")
        return np.frombuffer(self._view(4 * count), "<u4")

    def text(self) -> bytes:
        (size,) = self.numbers("I")
        return self.take(size)

    def end(self) -> None:
        if self._at != len(self._data):
            raise RefusedError(f"{self._name}: {len(self._data) - self._at} bytes too many")

    def _view(self, size: int) -> memoryview:
        if self._at + size > len(self._data):
            raise RefusedError(f"{self._name}: cut short, {self._at + size - len(self._data)} bytes are missing")
        part = self._data[self._at : self._at + size]
        self._at += size
        return part


def words_bytes(words: NDArray[np.uint32]) -> bytes:
    return struct.pack(">I", len(words)) + np.ascontiguousarray(words, "<u4").tobytes()


def text_bytes(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text


def digest(words: NDArray[np.uint32]) -> bytes:
    """What binds a sealed seed to its masked update."""
    return hashlib.sha256(np.ascontiguousarray(words, "<u4").data).digest()


# ── enclave ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Slot:
    """A place in some buffer: issued by the trusted aggregator to one client, used once, before `expiry`."""

    serial: int
    client: int
    expiry: float
    tag: bytes = b""

    def body(self) -> bytes:
        return struct.pack(">QQd", self.serial, self.client, self.expiry)

    def to_bytes(self) -> bytes:
        return self.body() + self.tag

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        if len(data) != SLOT:
            raise RefusedError(f"slot: expected {SLOT} bytes, got {len(data)}")
        serial, client, expiry = struct.unpack(">QQd", data[:24])
        return cls(serial, client, expiry, data[24:])


def serial(slot: bytes) -> int:
    """A slot's number, for who can't check its tag anyway."""
    return int.from_bytes(slot[:8])


@dataclass(frozen=True)
class Offer:
    """Server to client at check-in: what to agree to, with whom, a slot, and the version that the trip starts from."""

    policy: bytes
    evidence: bytes
    slot: bytes
    start: int

    def to_bytes(self) -> bytes:
        return b"\x01" + text_bytes(self.policy) + text_bytes(self.evidence) + self.slot + struct.pack(">Q", self.start)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        read = Reader(data, 1, "offer")
        made = cls(read.text(), read.text(), read.take(SLOT), *read.numbers("Q"))
        read.end()
        return made


@dataclass(frozen=True)
class Seed:
    """Client to trusted aggregator, by way of the server: the seed of a pad, locked with the client's session key.

    opening   the session key, sealed to the trusted aggregator: in a client's first trip of an epoch, else empty
    """

    slot: bytes
    start: int
    version: int
    digest: bytes
    opening: bytes
    locked: bytes

    def bound(self) -> bytes:
        """What the lock is bound to, beside policy and epoch."""
        return self.slot + struct.pack(">QQ", self.start, self.version) + self.digest

    def to_bytes(self) -> bytes:
        return b"\x02" + self.bound() + text_bytes(self.opening) + self.locked

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        read = Reader(data, 2, "seed")
        slot, (start, version) = read.take(SLOT), read.numbers("QQ")
        made = cls(slot, start, version, read.take(32), read.text(), read.take(SEED_LOCKED))
        read.end()
        if len(made.opening) not in (0, SESSION_SEALED):
            raise RefusedError(f"seed: expected an opening of 0 or {SESSION_SEALED} bytes, got {len(made.opening)}")
        return made


@dataclass(frozen=True)
class Masked:
    """Client to server: the update on the grid plus the pad, modulo 2³²."""

    slot: bytes
    words: NDArray[np.uint32]

    def to_bytes(self) -> bytes:
        return b"\x03" + self.slot + words_bytes(self.words)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        read = Reader(data, 3, "masked update")
        made = cls(read.take(SLOT), read.words())
        read.end()
        return made


@dataclass(frozen=True)
class Release:
    """Trusted aggregator to server, once per buffer: the sum of the pads (less the noise), signed, for exactly these slots."""

    epoch: bytes
    version: int
    accepted: tuple[tuple[int, bytes], ...]  # serial numbers of slots, digests of masked updates
    words: NDArray[np.uint32]
    signature: bytes = b""

    def head(self) -> bytes:
        """All before the words."""
        lines = b"".join(struct.pack(">Q", serial) + digest for serial, digest in self.accepted)
        numbers = struct.pack(">QI", self.version, len(self.accepted))
        return b"\x04" + self.epoch + numbers + lines + struct.pack(">I", len(self.words))

    def signed(self, policy: bytes) -> bytes:
        """What is signed: a hash of the message without its signature, since Ed25519 would go over all of it twice."""
        body = hashlib.sha256(self.head())
        body.update(np.ascontiguousarray(self.words, "<u4").data)
        return b"fedbuff-release-v1" + policy + body.digest()

    def to_bytes(self) -> bytes:
        return self.head() + np.ascontiguousarray(self.words, "<u4").tobytes() + self.signature

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        read = Reader(data, 4, "release")
        epoch, (version, count) = read.take(NAME), read.numbers("QI")
        made = cls(epoch, version, tuple(_lines(read, count)), read.words(), read.take(64))
        read.end()
        return made


def _lines(read: Reader, count: int) -> list[tuple[int, bytes]]:
    return [(read.numbers("Q")[0], read.take(32)) for _ in range(count)]


# ── helpers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Share:
    """Client to helper, by way of the server: its share of a mask, locked with the key that the two have in common."""

    mask: bytes
    client: int
    start: int
    helper: int
    locked: bytes

    def bound(self) -> bytes:
        return self.mask + struct.pack(">QQH", self.client, self.start, self.helper)

    def to_bytes(self) -> bytes:
        return b"\x11" + self.bound() + text_bytes(self.locked)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        read = Reader(data, 0x11, "share")
        mask, (client, start, helper) = read.take(NAME), read.numbers("QQH")
        made = cls(mask, client, start, helper, read.text())
        read.end()
        return made


@dataclass(frozen=True)
class MaskedElements:
    """Client to server: the update on the grid plus the mask, modulo 2³¹ − 1."""

    mask: bytes
    client: int
    start: int
    words: NDArray[np.uint32]

    def to_bytes(self) -> bytes:
        return b"\x12" + self.mask + struct.pack(">QQ", self.client, self.start) + words_bytes(self.words)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        read = Reader(data, 0x12, "masked update")
        mask, (client, start) = read.take(NAME), read.numbers("QQ")
        made = cls(mask, client, start, read.words())
        read.end()
        _elements(made.words, "masked update")
        return made


@dataclass(frozen=True)
class List:
    """Server to all helpers at a full buffer: whose masks to add up, with which weights, for the server step from `version`."""

    policy: bytes  # its id
    version: int
    lines: tuple[tuple[bytes, int, int], ...]  # mask, version that the trip started from, integer weight

    def to_bytes(self) -> bytes:
        lines = b"".join(mask + struct.pack(">QI", start, weight) for mask, start, weight in self.lines)
        return b"\x13" + self.policy + struct.pack(">QI", self.version, len(self.lines)) + lines

    def digest(self) -> bytes:
        return hashlib.sha256(self.to_bytes()).digest()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        read = Reader(data, 0x13, "list")
        policy, (version, count) = read.take(32), read.numbers("QI")
        lines = []
        for _ in range(count):
            mask, (start, weight) = read.take(NAME), read.numbers("QI")
            lines.append((mask, start, weight))
        read.end()
        return cls(policy, version, tuple(lines))


@dataclass(frozen=True)
class Echo:
    """Helper to all helpers, by way of the server: this is the list that I was shown, and the only one for this buffer."""

    helper: int
    digest: bytes  # of the list
    signature: bytes = b""

    def body(self) -> bytes:
        return b"\x14" + struct.pack(">H", self.helper) + self.digest

    def to_bytes(self) -> bytes:
        return self.body() + self.signature

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        read = Reader(data, 0x14, "echo")
        made = cls(read.numbers("H")[0], read.take(32), read.take(64))
        read.end()
        return made


@dataclass(frozen=True)
class Answer:
    """Helper to server: its share of the weighted sum of the masks on the list."""

    helper: int
    digest: bytes  # of the list
    words: NDArray[np.uint32]
    signature: bytes = b""

    def body(self) -> bytes:
        return b"\x15" + struct.pack(">H", self.helper) + self.digest + words_bytes(self.words)

    def to_bytes(self) -> bytes:
        return self.body() + self.signature

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        read = Reader(data, 0x15, "answer")
        made = cls(read.numbers("H")[0], read.take(32), read.words(), read.take(64))
        read.end()
        _elements(made.words, "answer")
        return made


def _elements(words: NDArray[np.uint32], name: str) -> None:
    if len(words) and int(words.max()) >= _P:
        raise RefusedError(f"{name}: a number is not below 2³¹ − 1")


# ── between the server and the trusted aggregator's process ──────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Request:
    """What the server may ask of the trusted aggregator: one of these words, and numbers or messages that go with it."""

    word: str
    numbers: tuple[int, ...] = ()
    parts: tuple[bytes, ...] = ()

    def to_bytes(self) -> bytes:
        word = text_bytes(self.word.encode())
        numbers = struct.pack(f">I{len(self.numbers)}Q", len(self.numbers), *self.numbers)
        return b"\x21" + word + numbers + struct.pack(">I", len(self.parts)) + b"".join(map(text_bytes, self.parts))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        read = Reader(data, 0x21, "request")
        word = read.text().decode("ascii", "replace")
        (count,) = read.numbers("I")
        numbers = struct.unpack(f">{count}Q", read.take(8 * count))
        (parts,) = read.numbers("I")
        made = cls(word, numbers, tuple(read.text() for _ in range(parts)))
        read.end()
        return made


@dataclass(frozen=True)
class Reply:
    """What it says: parts that go with the request, or a refusal."""

    refused: str
    parts: tuple[bytes, ...] = ()

    def to_bytes(self) -> bytes:
        count = struct.pack(">I", len(self.parts))
        return b"\x22" + text_bytes(self.refused.encode()) + count + b"".join(map(text_bytes, self.parts))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        read = Reader(data, 0x22, "reply")
        refused = read.text().decode("utf-8", "replace")
        (parts,) = read.numbers("I")
        made = cls(refused, tuple(read.text() for _ in range(parts)))
        read.end()
        return made
