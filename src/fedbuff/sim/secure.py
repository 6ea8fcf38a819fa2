"""Secure aggregation in a simulation: every update of a buffer really is masked, and only their sum is ever decoded.

    buffer = SecureAggregation("enclave", clip=1.0).buffer(length, buffer_size=10, weigh=polynomial(0.5))
    total = buffer.sum(version, trips, clients, staleness, updates, rows)     # Σ s(τ_i) clip(Δ_i), once per server step

Masks cancel to the last bit, so a run is the same, bit for bit, as one in mode "plain": the same integers added up in the
clear. The two ways have an arithmetic each, since a weight is applied before truncation in one and after it in the other, and
"plain" takes after either:

    like="enclave"   Σ trunc(s(τ_i) · clip(Δ_i) · scale) / scale
    like="helpers"   Σ w_i · trunc(clip(Δ_i) · scale) / (scale · unit),    w_i = round(unit · s(τ_i))

Clients drop out between any two messages with a probability: what they leave behind is a slot that nobody uses, half an
upload, or shares of a mask that is never needed. They try again, with a new slot or mask, so the buffer's trips are those of
the schedule.
"""

import math
import secrets
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fedbuff.core import check
from fedbuff.core.random import unit
from fedbuff.core.staleness import Weigh
from fedbuff.core.starting import is_sampled
from fedbuff.privacy.plan import Sees

if TYPE_CHECKING:
    from fedbuff.core.server import Server
    from fedbuff.secagg.policy import TaskPolicy

Noise = Callable[[int], NDArray[np.float64]]  # server step -> increment, on the sum, in units of the update


class NotFiniteError(ValueError):
    """Updates that no client would send; `places` are theirs in the buffer. Nothing was added up."""

    def __init__(self, places: list[int]) -> None:
        super().__init__(f"{len(places)} updates of the buffer are not finite")
        self.places = places


class Buffer(Protocol):
    """What a simulation asks at each server step."""

    policy: "TaskPolicy"

    def sum(
        self,
        version: int,
        trips: Sequence[int],
        clients: Sequence[int],
        staleness: Sequence[int],
        updates: NDArray[np.floating],
        rows: Sequence[int],
    ) -> NDArray[np.float64]:
        """Σ s(τ_i) clip(Δ_i) of a full buffer: update i is `updates[rows[i]]`, `version` is the one before the step."""
        ...


@dataclass(frozen=True)
class SecureAggregation:
    """How a buffer is added up without seeing its updates.

    mode           "enclave", "helpers", or "plain": the same integers, in the clear
    clip           the largest norm of an update; longer ones are shortened to it
    like           whose arithmetic "plain" has
    max_staleness  staler updates can't be weighed: the table of weights ends there
    dropout        how often a client vanishes between two messages, and a helper before it answers
    helpers, recovery, privacy   the committee: N hold shares, any U recover the sum, any T know nothing
    """

    mode: Literal["plain", "enclave", "helpers"]
    clip: float
    like: Literal["enclave", "helpers"] = "enclave"
    max_staleness: int = 1000
    dropout: float = 0.0
    helpers: int = 8
    recovery: int = 6
    privacy: int = 3

    def __post_init__(self) -> None:
        check.one_of(("plain", "enclave", "helpers"), mode=self.mode)
        check.one_of(("enclave", "helpers"), like=self.like)
        check.number(1e-30, 1e30, clip=self.clip)
        check.integer(0, 10**6, max_staleness=self.max_staleness)
        check.integer(1, helpers=self.helpers, recovery=self.recovery)
        check.integer(0, privacy=self.privacy)
        check.number(0, 0.9, dropout=self.dropout)  # above that, somebody may vanish hundreds of times in a row

    def check(self, server: "Server") -> None:
        """Refuse a server whose buffers can't be added up so."""
        if server.mixing or server.weight_by != "uniform":
            what = "mixing=True" if server.mixing else f"weight_by={server.weight_by!r}"
            raise ValueError(f"{what}: a masked update can only be weighed by its staleness; leave it out")
        if is_sampled(server.start):
            raise ValueError("poisson=True: a secure buffer is released at exactly K updates, a Poisson cohort has any number")
        if server.buffer_size < 2:
            raise ValueError(f"buffer_size={server.buffer_size}: the sum of one update hides nothing; expected at least 2")

    def stalest(self, server: "Server") -> int:
        """The largest staleness that is accepted: the server's limit, or where the table of weights ends."""
        return self.max_staleness if server.max_staleness is None else min(self.max_staleness, server.max_staleness)

    def policy(
        self, length: int, buffer_size: int, weigh: Weigh, noise: bool = False, noise_bound: float = 0.0
    ) -> "TaskPolicy":
        """What the parties agree to; in a simulation time is counted in server steps."""
        from fedbuff.secagg.coding import Code
        from fedbuff.secagg.policy import enclave_policy, helpers_policy

        more: dict[str, Any] = {"lifetime": self.max_staleness + 1.0, "noise": "increments" if noise else "none"}
        if (self.like if self.mode == "plain" else self.mode) == "enclave":
            return enclave_policy(length, buffer_size, self.clip, weigh, self.max_staleness, noise_bound, **more)
        code = Code(self.helpers, self.recovery, self.privacy)
        return helpers_policy(length, buffer_size, self.clip, weigh, self.max_staleness, code, noise_bound=noise_bound, **more)

    def buffer(
        self,
        length: int,
        buffer_size: int,
        weigh: Weigh,
        seed: int = 0,
        version: int = 0,
        noise: Noise | None = None,
        noise_bound: float = 0.0,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> Buffer:
        """The parties, at the model's `version`.

        noise         added to the sum: inside the trusted aggregator in mode "enclave", else by the server
        noise_bound   the largest |noise| on a coordinate: room is kept for it in the integers
        say           told in a line if the grid is too coarse for the first updates
        """
        policy = self.policy(length, buffer_size, weigh, noise is not None, noise_bound)
        if self.mode == "plain":
            return _Watched(PlainBuffer(policy, noise), say)
        if self.mode == "enclave":
            return _Watched(EnclaveBuffer(policy, noise, version, self.dropout, seed), say)
        return _Watched(HelpersBuffer(policy, noise, version, self.dropout, seed), say)


class _Watched:
    """A buffer, and a look at the first updates that are not zero: whether the grid is too coarse for them."""

    def __init__(self, buffer: Buffer, say: Callable[[str], None]) -> None:
        self.policy, self._buffer, self._say, self._looked = buffer.policy, buffer, say, False

    def sum(
        self,
        version: int,
        trips: Sequence[int],
        clients: Sequence[int],
        staleness: Sequence[int],
        updates: NDArray[np.floating],
        rows: Sequence[int],
    ) -> NDArray[np.float64]:
        """As `Buffer` says."""
        total = self._buffer.sum(version, trips, clients, staleness, updates, rows)
        if not self._looked:
            first = [updates[row] for row in rows[:10] if updates[row].any()]
            self._looked = bool(first)
            if first and (line := _coarse(self.policy, first)):
                self._say(line)
        return total


class PlainBuffer:
    """Fixed point, and nothing hidden."""

    def __init__(self, policy: "TaskPolicy", noise: Noise | None) -> None:
        self.policy, self._noise = policy, noise

    def sum(
        self,
        version: int,
        trips: Sequence[int],
        clients: Sequence[int],
        staleness: Sequence[int],
        updates: NDArray[np.floating],
        rows: Sequence[int],
    ) -> NDArray[np.float64]:
        """As `Buffer` says."""
        _within(self.policy, staleness)
        policy, number = self.policy, self.policy.fixed_point
        total = np.zeros(policy.length, np.int64)
        try:
            for row, old in zip(rows, staleness, strict=True):
                weight = policy.weight(version - old, version)
                if policy.mode == "enclave":
                    total += number.encode(updates[row], weight)
                else:
                    total += int(weight) * number.encode(updates[row]).astype(np.int64)
        except ValueError as e:
            raise _not_finite(updates, rows) or e from None
        return _decoded(policy, total, self._noise, version)


class EnclaveBuffer:
    """Clients, the server and a trusted aggregator, in one process: what each of them knows is in its own object."""

    def __init__(self, policy: "TaskPolicy", noise: Noise | None, version: int, dropout: float, seed: int) -> None:
        from fedbuff.secagg.attestation import ReferenceValues, simulated_attester
        from fedbuff.secagg.client import EnclaveClient, check_offer
        from fedbuff.secagg.enclave import Enclave, measurement
        from fedbuff.secagg.messages import Offer
        from fedbuff.secagg.sealing import signer
        from fedbuff.secagg.server import EnclaveServer

        root, code = secrets.token_bytes(32), measurement(b"simulation")
        self.policy, self._dropout, self._seed = policy, dropout, seed
        self._enclave = Enclave.create(
            policy, simulated_attester(root, code), secrets.token_bytes, noise=noise, version=version
        )
        # one reading of the evidence for all clients: they run the same code, and it is the same evidence
        offer = Offer(policy.to_bytes(), self._enclave.evidence(0.0), b"", version)
        self._aggregator = check_offer(offer, ReferenceValues(signer(root), (code,), allow_simulated=True), 0.0)
        self._server = EnclaveServer(policy, self._aggregator.signer, check_hashes=False)
        self._clients: dict[int, EnclaveClient] = {}

    def sum(
        self,
        version: int,
        trips: Sequence[int],
        clients: Sequence[int],
        staleness: Sequence[int],
        updates: NDArray[np.floating],
        rows: Sequence[int],
    ) -> NDArray[np.float64]:
        """As `Buffer` says."""
        _within(self.policy, staleness)
        enclave, server, now = self._enclave, self._server, float(version)
        slots = enclave.issue(clients, now)
        try:
            for trip, client, slot, old, row in zip(trips, clients, slots, staleness, rows, strict=True):
                self._upload(trip, client, slot, version - old, version, updates[row])
        except ValueError as e:
            for seed in server.ready():
                server.forget(seed.slot)
            raise _not_finite(updates, rows) or e from None
        seeds = server.ready()
        reasons = enclave.submit(seeds, now)
        if any(reasons):
            raise RuntimeError(f"the trusted aggregator refused an honest client: {next(filter(None, reasons))}")
        server.add(seeds, reasons)
        for client in clients:
            self._clients[client].accepted()
        total = server.unmask(enclave.release(version, server.serials))
        return self.policy.fixed_point.decode(total)  # the noise is in it

    def _upload(self, trip: int, client: int, slot: bytes, start: int, version: int, update: NDArray[np.floating]) -> None:
        from fedbuff.secagg.client import EnclaveClient

        if client not in self._clients:
            self._clients[client] = EnclaveClient(client, self._aggregator, secrets.token_bytes, hashes=False)
        for attempt in range(256):
            if attempt:
                (slot,) = self._enclave.issue([client], float(version))
            stage = _dropped(self._seed, trip, attempt, self._dropout, stages=3)
            if stage == 0:
                continue  # gone with a slot
            seed, masked = self._clients[client].upload(slot, start, version, update)
            if stage != 2:
                self._server.seed(seed)
            if stage != 1:
                self._server.masked(masked)
            if stage is None:
                return
            self._server.forget(slot)  # gone with half an upload sent
        raise RuntimeError(f"client {client} dropped out 256 times in a row")


class HelpersBuffer:
    """Clients, the server and a committee, in one process: what each of them knows is in its own object."""

    def __init__(self, policy: "TaskPolicy", noise: Noise | None, version: int, dropout: float, seed: int) -> None:
        from fedbuff.secagg.client import CommitteeClient
        from fedbuff.secagg.committee import appointed
        from fedbuff.secagg.server import CommitteeServer

        self.policy, self._noise, self._dropout, self._seed = policy, noise, dropout, seed
        self._root = secrets.token_bytes(32)
        self._directory, self._helpers = appointed(policy, self._root, secrets.token_bytes)
        self._server = CommitteeServer(policy, self._directory, version)
        self._clients: dict[int, CommitteeClient] = {}

    def sum(
        self,
        version: int,
        trips: Sequence[int],
        clients: Sequence[int],
        staleness: Sequence[int],
        updates: NDArray[np.floating],
        rows: Sequence[int],
    ) -> NDArray[np.float64]:
        """As `Buffer` says."""
        from fedbuff.compiled.norm import norm

        _within(self.policy, staleness)
        server = self._server
        if server.version != version:
            raise ValueError(f"version {version}: the next buffer is that of version {server.version}")
        if any(not math.isfinite(norm(updates[row])) for row in rows) and (error := _not_finite(updates, rows)):
            raise error  # before anything is added
        for trip, client, old, row in zip(trips, clients, staleness, rows, strict=True):
            self._upload(trip, client, version - old, updates[row])
        listed = server.list()
        present = self._present(version)
        echoes = [helper.echo(listed) for helper in self._helpers]
        for helper in present:
            server.answer(helper.answer(echoes))
        for helper in self._helpers:
            if helper not in present:  # it answers when nobody needs it any more
                helper.answer(echoes)
            helper.expire(float(version))
        return _decoded(self.policy, server.unmask(), self._noise, version)

    def _upload(self, trip: int, client: int, start: int, update: NDArray[np.floating]) -> None:
        from fedbuff.secagg.client import CommitteeClient
        from fedbuff.secagg.committee import enter
        from fedbuff.secagg.sealing import public

        if client not in self._clients:
            private = secrets.token_bytes(32)
            enter(self._directory, self._root, "client", client, public(private))
            self._clients[client] = CommitteeClient(client, private, self._directory, self.policy, secrets.token_bytes)
        for attempt in range(256):
            stage = _dropped(self._seed, trip, attempt, self._dropout, stages=3)
            if stage == 0:
                continue  # gone before the first share
            name, secret, shares = self._clients[client].share(start)
            for share in shares[: len(shares) // 2] if stage == 1 else shares:
                self._helpers[share.helper].keep(share, float(self._server.version))
            if stage is None:
                self._server.masked(self._clients[client].upload(name, secret, start, update))
                return
        raise RuntimeError(f"client {client} dropped out 256 times in a row")

    def _present(self, version: int) -> list[Any]:
        """The helpers that answer: some may vanish, never more than recovery can do without."""
        spare = self.policy.helpers - self.policy.recovery
        gone = [h for h in self._helpers if unit(self._seed, "secagg helper", version << 8 | h.number) < self._dropout][:spare]
        return [helper for helper in self._helpers if helper not in gone]


def _dropped(seed: int, trip: int, attempt: int, probability: float, stages: int) -> int | None:
    """After how many of its messages a client vanishes; None if it does not."""
    if not probability:
        return None
    drawn = unit(seed, "secagg dropout", trip << 8 | attempt)
    return int(drawn / probability * stages) if drawn < probability else None


def _within(policy: "TaskPolicy", staleness: Sequence[int]) -> None:
    if max(staleness) >= len(policy.weights):
        raise ValueError(
            f"an update of staleness {max(staleness)}: the policy weighs up to {len(policy.weights) - 1}; "
            "raise secure_aggregation.max_staleness"
        )


def _not_finite(updates: NDArray[np.floating], rows: Sequence[int]) -> NotFiniteError | None:
    places = [place for place, row in enumerate(rows) if not np.isfinite(updates[row]).all()]
    return NotFiniteError(places) if places else None


def _coarse(policy: "TaskPolicy", updates: Sequence[NDArray[np.floating]]) -> str | None:
    """What to say if most numbers of these updates become zero on the grid, and not only tiny ones beside large ones."""
    from fedbuff.compiled.norm import norm

    number = policy.fixed_point
    kept = sum(np.count_nonzero(number.encode(update)) for update in updates)
    share = 1 - kept / sum(np.count_nonzero(update) for update in updates)
    if share <= 0.5 or (error := statistics.median(number.error(update) for update in updates)) < 0.01:
        return None
    length = statistics.median(norm(update) for update in updates)
    return (
        f"fedbuff: secure_aggregation.clip={policy.clip:g} makes a grid of {1 / policy.scale:.2g}, on which {share:.0%} of "
        f"the first updates' numbers become zero and {error:.0%} of their length is lost; take a clip near {length:.2g}"
    )


def server_sees(secure: SecureAggregation | None) -> Sees:
    """What a server sees at most: of the modes, only the enclave adds noise itself, and "plain" hides nothing."""
    if secure is None or secure.mode == "plain":
        return "updates"
    return "sums with noise" if secure.mode == "enclave" else "sums"


def _decoded(policy: "TaskPolicy", total: NDArray[np.int64], noise: Noise | None, version: int) -> NDArray[np.float64]:
    if noise is not None:
        total = total + policy.fixed_point.noise(noise(version), policy.unit)
    return policy.fixed_point.decode(total, policy.unit)
