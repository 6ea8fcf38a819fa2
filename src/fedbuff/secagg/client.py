"""The client's half: check whom it talks to, then weigh, clip, quantise and mask an update, and seal or share out the mask.

Both kinds of client say all they have to say in one go: once its messages are sent, a client may vanish.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedbuff.secagg import field, sealing
from fedbuff.secagg.attestation import ReferenceValues, Verifier, report_data, verify_simulated
from fedbuff.secagg.committee import Directory, share_info, share_key
from fedbuff.secagg.enclave import seed_info, session_info
from fedbuff.secagg.messages import NAME, Masked, MaskedElements, Offer, RefusedError, Seed, Share, digest
from fedbuff.secagg.pad import SEED, mask
from fedbuff.secagg.policy import TaskPolicy
from fedbuff.secagg.sealing import RandomBytes


class Aggregator:
    """A trusted aggregator that a client has checked, and the policy it stands for."""

    def __init__(self, policy: TaskPolicy, public: bytes, signer: bytes, epoch: bytes) -> None:
        self.policy, self.public, self.signer, self.epoch = policy, public, signer, epoch


def check_offer(
    offer: Offer,
    reference: ReferenceValues,
    now: float,
    verify: Verifier = verify_simulated,
    acceptable: Callable[[TaskPolicy], bool] = lambda policy: True,
) -> Aggregator:
    """The trusted aggregator behind an offer, if its evidence is for this policy and the client finds that acceptable."""
    policy = TaskPolicy.from_bytes(offer.policy)
    public, signer, epoch = offer.evidence[:32], offer.evidence[32:64], offer.evidence[64 : 64 + NAME]
    claims = verify(offer.evidence[64 + NAME :], reference, now)
    if claims.report_data != report_data(public, signer, policy.id, epoch):
        raise RefusedError("evidence: it is for another key, policy or epoch than the offer's")
    if policy.mode != "enclave" or not acceptable(policy):
        raise RefusedError("policy: not acceptable to this client")
    return Aggregator(policy, public, signer, epoch)


class EnclaveClient:
    """A client of the trusted aggregator: one session per epoch, one pad per trip.

    hashes    of masked updates bind them to their seeds; off in a simulation, where nothing happens on the way
    session   its key in this epoch, for a client that may be restarted; by default a new one
    """

    __slots__ = ("_aggregator", "_client", "_hashes", "_opening", "_random_bytes", "_session")

    def __init__(
        self,
        client: int,
        aggregator: Aggregator,
        random_bytes: RandomBytes,
        hashes: bool = True,
        session: bytes | None = None,
    ) -> None:
        self._client, self._aggregator, self._random_bytes, self._hashes = client, aggregator, random_bytes, hashes
        self._session = random_bytes(32) if session is None else session
        info = session_info(aggregator.policy.id, aggregator.epoch, client)
        self._opening = sealing.seal(aggregator.public, info, self._session)

    def upload(self, slot: bytes, start: int, version: int, update: NDArray[np.float32]) -> tuple[Seed, Masked]:
        """The two messages of a trip that started from version `start`, when the server has said that it is at `version`."""
        aggregator, policy = self._aggregator, self._aggregator.policy
        weight = policy.weight(start, version)
        if update.shape != (policy.length,):
            raise ValueError(f"the update has shape {update.shape}, and the policy's model {policy.length} weights")
        secret = self._random_bytes(SEED)
        words = mask(policy.fixed_point.encode(update, weight), secret)
        blank = Seed(slot, start, version, digest(words) if self._hashes else bytes(32), self._opening, b"")
        info = seed_info(policy.id, aggregator.epoch, blank)
        # a key for all that is bound, not for the slot: a server may ask for one slot twice, with other versions
        locked = sealing.lock(sealing.subkey(self._session, info), info, secret)
        return Seed(slot, start, version, blank.digest, self._opening, locked), Masked(slot, words)

    def accepted(self) -> None:
        """The trusted aggregator has taken a seed of this client, so the session is open."""
        self._opening = b""


class CommitteeClient:
    """A client of the helpers: a key that the directory names, one mask per trip."""

    def __init__(
        self, client: int, private: bytes, directory: Directory, policy: TaskPolicy, random_bytes: RandomBytes
    ) -> None:
        if policy.mode != "helpers":
            raise ValueError(f"mode={policy.mode!r}: helpers take a policy of mode 'helpers'")
        self._client, self._policy, self._random_bytes = client, policy, random_bytes
        # what it has in common with each helper; a key per mask is derived from it
        self._common = [sealing.exchange(private, directory.helper(j)) for j in range(policy.helpers)]

    def share(self, start: int) -> tuple[bytes, bytes, Sequence[Share]]:
        """A new mask's name and seed, and its shares, one for each helper, for a trip that starts from version `start`."""
        policy, code = self._policy, self._policy.code
        name, secret, rows = self._random_bytes(NAME), self._random_bytes(SEED), self._random_bytes(SEED)
        width = code.width(policy.length)
        random_rows = field.uniform(rows, code.privacy * width).reshape(code.privacy, width)
        encoded = code.encode(field.uniform(secret, policy.length), random_rows).astype("<u4")
        shares = []
        for helper, row in enumerate(encoded):
            blank = Share(name, self._client, start, helper, b"")
            key = share_key(self._common[helper], policy.id, blank)
            shares.append(replace(blank, locked=sealing.lock(key, share_info(policy.id, blank), row.tobytes())))
        return name, secret, shares

    def upload(self, name: bytes, secret: bytes, start: int, update: NDArray[np.float32]) -> MaskedElements:
        """The update on the grid plus the mask; its weight is the helpers' and the server's business."""
        policy = self._policy
        if update.shape != (policy.length,):
            raise ValueError(f"the update has shape {update.shape}, and the policy's model {policy.length} weights")
        integers = field.from_signed(policy.fixed_point.encode(update))
        words = field.add(integers, field.uniform(secret, policy.length)).astype(np.uint32)
        return MaskedElements(name, self._client, start, words)
