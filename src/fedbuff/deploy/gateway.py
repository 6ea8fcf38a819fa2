"""A gateway: one process that is a SuperNode to Flower's SuperLink, and many clients to our server.

    fedbuff deploy gateway settings.toml --clients 0-49 --superlink HOST:PORT --root-certificates ca.crt --key gateway.key

Flower's own SuperNode starts a process per message and sleeps for seconds in between, so a trip takes seven seconds however
short it is. This speaks the same protocol (the same TLS, the same node authentication, by Flower's own code), trains in its own
process and looks for work as often as there was some lately. It runs no code that comes over the network: what it trains is in
its own settings.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Message
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from fedbuff.deploy.flower import orders_in, reply
from fedbuff.deploy.wire import MalformedError

log = logging.getLogger("fedbuff.deploy")
_CLIENT_APP_RAISED = 2  # Flower's ErrorCode
# Seconds between looks for work, and how they grow while there is none: a look costs the SuperLink as much as any request, and
# it can answer a hundred of them in a second.
_SOONEST, _LATEST, _SLOWER = 0.25, 1.0, 1.6


def gateway(
    work: Callable[[bytes], bytes],
    superlink: str,
    *,
    key: Path | None = None,
    root_certificates: Path | None = None,
    insecure: bool = False,
    latest: float = _LATEST,
) -> None:
    """Serve until killed. `work` turns orders into a report."""
    if insecure and key is not None:
        raise ValueError("--insecure goes without --key: authentication needs TLS")
    keys = None if key is None else private_key(key)
    certificates = None if root_certificates is None else root_certificates.read_bytes()
    with http_request_response(superlink, insecure, certificates, keys, None, None) as connection:
        node, receive, send, _, _, pull_object, push_object, confirm = connection
        log.info("gateway: node %d at %s", node, superlink)
        pause = _SOONEST
        while True:
            try:
                found = receive()
                if found is not None:
                    pause = _SOONEST
                    _answer(found, work, send, pull_object, push_object, confirm)
                    continue
            except (RunNotRunningException, ObjectPullError, httpx.HTTPError) as e:
                log.warning("gateway: %s: %s; results stay in the outbox", type(e).__name__, e)
                pause = max(pause, 0.2)
            time.sleep(pause)
            pause = min(latest, _SLOWER * pause)


def _answer(
    found: tuple[Message, Any],
    work: Callable[[bytes], bytes],
    send: Callable[..., tuple[set[str], str]],
    pull_object: Callable[[int, str], bytes],
    push_object: Callable[[int, str, str, bytes], None],
    confirm: Callable[[int, str], None],
) -> None:
    head, tree = found
    run, message_id = head.metadata.run_id, head.metadata.message_id
    objects = [node.object_id for node in iterate_object_tree(tree)]
    contents = pull_objects(objects, pull_object_fn=partial(pull_object, run))
    confirm(run, message_id)
    message = cast(Message, inflate_object_from_contents(message_id, contents))
    message.metadata.__dict__["_message_id"] = message_id
    began = time.perf_counter()
    try:
        answer = reply(message, work(orders_in(message)))
    except MalformedError as e:
        answer = Message(Error(_CLIENT_APP_RAISED, str(e)), reply_to=message)
    answer.metadata.__dict__["_message_id"] = answer.object_id
    with no_object_id_recompute():
        wanted, session = send(answer, get_object_tree(answer), time.perf_counter() - began)
        push_objects(
            get_all_nested_objects(answer), push_object_fn=partial(push_object, run, session), object_ids_to_push=wanted
        )


def private_key(path: Path) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]:
    """A gateway's key pair, from its private key in OpenSSH's format."""
    try:
        found = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as e:
        raise ValueError(f"--key {path}: can't read a private key: {e}") from e
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ValueError(f"--key {path}: expected an elliptic-curve key, as `fedbuff deploy init` makes")
    return found, found.public_key()
