"""Secure aggregation over a network, a gateway's side: check whom updates are masked for, once, then mask them.

    sealing = Sealing(secure, server, folder)
    upload = sealing.upload(offer, client, slot, start, version, update)

A gateway that was restarted must still be the one that the trusted aggregator knows: each client's session key is derived from
a secret in the gateway's folder. Every pad is new.
"""

import hashlib
import hmac
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fedbuff.core.server import Server
from fedbuff.deploy.vault import packed, policy_of
from fedbuff.sim.secure import SecureAggregation


class Sealing:
    """What the clients of a gateway agree to: these settings and nothing else."""

    def __init__(self, secure: SecureAggregation, server: Server, folder: Path) -> None:
        self._secure, self._server = secure, server
        self._secret = _secret(folder / "sessions.key")
        self._offer, self._aggregator = b"", cast(Any, None)
        self._clients: dict[int, Any] = {}

    def upload(self, offer: bytes, client: int, slot: bytes, start: int, version: int, update: NDArray[np.float32]) -> bytes:
        """The masked update of a trip that started from `start`, for the step from `version`; ValueError if it can't be."""
        from fedbuff.secagg.client import EnclaveClient
        from fedbuff.secagg.messages import Offer
        from fedbuff.secagg.policy import TaskPolicy

        if self._secure.mode == "plain":
            policy = TaskPolicy.from_bytes(Offer.from_bytes(offer).policy)
            return policy.fixed_point.encode(update, policy.weight(start, version)).astype("<i4").tobytes()
        aggregator = self._checked(offer)
        if client not in self._clients:
            name = aggregator.epoch + client.to_bytes(8, "big")
            session = hmac.digest(self._secret, name, hashlib.sha256)
            self._clients[client] = EnclaveClient(client, aggregator, os.urandom, session=session)
        seed, masked = self._clients[client].upload(slot, start, version, update)
        return packed(seed.to_bytes(), masked.to_bytes())

    def _checked(self, offer: bytes) -> Any:
        from fedbuff.secagg.client import check_offer
        from fedbuff.secagg.messages import Offer
        from fedbuff.trusted import simulated_reference

        if offer != self._offer:
            self._aggregator = check_offer(
                Offer.from_bytes(offer), simulated_reference(), time.time(), acceptable=self._acceptable
            )
            self._offer, self._clients = offer, {}
        return self._aggregator

    def _acceptable(self, policy: Any) -> bool:
        """The policy that our own settings make, for a model and a deadline of whatever length; weights up to rounding."""
        ours = policy_of(self._secure, self._server, policy.length, policy.lifetime)
        weights = len(policy.weights) == len(ours.weights) and np.allclose(policy.weights, ours.weights, rtol=1e-9, atol=0)
        return bool(weights and replace(policy, weights=ours.weights) == ours)


def _secret(path: Path) -> bytes:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(os.urandom(32))
            file.flush()
            os.fsync(file.fileno())
    return path.read_bytes()
