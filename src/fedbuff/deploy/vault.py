"""Secure aggregation over a network, the server's side: who may upload into the open buffer, and what its sum is.

    vault.slots([client, …])                 # to hand out with the question for masked updates
    vault.take({trip: upload, …}, version)   # per trip None, or why it is refused
    vault.open(version)                      # Σ s(τ_i) clip(Δ_i) of the full buffer

A client weighs its update by the staleness it has in the step that it is for, so it has to know which one: it trains, says that
it has, and is asked for its masked update when there is room in the open buffer. Uploads are in the journal before the trusted
aggregator sees their seeds, so that neither can know of an update that the other has lost.

"plain" is the same in the clear: the same integers, nothing hidden.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from fedbuff.core.server import Server
from fedbuff.sim.secure import SecureAggregation

if TYPE_CHECKING:
    from fedbuff.secagg.messages import Masked, Seed
    from fedbuff.secagg.policy import TaskPolicy


class Vault(Protocol):
    """One buffer at a time."""

    offer: bytes

    def slots(self, clients: Sequence[int]) -> list[bytes]: ...

    def take(self, uploads: Mapping[int, bytes], version: int) -> dict[int, str | None]: ...

    def open(self, version: int) -> NDArray[np.float64]: ...

    def close(self) -> None: ...


def vault(secure: SecureAggregation, server: Server, folder: Path, deadline: float) -> Vault:
    """The one that these settings ask for; its state is in `folder`."""
    return Plain(secure, server, deadline) if secure.mode == "plain" else Trusted(secure, server, folder, deadline)


class Plain:
    """Fixed point, and nothing hidden."""

    def __init__(self, secure: SecureAggregation, server: Server, deadline: float) -> None:
        from fedbuff.secagg.messages import Offer

        self._policy = policy_of(secure, server, len(server.weights), deadline)
        self._sum = np.zeros(self._policy.length, np.int64)
        self.offer = Offer(self._policy.to_bytes(), b"", bytes(40), 0).to_bytes()

    def slots(self, clients: Sequence[int]) -> list[bytes]:
        return [b""] * len(clients)

    def take(self, uploads: Mapping[int, bytes], version: int) -> dict[int, str | None]:
        reasons: dict[int, str | None] = {}
        for trip, upload in uploads.items():
            reasons[trip] = None if len(upload) == 4 * self._policy.length else "expected an integer for every weight"
            if reasons[trip] is None:
                self._sum += np.frombuffer(upload, "<i4")
        return reasons

    def open(self, version: int) -> NDArray[np.float64]:
        total = self._policy.fixed_point.decode(self._sum)
        self._sum = np.zeros_like(self._sum)
        return total

    def close(self) -> None:
        """Nothing is open."""


class Trusted:
    """The trusted aggregator as a process of its own, and the masked sum here."""

    def __init__(self, secure: SecureAggregation, server: Server, folder: Path, deadline: float) -> None:
        from fedbuff.secagg.client import check_offer
        from fedbuff.secagg.messages import Offer
        from fedbuff.secagg.server import EnclaveServer
        from fedbuff.trusted import TrustedProcess, simulated_reference

        policy = policy_of(secure, server, len(server.weights), deadline)
        self._process = TrustedProcess(folder, policy, server.version)
        evidence = Offer(policy.to_bytes(), self._process.evidence(), bytes(40), 0)
        self.offer = evidence.to_bytes()
        self._masked = EnclaveServer(policy, check_offer(evidence, simulated_reference(), time.time()).signer)

    def slots(self, clients: Sequence[int]) -> list[bytes]:
        return self._process.issue(clients) if clients else []

    def take(self, uploads: Mapping[int, bytes], version: int) -> dict[int, str | None]:
        from fedbuff.secagg.messages import RefusedError, Slot

        reasons: dict[int, str | None] = {}
        # what it knows already: we were killed before its answer was written down
        released = self._process.version() == version + 1
        known = {serial for serial, _ in self._process.accepted()}
        for trip, upload in uploads.items():
            try:
                seed, masked = unpacked(upload)
                self._masked.seed(seed)
                try:
                    self._masked.masked(masked)
                except RefusedError:
                    self._masked.forget(seed.slot)
                    raise
                again = released or Slot.from_bytes(seed.slot).serial in known
                reasons[trip] = None if again else self._process.submit([seed])[0]
                self._masked.add([seed], [reasons[trip]])
            except RefusedError as e:
                reasons[trip] = str(e)
        return reasons

    def open(self, version: int) -> NDArray[np.float64]:
        total = self._masked.unmask(self._process.release(version, self._masked.serials))
        return self._masked.policy.fixed_point.decode(total)

    def close(self) -> None:
        self._process.close()


def policy_of(secure: SecureAggregation, server: Server, length: int, deadline: float) -> "TaskPolicy":
    """What the parties agree to; a slot is good for as long as a trip is. Noise, if any, is added by the server to the sum."""
    from fedbuff.secagg.policy import enclave_policy

    return enclave_policy(length, server.buffer_size, secure.clip, server.weigh, secure.max_staleness, lifetime=deadline)


def packed(seed: bytes, masked: bytes) -> bytes:
    return len(seed).to_bytes(4, "little") + seed + masked


def unpacked(upload: bytes) -> "tuple[Seed, Masked]":
    from fedbuff.secagg.messages import Masked, Seed

    size = int.from_bytes(upload[:4], "little")
    return Seed.from_bytes(upload[4 : 4 + size]), Masked.from_bytes(upload[4 + size :])
