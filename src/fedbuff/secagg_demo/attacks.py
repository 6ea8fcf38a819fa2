"""The attacks that secure aggregation has to refuse, each of them really tried on real parties.

An attack is a function that makes its victims, does its worst, and returns an `Outcome`: who refused, why, and whether the
victim is to the byte what it was before.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbuff.core.staleness import polynomial
from fedbuff.secagg import sealing
from fedbuff.secagg.attestation import ReferenceValues, simulated_attester
from fedbuff.secagg.client import Aggregator, CommitteeClient, EnclaveClient, check_offer
from fedbuff.secagg.coding import Code
from fedbuff.secagg.committee import Directory, Helper, appointed, enter
from fedbuff.secagg.enclave import Enclave, measurement
from fedbuff.secagg.messages import List, MaskedElements, Offer, RefusedError, Seed, Slot
from fedbuff.secagg.policy import TaskPolicy, enclave_policy, helpers_policy
from fedbuff.secagg.server import CommitteeServer, EnclaveServer

LENGTH, BUFFER_SIZE, MOST_STALENESS = 50, 4, 10
NOW = 1_000.0


@dataclass(frozen=True)
class Outcome:
    """How an attack ended: `reason` is empty if it was not refused."""

    attack: str
    party: str
    reason: str
    untouched: bool

    @property
    def refused(self) -> bool:
        return bool(self.reason) and self.untouched


class EnclaveWorld(NamedTuple):
    """A trusted aggregator, a server and clients, with what was written ahead."""

    policy: TaskPolicy
    enclave: Enclave
    aggregator: Aggregator
    server: EnclaveServer
    clients: list[EnclaveClient]
    records: list[bytes]
    root: bytes
    reference: ReferenceValues

    def upload(self, client: int, start: int = 0, version: int | None = None) -> Seed:
        """Both messages of a trip, kept at the server; the seed, not yet submitted."""
        (slot,) = self.enclave.issue([client], NOW)
        seed, masked = self.clients[client].upload(
            slot, start, self.enclave.version if version is None else version, update(client)
        )
        self.server.seed(seed)
        self.server.masked(masked)
        return seed

    def fill(self) -> list[int]:
        """A whole buffer, accepted; the slots in it."""
        for client in range(self.policy.buffer_size):
            self.upload(client)
        seeds = self.server.ready()
        self.server.add(seeds, self.enclave.submit(seeds, NOW))
        return self.server.serials


class HelpersWorld(NamedTuple):
    """A committee, a server and clients."""

    policy: TaskPolicy
    helpers: list[Helper]
    server: CommitteeServer
    clients: list[CommitteeClient]
    directory: Directory

    def upload(self, client: int, start: int = 0) -> MaskedElements:
        """A mask shared out, and the masked update at the server."""
        masked = self.masked(client, start)
        self.server.masked(masked)
        return masked

    def masked(self, client: int, start: int = 0) -> MaskedElements:
        """A mask shared out, and the masked update, not yet at the server."""
        name, secret, shares = self.clients[client].share(start)
        for share in shares:
            self.helpers[share.helper].keep(share, NOW)
        return self.clients[client].upload(name, secret, start, update(client))

    def fill(self) -> List:
        for client in range(self.policy.buffer_size):
            self.upload(client)
        return self.server.list()


def update(client: int) -> NDArray[np.float32]:
    return (np.random.default_rng(client).standard_normal(LENGTH) / 10).astype(np.float32)


def enclave_world() -> EnclaveWorld:
    policy = enclave_policy(LENGTH, BUFFER_SIZE, 1.0, polynomial(0.5), MOST_STALENESS)
    root, code, records = os.urandom(32), measurement(b"attacks"), list[bytes]()
    enclave = Enclave.create(policy, simulated_attester(root, code), os.urandom, records.append)
    reference = ReferenceValues(sealing.signer(root), (code,), allow_simulated=True)
    aggregator = check_offer(Offer(policy.to_bytes(), enclave.evidence(NOW), bytes(40), 0), reference, NOW)
    clients = [EnclaveClient(number, aggregator, os.urandom) for number in range(2 * BUFFER_SIZE)]
    server = EnclaveServer(policy, aggregator.signer)
    return EnclaveWorld(policy, enclave, aggregator, server, clients, records, root, reference)


def helpers_world() -> HelpersWorld:
    policy = helpers_policy(LENGTH, BUFFER_SIZE, 1.0, polynomial(0.5), MOST_STALENESS, Code(5, 4, 2))
    root = os.urandom(32)
    directory, helpers = appointed(policy, root, os.urandom)
    clients = []
    for number in range(2 * BUFFER_SIZE):
        private = os.urandom(32)
        enter(directory, root, "client", number, sealing.public(private))
        clients.append(CommitteeClient(number, private, directory, policy, os.urandom))
    return HelpersWorld(policy, helpers, CommitteeServer(policy, directory), clients, directory)


def tried(attack: str, party: str, state: Callable[[], bytes], act: Callable[[], object]) -> Outcome:
    """Do it, and see what became of the victim. A list of reasons, as `submit` gives, counts as refused if all are there."""
    before = state()
    try:
        said = act()
        reasons = said if isinstance(said, list) else []
        reason = reasons[0] if reasons and all(reasons) else ""
    except RefusedError as e:
        reason = str(e)
    return Outcome(attack, party, reason, state() == before)


# ── on the trusted aggregator ────────────────────────────────────────────────────────────────────────────────────────


def replayed_slot() -> Outcome:
    world = enclave_world()
    seed = world.upload(0)
    world.enclave.submit([seed], NOW)
    return tried("replayed slot", "trusted aggregator", world.enclave.state, lambda: world.enclave.submit([seed], NOW))


def forged_slot() -> Outcome:
    world = enclave_world()
    seed = world.upload(0)
    other = replace(Slot.from_bytes(seed.slot), client=1)  # the same slot, for a client that was not given it
    forged, _ = world.clients[1].upload(other.to_bytes(), 0, 0, update(1))
    return tried("forged slot", "trusted aggregator", world.enclave.state, lambda: world.enclave.submit([forged], NOW))


def swapped_ciphertext() -> Outcome:
    world = enclave_world()
    a, b = world.upload(0), world.upload(1)
    swapped = [replace(a, locked=b.locked), replace(b, locked=a.locked)]
    return tried("swapped ciphertext", "trusted aggregator", world.enclave.state, lambda: world.enclave.submit(swapped, NOW))


def swapped_update() -> Outcome:
    world = enclave_world()
    a, b = world.upload(0), world.upload(1)
    swapped = [replace(a, digest=b.digest)]  # the seed of one masked update, for another
    return tried("swapped masked update", "trusted aggregator", world.enclave.state, lambda: world.enclave.submit(swapped, NOW))


def wrong_policy() -> Outcome:
    world = enclave_world()
    (slot,) = world.enclave.issue([0], NOW)
    weaker = replace(world.policy, buffer_size=2)
    client = EnclaveClient(
        0, Aggregator(weaker, world.aggregator.public, world.aggregator.signer, world.aggregator.epoch), os.urandom
    )
    seed, _ = client.upload(slot, 0, 0, update(0))
    return tried("wrong policy hash", "trusted aggregator", world.enclave.state, lambda: world.enclave.submit([seed], NOW))


def wrong_policy_at_client() -> Outcome:
    world = enclave_world()
    weaker = replace(world.policy, buffer_size=2)
    offer = Offer(weaker.to_bytes(), world.enclave.evidence(NOW), bytes(40), 0)
    return tried("wrong policy hash", "client", world.enclave.state, lambda: check_offer(offer, world.reference, NOW))


def subset_release() -> Outcome:
    world = enclave_world()
    serials = world.fill()
    act = lambda: world.enclave.release(0, serials[1:])  # noqa: E731
    return tried("release of a subset", "trusted aggregator", world.enclave.state, act)


def early_release() -> Outcome:
    world = enclave_world()
    world.enclave.submit([world.upload(0)], NOW)
    act = lambda: world.enclave.release(0, [0])  # noqa: E731
    return tried("release below K", "trusted aggregator", world.enclave.state, act)


def one_more_update() -> Outcome:
    world = enclave_world()
    world.fill()
    seed = world.upload(BUFFER_SIZE)
    return tried("an update more than K", "trusted aggregator", world.enclave.state, lambda: world.enclave.submit([seed], NOW))


def second_release() -> Outcome:
    world = enclave_world()
    serials = world.fill()
    first = world.enclave.release(0, serials).to_bytes()
    again = world.enclave.release(0, serials).to_bytes()
    if first != again:
        return Outcome("second release", "trusted aggregator", "", False)
    act = lambda: world.enclave.release(0, serials[1:])  # noqa: E731
    return tried("second release", "trusted aggregator", world.enclave.state, act)


def weight_by_version() -> Outcome:
    world = enclave_world()
    seed = world.upload(0, start=0, version=3)  # "I am at version 3 already": the client would weigh its update by s(3)
    return tried(
        "weight chosen by the server", "trusted aggregator", world.enclave.state, lambda: world.enclave.submit([seed], NOW)
    )


def same_client_twice() -> Outcome:
    world = enclave_world()
    world.enclave.submit([world.upload(0)], NOW)
    seed = world.upload(0)
    return tried(
        "a client twice in a buffer", "trusted aggregator", world.enclave.state, lambda: world.enclave.submit([seed], NOW)
    )


def rolled_back() -> Outcome:
    world = enclave_world()
    world.fill()
    before, counter = list(world.records), world.enclave.number
    old = before[:-1]  # as if the last write had never happened

    def act() -> None:
        Enclave.restore(old, counter, world.policy, simulated_attester(world.root, measurement(b"attacks")))

    return tried("enclave state rolled back", "trusted aggregator", world.enclave.state, act)


# ── on clients ───────────────────────────────────────────────────────────────────────────────────────────────────────


def stale_evidence() -> Outcome:
    world = enclave_world()
    offer = Offer(world.policy.to_bytes(), world.enclave.evidence(NOW), bytes(40), 0)
    later = NOW + world.reference.max_age + 1
    return tried("stale evidence", "client", world.enclave.state, lambda: check_offer(offer, world.reference, later))


def debug_evidence() -> Outcome:
    world = enclave_world()
    attester = simulated_attester(world.root, measurement(b"attacks"), debug=True)
    debug = Enclave.create(world.policy, attester, os.urandom)
    offer = Offer(world.policy.to_bytes(), debug.evidence(NOW), bytes(40), 0)
    return tried("debug evidence", "client", world.enclave.state, lambda: check_offer(offer, world.reference, NOW))


def simulated_evidence() -> Outcome:
    world = enclave_world()
    offer = Offer(world.policy.to_bytes(), world.enclave.evidence(NOW), bytes(40), 0)
    strict = replace(world.reference, allow_simulated=False)
    return tried("simulated evidence, in production", "client", world.enclave.state, lambda: check_offer(offer, strict, NOW))


# ── on helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def singleton_list() -> Outcome:
    world = helpers_world()
    listed = world.fill()
    alone = replace(listed, lines=listed.lines[:1])
    return tried("singleton list", "helper", world.helpers[0].state, lambda: world.helpers[0].echo(alone))


def longer_list() -> Outcome:
    world = helpers_world()
    listed = world.fill()
    more = world.masked(BUFFER_SIZE)
    longer = replace(listed, lines=(*listed.lines, (more.mask, 0, int(world.policy.weight(0, 0)))))
    return tried("an update more than K", "helper", world.helpers[0].state, lambda: world.helpers[0].echo(longer))


def upload_after_the_list() -> Outcome:
    world = helpers_world()
    world.fill()
    late = world.masked(BUFFER_SIZE)
    return tried("an update more than K", "server", world.server.state, lambda: world.server.masked(late))


def overlapping_lists() -> Outcome:
    world = helpers_world()
    listed = world.fill()
    echoes = [helper.echo(listed) for helper in world.helpers]
    for helper in world.helpers:
        world.server.answer(helper.answer(echoes))
    world.server.unmask()
    for client in range(BUFFER_SIZE, 2 * BUFFER_SIZE):
        world.upload(client, start=1)
    fresh = world.server.list()
    weight = int(world.policy.weight(0, 1))
    mixed = replace(fresh, lines=((listed.lines[0][0], 0, weight), *fresh.lines[1:]))  # all but one are new
    return tried("overlapping lists", "helper", world.helpers[0].state, lambda: world.helpers[0].echo(mixed))


def two_lists() -> Outcome:
    world = helpers_world()
    listed = world.fill()
    more = world.masked(BUFFER_SIZE)
    other = replace(listed, lines=(*listed.lines[1:], (more.mask, 0, int(world.policy.weight(0, 0)))))
    shown = [helper.echo(listed) for helper in world.helpers[:2]] + [helper.echo(other) for helper in world.helpers[2:]]
    return tried("two lists at once", "helper", world.helpers[0].state, lambda: world.helpers[0].answer(shown))


def weight_in_list() -> Outcome:
    world = helpers_world()
    listed = world.fill()
    (mask, start, weight), *rest = listed.lines
    heavier = replace(listed, lines=((mask, start, 2 * weight), *rest))
    return tried("weight chosen by the server", "helper", world.helpers[0].state, lambda: world.helpers[0].echo(heavier))


def start_in_list() -> Outcome:
    world = helpers_world()
    for client in range(BUFFER_SIZE):
        world.upload(client)
    listed = replace(world.server.list(), version=5)
    lines = [(mask, 5 if i else 0, int(world.policy.weight(5 if i else 0, 5))) for i, (mask, _, _) in enumerate(listed.lines)]
    lied = replace(listed, lines=tuple(lines))  # weights that fit, by start versions that are not the clients'
    return tried("start version chosen by the server", "helper", world.helpers[0].state, lambda: world.helpers[0].echo(lied))


def too_few_helpers() -> Outcome:
    world = helpers_world()
    listed = world.fill()
    echoes = [helper.echo(listed) for helper in world.helpers]
    for helper in world.helpers[: world.policy.recovery - 1]:
        world.server.answer(helper.answer(echoes))
    return tried("U − 1 helpers", "server", world.server.state, world.server.unmask)


def too_few_echoes() -> Outcome:
    world = helpers_world()
    listed = world.fill()
    echoes = [helper.echo(listed) for helper in world.helpers[: world.policy.recovery - 1]]
    return tried("U − 1 echoes", "helper", world.helpers[0].state, lambda: world.helpers[0].answer(echoes))


def tampered_share() -> Outcome:
    world = helpers_world()
    _, _, shares = world.clients[0].share(0)
    changed = replace(shares[0], locked=bytes([shares[0].locked[0] ^ 1]) + shares[0].locked[1:])
    return tried("tampered share", "helper", world.helpers[0].state, lambda: world.helpers[0].keep(changed, NOW))


ATTACKS: list[Callable[[], Outcome]] = [
    replayed_slot,
    forged_slot,
    swapped_ciphertext,
    swapped_update,
    wrong_policy,
    wrong_policy_at_client,
    subset_release,
    early_release,
    one_more_update,
    second_release,
    weight_by_version,
    same_client_twice,
    rolled_back,
    stale_evidence,
    debug_evidence,
    simulated_evidence,
    singleton_list,
    longer_list,
    overlapping_lists,
    two_lists,
    weight_in_list,
    start_in_list,
    too_few_helpers,
    upload_after_the_list,
    too_few_echoes,
    tampered_share,
]
