"""What secure aggregation costs, per update, on this machine: medians of several repeats, as a table ready for JSON."""

import os
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from fedbuff.core.staleness import polynomial
from fedbuff.secagg import field, sealing
from fedbuff.secagg.attestation import simulated_attester
from fedbuff.secagg.client import Aggregator, EnclaveClient
from fedbuff.secagg.coding import Code
from fedbuff.secagg.enclave import Enclave, measurement
from fedbuff.secagg.messages import NAME, MaskedElements, Share, digest
from fedbuff.secagg.pad import SEED, mask
from fedbuff.secagg.policy import enclave_policy, helpers_policy
from fedbuff.secagg.server import EnclaveServer
from fedbuff.sim.secure import SecureAggregation

CODES = (Code(16, 12, 6), Code(32, 24, 12), Code(64, 48, 24))


def bench(lengths: list[int], repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Milliseconds by length of the model; see the keys."""
    found: dict[str, Any] = {"repeats": repeats, "enclave": {}, "helpers": {}, "simulation": {}}
    for length in lengths:
        say(f"{length:,} weights: enclave")
        found["enclave"][length] = of_enclave(length, repeats)
        say(f"{length:,} weights: helpers")
        found["helpers"][length] = {f"{c.helpers},{c.recovery},{c.privacy}": of_helpers(length, c, repeats) for c in CODES}
        say(f"{length:,} weights: a buffer of 10 in the simulator")
        found["simulation"][length] = of_simulation(length, repeats)
    return found


def of_enclave(length: int, repeats: int, buffer_size: int = 10) -> dict[str, float]:
    policy = enclave_policy(length, buffer_size, 1.0, polynomial(0.5), 20)
    enclave = Enclave.create(policy, simulated_attester(os.urandom(32), measurement(b"bench")), os.urandom)
    evidence = enclave.evidence(0.0)
    aggregator = Aggregator(policy, evidence[:32], evidence[32:64], enclave.epoch)
    server = EnclaveServer(policy, aggregator.signer)
    update = (np.random.default_rng(0).standard_normal(length) / np.sqrt(length)).astype(np.float32)
    integers, secret, info = policy.fixed_point.encode(update, 0.5), os.urandom(SEED), bytes(140)
    private = os.urandom(32)
    sealed = sealing.seal(sealing.public(private), info, secret)
    costs = {
        "client_quantise_ms": timed(lambda: policy.fixed_point.encode(update, 0.5), repeats),
        "client_mask_ms": timed(lambda: mask(integers, secret), repeats),
        "client_hash_ms": timed(lambda: digest(integers.view(np.uint32)), repeats),
        "session_seal_ms": timed(lambda: sealing.seal(aggregator.public, info, secret), repeats),
        "session_open_ms": timed(lambda: sealing.unseal(private, info, sealed), repeats),
    }
    clients = [EnclaveClient(number, aggregator, os.urandom) for number in range(buffer_size)]
    upload, trusted, added, released = list[float](), list[float](), list[float](), list[float]()
    peak = 0
    for version in range(repeats):
        for number, client in enumerate(clients):
            (slot,) = enclave.issue([number], 0.0)
            began = time.perf_counter()
            seed, masked = client.upload(slot, version, version, update)
            upload.append(time.perf_counter() - began)
            size = len(seed.to_bytes()) + len(masked.to_bytes())  # a later trip's: the first one opens a session, too
            server.seed(seed)
            server.masked(masked)
        seeds, reasons = server.ready(), list[str | None]()
        tracemalloc.start()
        for seed in seeds:
            began = time.perf_counter()
            reasons += enclave.submit([seed], 0.0)
            trusted.append(time.perf_counter() - began)
        peak = max(peak, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        began = time.perf_counter()
        server.add(seeds, reasons)
        added.append((time.perf_counter() - began) / buffer_size)
        began = time.perf_counter()
        server.unmask(enclave.release(version, server.serials))
        released.append(time.perf_counter() - began)
        for client in clients:
            client.accepted()
    middle = statistics.median
    return {
        **costs,
        "client_upload_ms": middle(upload) * 1e3,
        "trusted_submit_ms": middle(trusted) * 1e3,
        "server_add_ms": middle(added) * 1e3,
        "release_and_unmask_ms": middle(released) * 1e3,
        # the sum, room for a pad, and what a buffer needs more
        "trusted_memory_vectors": (2 * 4 * length + peak) / (4 * length),
        "upload_bytes": float(size),
    }


def of_helpers(length: int, code: Code, repeats: int) -> dict[str, float]:
    policy = helpers_policy(length, 10, 1.0, polynomial(0.5), 20, code)
    secret, width = os.urandom(SEED), code.width(length)
    drawn = field.uniform(secret, length)
    rows = field.uniform(os.urandom(SEED), code.privacy * width).reshape(code.privacy, width)
    shares = code.encode(drawn, rows)
    survivors = {j: shares[j] for j in range(code.helpers - code.recovery, code.helpers)}
    update = (np.random.default_rng(0).standard_normal(length) / np.sqrt(length)).astype(np.float32)
    key, text = os.urandom(32), shares[0].astype("<u4").tobytes()
    few = max(3, repeats // 4)
    share = Share(bytes(NAME), 0, 0, 0, sealing.lock(key, b"", text))
    masked = MaskedElements(bytes(NAME), 0, 0, drawn.astype("<u4"))
    return {
        "client_draw_ms": timed(lambda: (field.uniform(secret, length), field.uniform(secret, rows.size)), few),
        "client_encode_ms": timed(lambda: code.encode(drawn, rows), few),
        "client_lock_ms": timed(lambda: sealing.lock(key, b"", text), few) * code.helpers,
        "client_mask_ms": timed(lambda: field.add(field.from_signed(policy.fixed_point.encode(update)), drawn), few),
        "helper_add_ms": timed(lambda: field.scale(shares[0], 37), few),
        "server_add_ms": timed(lambda: field.add(drawn, field.scale(drawn, 37)), few),
        "server_decode_ms": timed(lambda: code.decode(survivors, length), few),
        "upload_bytes": float(len(masked.to_bytes()) + code.helpers * len(share.to_bytes())),
    }


def of_simulation(length: int, repeats: int, buffer_size: int = 10) -> dict[str, float]:
    """Milliseconds of one core per update in the simulator, by mode; sessions are open."""
    work = (np.random.default_rng(0).standard_normal((buffer_size, length)) / np.sqrt(length)).astype(np.float32)
    found = {}
    for mode in ("plain", "enclave", "helpers"):
        buffer = SecureAggregation(mode, clip=1.0, max_staleness=20).buffer(length, buffer_size, polynomial(0.5))
        places, times = range(buffer_size), []
        for version in range(1 + max(3, repeats // (10 if mode == "helpers" else 1))):
            began = time.process_time()
            buffer.sum(
                version, [version * buffer_size + p for p in places], list(places), [0] * buffer_size, work, list(places)
            )
            times.append(time.process_time() - began)
        found[f"{mode}_ms"] = statistics.median(times[1:]) / buffer_size * 1e3
    return found


def timed(act: Callable[[], object], repeats: int) -> float:
    """Milliseconds, the median."""
    act()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3
