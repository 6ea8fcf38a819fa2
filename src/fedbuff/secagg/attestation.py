"""Whom a client talks to: evidence that a key belongs to known code that runs a known policy, in the roles of RFC 9334.

An attester signs `report_data`, in which the trusted aggregator has put a hash of its keys, its policy and its epoch. A
verifier checks the signature and compares the claims with reference values. Both are plain callables, so that SEV-SNP, TDX or
Nitro can take their places. The only attester here is **simulated**: it is a signature by a key that anybody could have made,
it says so in its claims, and a verifier refuses it unless it was told to allow simulated evidence.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from fedbuff.secagg import sealing
from fedbuff.secagg.messages import RefusedError

Attester = Callable[[bytes, float], bytes]  # report data, now -> evidence
Verifier = Callable[[bytes, "ReferenceValues", float], "Claims"]  # evidence, what is acceptable, now -> claims, or a refusal


@dataclass(frozen=True)
class Claims:
    """What evidence says about an enclave.

    measurement   hash of the code that runs in it
    report_data   what the code had signed
    svn           security version number: goes up when a hole is closed
    """

    measurement: bytes
    report_data: bytes
    svn: int
    debug: bool
    simulated: bool
    issued: float


@dataclass(frozen=True)
class ReferenceValues:
    """What a client accepts: known measurements, a security version, and evidence that is not older than `max_age`."""

    root: bytes  # the public key at the root of attestation
    measurements: tuple[bytes, ...]
    svn: int = 1
    max_age: float = 7 * 86_400.0
    allow_simulated: bool = False
    allow_debug: bool = False


def report_data(public: bytes, signer: bytes, policy: bytes, epoch: bytes) -> bytes:
    """What binds evidence to the trusted aggregator's two keys, its policy and its epoch."""
    return hashlib.sha256(b"fedbuff-tsa-v1" + public + signer + policy + epoch).digest()


def simulated_attester(root: bytes, measurement: bytes, svn: int = 1, debug: bool = False) -> Attester:
    """An attester that stands in for hardware; `root` is a private Ed25519 key."""

    def quote(data: bytes, now: float) -> bytes:
        claims = Claims(measurement, data, svn, debug, True, now)
        body = _body(claims)
        return sealing.sign(root, body) + body

    return quote


def verify_simulated(evidence: bytes, reference: ReferenceValues, now: float) -> Claims:
    """The claims, if they are signed by the root and acceptable."""
    signature, body = evidence[:64], evidence[64:]
    if not sealing.signed_by(reference.root, body, signature):
        raise RefusedError("evidence: not signed by the root of attestation")
    claims = _claims(body)
    check_claims(claims, reference, now)
    return claims


def check_claims(claims: Claims, reference: ReferenceValues, now: float) -> None:
    """Compare claims with reference values; the same for every kind of evidence."""
    if claims.simulated and not reference.allow_simulated:
        raise RefusedError(
            "evidence: this attestation is simulated, nothing protects the enclave; pass allow_simulated to accept"
        )
    if claims.debug and not reference.allow_debug:
        raise RefusedError("evidence: the enclave runs in debug mode, its operator can read its memory")
    if claims.measurement not in reference.measurements:
        raise RefusedError(f"evidence: unknown code, measurement {claims.measurement.hex()[:16]}…")
    if claims.svn < reference.svn:
        raise RefusedError(f"evidence: security version {claims.svn} is older than {reference.svn}")
    if not -60.0 <= now - claims.issued <= reference.max_age:
        raise RefusedError(f"evidence: stale, {now - claims.issued:.0f} old; at most {reference.max_age:.0f} is accepted")


def _body(claims: Claims) -> bytes:
    table = {name: value.hex() if isinstance(value, bytes) else value for name, value in asdict(claims).items()}
    return json.dumps(table, sort_keys=True, separators=(",", ":")).encode()


def _claims(body: bytes) -> Claims:
    try:
        table: Any = json.loads(body)
        claims = Claims(
            bytes.fromhex(table["measurement"]),
            bytes.fromhex(table["report_data"]),
            int(table["svn"]),
            bool(table["debug"]),
            bool(table["simulated"]),
            float(table["issued"]),
        )
        if _body(claims) != body or not math.isfinite(claims.issued):
            raise ValueError("not in canonical form")
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as e:
        raise RefusedError(f"evidence: {e}") from e
    return claims
