"""One buffer in each mode, every message through its bytes, and what each of them weighs.

The trusted aggregator is a process of its own, as in a deployment; the committee's helpers are objects here.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbuff.core.staleness import polynomial
from fedbuff.secagg import sealing
from fedbuff.secagg.client import CommitteeClient, EnclaveClient, check_offer
from fedbuff.secagg.coding import Code
from fedbuff.secagg.committee import appointed, enter
from fedbuff.secagg.messages import Answer, Echo, List, Masked, MaskedElements, Offer, Release, Seed, Share
from fedbuff.secagg.policy import enclave_policy, helpers_policy
from fedbuff.secagg.server import CommitteeServer, EnclaveServer
from fedbuff.trusted import TrustedProcess, simulated_reference

MOST_STALENESS = 20


class Line(NamedTuple):
    """Messages of one kind: from whom to whom, how many in a buffer, bytes of one."""

    message: str
    route: str
    number: int
    size: int


class Shown(NamedTuple):
    """A mode's messages; whether the decoded sum is that of the same integers in the clear; how far quantisation moved it."""

    lines: list[Line]
    exact: bool
    error: float


def updates(length: int, count: int) -> NDArray[np.float32]:
    """Of about the clip bound's norm."""
    drawn = np.random.default_rng(0).standard_normal((count, length), np.float32)
    return drawn / np.float32(np.sqrt(length))


def enclave(length: int, buffer_size: int) -> Shown:
    policy = enclave_policy(length, buffer_size, 1.0, polynomial(0.5), MOST_STALENESS)
    work, version = updates(length, buffer_size), MOST_STALENESS
    sizes, sent = _scale()

    with tempfile.TemporaryDirectory() as folder, TrustedProcess(Path(folder), policy, version) as tsa:
        evidence, now = tsa.evidence(), time.time()
        server = None
        for number, (slot, update) in enumerate(zip(tsa.issue(range(buffer_size)), work, strict=True)):
            start = version - number % (MOST_STALENESS + 1)
            offer = Offer(policy.to_bytes(), evidence, slot, start)
            offer = Offer.from_bytes(sent("policy, evidence, slot", "server → client", offer.to_bytes()))
            aggregator = check_offer(offer, simulated_reference(), now)
            client = EnclaveClient(number, aggregator, os.urandom)
            seed, masked = client.upload(offer.slot, offer.start, version, update)
            server = server or EnclaveServer(policy, aggregator.signer)
            server.seed(Seed.from_bytes(sent("sealed seed, opens a session", "client → server", seed.to_bytes())))
            server.masked(Masked.from_bytes(sent("masked update", "client → server", masked.to_bytes())))
            later = replace(seed, opening=b"")
        assert server is not None
        sizes["sealed seed, in later trips"] = Line("sealed seed, in later trips", "client → server", 0, len(later.to_bytes()))
        ready = server.ready()
        for seed in ready:
            sent("sealed seed, passed on", "server → trusted", seed.to_bytes())
        server.add(ready, tsa.submit(ready))
        release = tsa.release(version, server.serials)
        total = server.unmask(Release.from_bytes(sent("sum of the pads, signed", "trusted → server", release.to_bytes())))
    plain = np.zeros(length, np.int64)
    exact = np.zeros(length)
    for number, update in enumerate(work):
        weight = policy.weights[number % (MOST_STALENESS + 1)]
        plain += policy.fixed_point.encode(update, weight)
        exact += weight * _clipped(update)
    error = float(np.abs(policy.fixed_point.decode(total) - exact).max() / np.abs(exact).max())
    return Shown(list(sizes.values()), bool((total == plain).all()), error)


def helpers(length: int, buffer_size: int, code: Code) -> Shown:
    policy = helpers_policy(length, buffer_size, 1.0, polynomial(0.5), MOST_STALENESS, code)
    work, version, now = updates(length, buffer_size), MOST_STALENESS, 0.0
    sizes, sent = _scale()

    root = os.urandom(32)
    directory, committee = appointed(policy, root, os.urandom)
    server = CommitteeServer(policy, directory, version)
    for number, update in enumerate(work):
        start = version - number % (MOST_STALENESS + 1)
        private = os.urandom(32)
        enter(directory, root, "client", number, sealing.public(private))
        client = CommitteeClient(number, private, directory, policy, os.urandom)
        name, secret, shares = client.share(start)
        for share in shares:
            message = Share.from_bytes(sent("share of the mask", "client → helper", share.to_bytes()))
            committee[message.helper].keep(message, now)
        masked = client.upload(name, secret, start, update)
        server.masked(MaskedElements.from_bytes(sent("masked update", "client → server", masked.to_bytes())))
    listed = server.list()
    echoes = []
    for helper in committee:
        shown = List.from_bytes(sent("list of masks and weights", "server → helper", listed.to_bytes()))
        echo = helper.echo(shown)
        echoes.append(Echo.from_bytes(sent("echo of the list, signed", "helper → server", echo.to_bytes())))
    together = b"".join(echo.to_bytes() for echo in echoes)
    for helper in committee[code.helpers - code.recovery :]:  # the others have vanished
        sent("all echoes", "server → helper", together)
        answer = Answer.from_bytes(sent("share of the masks' sum", "helper → server", helper.answer(echoes).to_bytes()))
        server.answer(answer)
    total = server.unmask()
    plain = np.zeros(length, np.int64)
    exact = np.zeros(length)
    for number, update in enumerate(work):
        weight = int(policy.weights[number % (MOST_STALENESS + 1)])
        plain += weight * policy.fixed_point.encode(update).astype(np.int64)
        exact += weight / policy.unit * _clipped(update)
    error = float(np.abs(policy.fixed_point.decode(total, policy.unit) - exact).max() / np.abs(exact).max())
    return Shown(list(sizes.values()), bool((total == plain).all()), error)


def _scale() -> tuple[dict[str, Line], Callable[[str, str, bytes], bytes]]:
    """What has been sent, by message, and the function that weighs every message on its way."""
    sizes: dict[str, Line] = {}

    def sent(message: str, route: str, data: bytes) -> bytes:
        known = sizes.get(message, Line(message, route, 0, 0))
        sizes[message] = known._replace(number=known.number + 1, size=len(data))
        return data

    return sizes, sent


def _clipped(update: NDArray[np.float32]) -> NDArray[np.float64]:
    return update.astype(np.float64) * min(1.0, 1.0 / float(np.linalg.norm(update.astype(np.float64))))
