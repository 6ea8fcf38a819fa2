"""A helper: keeps its shares of clients' masks, and adds up those of a whole buffer, once.

    helper.keep(share, now)           # from a client, by way of the server
    echo = helper.echo(list)          # a full buffer: "this is the list that I was shown"
    answer = helper.answer(echoes)    # when U helpers were shown the same

In LightSecAgg every client holds shares of every other; with clients that come and go by the hundred thousand nobody could. So
a committee of N helpers holds them: our deviation, see docs/secure-aggregation.md.

What stops a server from singling a client out are the checks here. A list has K masks, all different, none ever
listed before; weights are recomputed from the policy's table; there is one list per server step. And no helper answers before
U of them have signed for the same list. Two lists would have 2U − N signers in common, which is more than the T who may
conspire, so one of them is honest and signs for one list only: two lists can't both be answered.
"""

import struct
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fedbuff.secagg import field, sealing
from fedbuff.secagg.messages import Answer, Echo, List, RefusedError, Share
from fedbuff.secagg.policy import TaskPolicy
from fedbuff.secagg.sealing import RandomBytes


class Directory:
    """Whose key is whose, vouched for by signatures of one root that everybody knows."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._keys: dict[tuple[str, int], bytes] = {}

    def add(self, kind: str, number: int, key: bytes, signature: bytes) -> None:
        """`kind` is "client", "helper", or "signer" for a helper's signatures."""
        if not sealing.signed_by(self._root, certificate(kind, number, key), signature):
            raise RefusedError(f"directory: the key of {kind} {number} is not signed by the root")
        if self._keys.setdefault((kind, number), key) != key:
            raise RefusedError(f"directory: {kind} {number} has another key already")

    def helper(self, number: int) -> bytes:
        return self._key("helper", number)

    def signer(self, number: int) -> bytes:
        return self._key("signer", number)

    def client(self, number: int) -> bytes:
        return self._key("client", number)

    def _key(self, kind: str, number: int) -> bytes:
        if (kind, number) not in self._keys:
            raise RefusedError(f"directory: no key of {kind} {number}")
        return self._keys[kind, number]


def certificate(kind: str, number: int, key: bytes) -> bytes:
    """What the root signs."""
    return b"fedbuff-directory-v1 " + kind.encode() + struct.pack(">Q", number) + key


def share_info(policy: bytes, share: Share) -> bytes:
    return b"fedbuff-share-v1" + policy + share.bound()


def share_key(common: bytes, policy: bytes, share: Share) -> bytes:
    """A key for one share: what client and helper have in common, made uniform, for this mask only."""
    return sealing.derive(common, b"fedbuff-share-key-v1" + policy + share.bound())


class _Kept(NamedTuple):
    client: int
    start: int
    came: float
    values: field.Elements


class Helper:
    """One of the committee: number 0 … N − 1."""

    def __init__(self, number: int, private: bytes, signing: bytes, directory: Directory, policy: TaskPolicy) -> None:
        if not 0 <= number < policy.helpers:
            raise ValueError(f"number={number}: the policy's committee has {policy.helpers} helpers")
        self.number, self._private, self._signing = number, private, signing
        self._directory, self._policy = directory, policy
        self._common: dict[int, bytes] = {}  # by client: a cache
        self._shares: dict[bytes, _Kept] = {}  # by mask
        self._past: dict[bytes, int] = {}  # masks that were on a list or have expired, and the versions they started from
        self._list: List | None = None  # which it has signed for
        self._answer: Answer | None = None
        self._version = -1  # of the newest list

    def keep(self, share: Share, now: float) -> None:
        """Take a client's share."""
        if share.helper != self.number:
            raise RefusedError(f"a share for helper {share.helper} came to helper {self.number}")
        if share.mask in self._shares or share.mask in self._past:
            raise RefusedError(f"mask {share.mask.hex()[:8]}…: known already")
        if share.start + len(self._policy.weights) <= self._version:  # so that the past need not be remembered for ever
            raise RefusedError(f"mask {share.mask.hex()[:8]}…: from version {share.start}, too stale for any list to come")
        common = self._common.get(share.client) or sealing.exchange(self._private, self._directory.client(share.client))
        key = share_key(common, self._policy.id, share)
        text = sealing.unlock(key, share_info(self._policy.id, share), share.locked)
        values = np.frombuffer(text, "<u4") if len(text) % 4 == 0 else np.empty(0, "<u4")
        if len(values) != self._policy.code.width(self._policy.length) or (values >= field.P).any():
            raise RefusedError(f"mask {share.mask.hex()[:8]}…: not a share of a mask of {self._policy.length} numbers")
        self._common[share.client] = common
        self._shares[share.mask] = _Kept(share.client, share.start, now, values.astype(np.uint64))

    def echo(self, listed: List) -> Echo:
        """Sign for a list; from now on no other for this step, and none with any of these masks."""
        if self._list == listed:
            return self._signed(listed)
        self._check(listed)
        self._list, self._answer, self._version = listed, None, listed.version
        self._past = {mask: start for mask, start in self._past.items() if start + len(self._policy.weights) > listed.version}
        self._past.update((mask, start) for mask, start, _ in listed.lines)
        return self._signed(listed)

    def answer(self, echoes: Iterable[Echo]) -> Answer:
        """Its share of the list's weighted sum, once U helpers have signed for the list; then its shares are deleted."""
        if self._list is None:
            raise RefusedError("no list to answer")
        wanted = self._list.digest()
        agreed = set()
        for echo in echoes:
            if echo.digest != wanted:
                raise RefusedError(f"helper {echo.helper} was shown another list")
            if not sealing.signed_by(self._directory.signer(echo.helper), echo.body(), echo.signature):
                raise RefusedError(f"the echo of helper {echo.helper} is not signed by it")
            agreed.add(echo.helper)
        if len(agreed) < self._policy.recovery:
            raise RefusedError(f"{len(agreed)} helpers have signed for this list: {self._policy.recovery} are needed")
        if self._answer is None:
            shares = [self._shares[mask].values for mask, _, _ in self._list.lines]
            total = field.weighted_sum(shares, [weight for _, _, weight in self._list.lines])
            blank = Answer(self.number, wanted, total.astype(np.uint32))
            self._answer = replace(blank, signature=sealing.sign(self._signing, blank.body()))
            for mask, _, _ in self._list.lines:
                del self._shares[mask]
        return self._answer

    def expire(self, now: float) -> None:
        """Delete the shares of clients that never uploaded; they are never listed after that."""
        for mask, kept in list(self._shares.items()):
            if now - kept.came > self._policy.lifetime and mask not in self._past:
                del self._shares[mask]
                self._past[mask] = kept.start

    def state(self) -> bytes:
        """All that it knows, as bytes: equal if and only if the state is."""
        shares = [(mask, *kept[:3], kept.values.tobytes()) for mask, kept in sorted(self._shares.items())]
        answer = self._answer and self._answer.to_bytes()
        return repr((shares, sorted(self._past.items()), self._list, answer, self._version)).encode()

    def _check(self, listed: List) -> None:
        policy, masks = self._policy, [mask for mask, _, _ in listed.lines]
        if listed.policy != policy.id:
            raise RefusedError("list: for another policy")
        if len(masks) < policy.buffer_size:
            raise RefusedError(f"list: {len(masks)} masks; the sum of fewer than {policy.buffer_size} is never named")
        if len(set(masks)) < len(masks):
            raise RefusedError("list: a mask is on it twice")
        for mask in masks:
            if mask in self._past:
                raise RefusedError(f"list: mask {mask.hex()[:8]}… was on another list, or its share has expired")
            if mask not in self._shares:
                raise RefusedError(f"list: no share of mask {mask.hex()[:8]}…")
        if listed.version <= self._version:
            raise RefusedError(f"list: there was one for version {self._version} already")
        if len({self._shares[mask].client for mask in masks}) < len(masks):
            raise RefusedError("list: a client is on it twice")
        for mask, start, weight in listed.lines:
            if start != self._shares[mask].start:
                raise RefusedError(
                    f"list: mask {mask.hex()[:8]}… is said to start from version {start}; "
                    f"its client said {self._shares[mask].start}"
                )
            if weight != policy.weight(start, listed.version):
                raise RefusedError(
                    f"list: weight {weight} for mask {mask.hex()[:8]}…; the policy's for staleness "
                    f"{listed.version - start} is {policy.weight(start, listed.version):g}"
                )
        if len(masks) > policy.buffer_size:  # last: what is wrong in itself is refused for that
            raise RefusedError(f"list: {len(masks)} masks; the integers have room for a sum of {policy.buffer_size}")

    def _signed(self, listed: List) -> Echo:
        blank = Echo(self.number, listed.digest())
        return replace(blank, signature=sealing.sign(self._signing, blank.body()))


def enter(directory: Directory, root: bytes, kind: str, number: int, key: bytes) -> None:
    """Add a key to the directory with the signature of the root's private key."""
    directory.add(kind, number, key, sealing.sign(root, certificate(kind, number, key)))


def appointed(policy: TaskPolicy, root: bytes, random_bytes: RandomBytes) -> tuple[Directory, list[Helper]]:
    """A committee with new keys and the directory that names it, where one process plays everybody."""
    directory, helpers = Directory(sealing.signer(root)), []
    for number in range(policy.helpers):
        private, signing = random_bytes(32), random_bytes(32)
        enter(directory, root, "helper", number, sealing.public(private))
        enter(directory, root, "signer", number, sealing.signer(signing))
        helpers.append(Helper(number, private, signing, directory, policy))
    return directory, helpers
