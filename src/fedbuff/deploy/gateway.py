"""A gateway: one process that is a SuperNode to Flower's SuperLink, and many clients to our server.

    fedbuff deploy gateway settings.toml --clients 0-49 --superlink HOST:PORT --folder DIR \
        --root-certificates ca.crt --key gateway.key

Flower's own SuperNode starts a process per message and sleeps for seconds in between, so a trip takes seven seconds however
short it is. This speaks the same protocol (the same TLS, the same node authentication, by Flower's own code), trains in its own
process and looks for work as often as there was some lately. It runs no code that comes over the network: what it trains is in
its own settings.
"""

import logging
import sqlite3
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Message

from fedbuff.deploy.fleet import Fleet, RefusedError, connected
from fedbuff.deploy.flower import orders_in, reply
from fedbuff.deploy.wire import MalformedError

log = logging.getLogger("fedbuff.deploy")
_CLIENT_APP_RAISED = 2  # Flower's ErrorCode
# Seconds between looks for work, and how they grow while there is none: a look costs the SuperLink as much as any request, and
# it can answer a hundred of them in a second.
_SOONEST, _LATEST, _SLOWER = 0.25, 1.0, 1.6
_RECONNECT = 3.0


def gateway(
    work: Callable[[bytes], bytes],
    superlink: str,
    *,
    key: Path | None = None,
    root_certificates: Path | None = None,
    insecure: bool = False,
    folder: Path | None = None,
) -> None:
    """Serve until killed. `work` turns orders into a report; in `folder` it remembers which node it is."""
    if insecure and key is not None:
        raise ValueError("--insecure goes without --key: authentication needs TLS")
    keys = None if key is None else private_key(key)
    certificates = None if root_certificates is None else authority(root_certificates)
    remember = None if folder is None else folder / "node"
    while True:
        try:
            with connected(superlink, keys=keys, certificates=certificates, insecure=insecure, remember=remember) as fleet:
                log.info("gateway: node %d at %s", fleet.node, superlink)
                _serve(fleet, work)
        except (RefusedError, httpx.HTTPError) as e:  # not registered yet, taken for somebody else, or nobody is there
            log.warning("gateway: %s: %s; trying again", type(e).__name__, e)
        except sqlite3.OperationalError as e:  # what it can't keep, it must not report
            hint = "free some space; " if "full" in str(e) or "disk" in str(e) else ""
            log.warning("gateway: its outbox can't be written: %s; %strying again", e, hint)
        time.sleep(_RECONNECT)


def _serve(fleet: Fleet, work: Callable[[bytes], bytes]) -> None:
    pause, unlucky = _SOONEST, 0
    while True:
        try:
            message = fleet.receive()
            if message is not None:
                _answer(fleet, message, work)
                pause, unlucky = _SOONEST, 0
                continue
            unlucky = 0
        except RefusedError as e:  # a run that has ended meanwhile, say; but if it goes on, we are not who we think
            unlucky += 1
            if unlucky > 3:
                raise
            log.warning("gateway: %s; results stay in the outbox", e)
        time.sleep(pause)
        pause = min(_LATEST, _SLOWER * pause)


def _answer(fleet: Fleet, message: Message, work: Callable[[bytes], bytes]) -> None:
    began = time.perf_counter()
    try:
        answer = reply(message, work(orders_in(message)))
    except MalformedError as e:
        answer = Message(Error(_CLIENT_APP_RAISED, str(e)), reply_to=message)
    fleet.answer(message, answer, time.perf_counter() - began)


def authority(path: Path) -> bytes:
    """The certificate of whom the SuperLink's own must be by."""
    try:
        found = path.read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except OSError as e:
        why = "not a certificate in PEM format" if isinstance(e, ssl.SSLError) else e.strerror
        raise ValueError(f"--root-certificates {path}: {why}") from e
    return found


def private_key(path: Path) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]:
    """A gateway's key pair, from its private key in OpenSSH's format."""
    try:
        found = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as e:
        raise ValueError(f"--key {path}: can't read a private key: {e}") from e
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ValueError(f"--key {path}: expected an elliptic-curve key, as `fedbuff deploy init` makes")
    return found, found.public_key()
