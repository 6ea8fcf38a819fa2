"""A node of Flower's SuperLink: connect, take a message, answer it. Flower's protocol, by Flower's own client.

    with connected(superlink, keys=…, certificates=…, remember=folder / "node") as fleet:
        message = fleet.receive()                # None if there is none
        fleet.answer(message, reply)

Flower's own connection gives the process up when it can't get in at once, and it can't for a minute after a kill −9, since the
SuperLink takes the dead node for a living one. This remembers which node it was, says that it is gone, and comes back. It tells
the SuperLink more often that it is alive, so that its own death is noticed sooner.

What is used here of Flower is not part of its stable API; `fedbuff doctor` says which versions it was tried with.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

log = logging.getLogger("fedbuff.deploy")
Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]
T = TypeVar("T")
_ALIVE = 15.0  # seconds between signs of life; the SuperLink waits for two of them
_PATIENCE = 120.0  # seconds to try what a SuperLink that is away does not answer
_UPLOAD = 30.0  # seconds to wait for the rest of a message that is still being sent


class RefusedError(Exception):
    """The SuperLink does not want this node, or not any more."""


class Fleet:
    """An active node."""

    def __init__(self, client: FleetHttpClient, node: int) -> None:
        self._client, self._node = client, Node(node_id=node)
        self.node = node

    def receive(self) -> Message | None:
        """The next message for this node, whole."""
        found = patiently(lambda: self._client.PullMessages(PullMessagesRequest(node=self._node)))
        if not found.messages_list:
            return None
        head, tree = message_from_proto(found.messages_list[0]), found.message_object_trees[0]
        run, name = head.metadata.run_id, head.metadata.message_id
        contents = {part.object_id: self._object(run, part.object_id) for part in iterate_object_tree(tree)}
        request = ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=name)
        patiently(lambda: self._client.ConfirmMessageReceived(request))
        message = cast(Message, inflate_object_from_contents(name, contents))
        message.metadata.__dict__["_message_id"] = name
        return message

    def answer(self, message: Message, reply: Message, seconds: float = 0.0) -> None:
        """Send the reply to a message, whole."""
        run = message.metadata.run_id
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            request = PushMessagesRequest(
                node=self._node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
            wanted = patiently(lambda: self._client.PushMessages(request))
            for name, part in get_all_nested_objects(reply).items():
                if name in wanted.objects_to_push:
                    self._push(run, wanted.session_id, name, part.deflate())

    def alive(self) -> bool:
        """Tell the SuperLink; whether it knows this node."""
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=_ALIVE)
        return bool(self._client.SendNodeHeartbeat(request).success)

    def _object(self, run: int, name: str) -> bytes:
        until = time.monotonic() + _UPLOAD
        request = PullObjectRequest(node=self._node, run_id=run, object_id=name)
        while True:
            found = patiently(lambda: self._client.PullObject(request))
            if found.object_available:
                return found.object_content
            if not found.object_found or time.monotonic() > until:
                raise RefusedError(f"a part of a message is missing: {name[:12]}")
            time.sleep(0.2)

    def _push(self, run: int, session: str, name: str, content: bytes) -> None:
        request = PushObjectRequest(node=self._node, run_id=run, session_id=session, object_id=name, object_content=content)
        if not patiently(lambda: self._client.PushObject(request)).stored:
            raise RefusedError(f"the SuperLink did not keep a part of a report: {name[:12]}")


@contextlib.contextmanager
def connected(
    superlink: str,
    *,
    keys: Keys | None = None,
    certificates: bytes | None = None,
    insecure: bool = False,
    remember: Path | None = None,
    patience: float = _PATIENCE,
) -> Iterator[Fleet]:
    """A connection as an active node; RefusedError if the SuperLink will not have it.

    keys       the node's; without them it registers itself, which a SuperLink with authentication refuses
    remember   a file for the node's number
    """
    private, public = keys or generate_key_pairs()
    name = public_key_to_bytes(public)
    interceptors: list[Any] = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(private, public),
    ]
    with FleetHttpClient.from_server_address(superlink, insecure, certificates, interceptors=interceptors) as client:
        if keys is None:
            patiently(lambda: client.RegisterNode(RegisterNodeFleetRequest(public_key=name)), patience)
        elif remember is not None and remember.exists():
            with contextlib.suppress(RefusedError):
                before = DeactivateNodeRequest(node_id=int(remember.read_text(encoding="utf-8")))
                patiently(lambda: client.DeactivateNode(before), patience)
        request = ActivateNodeRequest(public_key=name, heartbeat_interval=_ALIVE)
        node = patiently(lambda: client.ActivateNode(request), patience).node_id
        if remember is not None and keys is not None:
            remember.write_text(str(node), encoding="utf-8")
        fleet, over = Fleet(client, node), threading.Event()
        heart = threading.Thread(target=_beat, args=(fleet, over), daemon=True, name="signs of life")
        heart.start()
        try:
            yield fleet
        finally:
            over.set()
            heart.join()
            with contextlib.suppress(httpx.HTTPError):
                client.DeactivateNode(DeactivateNodeRequest(node_id=node))


def _beat(fleet: Fleet, over: threading.Event) -> None:
    while not over.wait(0.8 * _ALIVE):
        with contextlib.suppress(httpx.HTTPError):
            if not fleet.alive():
                log.warning("gateway: the SuperLink has forgotten this node")


def patiently(call: Callable[[], T], patience: float = _PATIENCE) -> T:
    """Call, and call again while nobody answers; a SuperLink that answers with a refusal is believed."""
    until, pause = time.monotonic() + patience, 0.1
    while True:
        try:
            return call()
        except httpx.HTTPStatusError as e:
            if e.response.status_code not in (502, 503, 504):
                raise RefusedError(f"HTTP {e.response.status_code}: {_reason(e.response)}") from e
            failure: httpx.HTTPError = e
        except httpx.TransportError as e:
            if "CERTIFICATE_VERIFY_FAILED" in str(e):
                raise RefusedError(
                    f"its certificate is not by the authority of --root-certificates, or for its host: {e}"
                ) from e
            failure = e
        if time.monotonic() + pause > until:
            raise failure
        time.sleep(pause)
        pause = min(3.0, 2 * pause)


def _reason(response: Any) -> str:
    with contextlib.suppress(Exception):
        found = response.json()
        return str(found.get("message") or found.get("detail") or found)[:200]
    return str(response.text)[:200]
