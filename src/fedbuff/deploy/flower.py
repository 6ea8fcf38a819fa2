"""FedBuff on Flower: a ServerApp and a ClientApp for your project, and the Grid as our transport.

    # server_app.py                                            # client_app.py
    from fedbuff.deploy.flower import server_app               from fedbuff.deploy.flower import client_app
    app = server_app("settings.toml")                          app = client_app("settings.toml")

The ServerApp never waits for anybody: it pushes orders, pulls what is there, and lets the core decide. The ClientApp hands its
message to a worker that stays: Flower starts a process for every message, and loading torch and data each time takes seconds.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.superlink.grid.http_grid import HttpGrid

from fedbuff.deploy.serve import serve
from fedbuff.deploy.settings import Deployment
from fedbuff.deploy.wire import MalformedError
from fedbuff.settings import Settings, from_tables, read

_RECORD, _ORDERS, _REPORT = "fedbuff", "orders", "report"
_HALF = 30.0  # seconds after which half a reply is no reply


# ── server ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def server_app(settings: Settings | str | Path) -> ServerApp:
    """A ServerApp that serves these settings, a file or what was made of one.

    The run folder is `folder` of the run's config, or FEDBUFF_FOLDER: started again on it, a run goes on.
    """
    app = ServerApp()
    chosen = settings if isinstance(settings, Settings) else beside_the_app(settings)

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from fedbuff.deploy.watch import watch

        folder = Path(str(context.run_config.get("folder") or os.environ.get("FEDBUFF_FOLDER") or ""))
        if not folder.is_absolute():
            raise ValueError(
                f"folder={str(folder)!r}: give the run folder as an absolute path, in the run's config or in FEDBUFF_FOLDER"
            )
        made = chosen if isinstance(chosen, Settings) else from_tables(read(chosen))
        deployment = made.deploy or Deployment()
        with watch(folder, deployment) as follow:
            serve(made, folder, GridTransport(grid, deployment.deadline), follow)

    return app


def beside_the_app(settings: str | Path) -> Path:
    """A settings file of the project: in the working directory, or beside the module that makes the app."""
    import sys

    path = Path(settings)
    if path.is_absolute() or path.exists():
        return path
    frame = sys._getframe(1)
    here = Path(__file__).parent
    while frame.f_back is not None and Path(frame.f_code.co_filename).parent == here:
        frame = frame.f_back
    return Path(frame.f_code.co_filename).parent / path


class GridTransport:
    """Flower's Grid as our transport: a message per gateway, that expires after `ttl` seconds."""

    def __init__(self, grid: Grid, ttl: float) -> None:
        self._grid, self._ttl = grid, ttl
        # Flower waits, for minutes, for the rest of a reply whose sender died half-way; we look again later
        self._replies = Replies(grid) if isinstance(grid, HttpGrid) else None
        self._since: dict[int, str] = {}  # when each node was last activated
        self._sent: dict[str, int] = {}  # the node of each message that is out
        self._lost: set[str] = set()

    def nodes(self) -> dict[int, str]:
        found = list(self._grid.get_nodes())
        for node in found:  # a message is delivered once: what a node had before it was started again is gone
            if self._since.setdefault(node.node_id, node.last_activated_at) != node.last_activated_at:
                self._since[node.node_id] = node.last_activated_at
                self._lost.update(message for message, to in self._sent.items() if to == node.node_id)
        return {node.node_id: node.name for node in found}

    def push(self, messages: Sequence[tuple[int, bytes]]) -> list[str | None]:
        made = [
            Message(RecordDict({_RECORD: ConfigRecord({_ORDERS: data})}), node, MessageType.TRAIN, ttl=self._ttl)
            for node, data in messages
        ]
        names = [name or None for name in self._grid.push_messages(made)]
        self._sent |= {name: node for name, (node, _) in zip(names, messages, strict=False) if name is not None}
        return names

    def pull(self, messages: Sequence[str]) -> list[tuple[str, bytes | None]]:
        if self._replies is not None:
            found = self._replies.pull(messages)
        else:
            found = [(m.metadata.reply_to_message_id, report_in(m)) for m in self._grid.pull_messages(messages)]
        answered = {message for message, _ in found}
        found += [(message, None) for message in messages if message in self._lost and message not in answered]
        for message, _ in found:
            self._sent.pop(message, None)
        self._lost &= self._sent.keys()
        return found


class Replies:
    """`Grid.pull_messages` that takes what is there and never waits."""

    def __init__(self, grid: HttpGrid) -> None:
        self._grid = grid
        self._arriving: dict[str, Arriving] = {}  # by the message that they answer

    def pull(self, messages: Sequence[str]) -> list[tuple[str, bytes | None]]:
        client = self._grid._runtime_client
        waiting = [message for message in messages if message not in self._arriving]
        if waiting:
            found = client.PullMessages(PullAppMessagesRequest(message_ids=waiting))
            for head, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                parts = [part.object_id for part in iterate_object_tree(tree)]
                name = head.metadata.message_id
                self._arriving[head.metadata.reply_to_message_id] = Arriving(name, parts, {}, time.monotonic())
        done: list[tuple[str, bytes | None]] = []
        for answered, reply in list(self._arriving.items()):
            if answered not in messages:  # given up meanwhile
                del self._arriving[answered]
            elif (outcome := self._look(reply)) is not None:
                done.append((answered, report_in(outcome) if isinstance(outcome, Message) else None))
                del self._arriving[answered]
        return done

    def _look(self, reply: "Arriving") -> "Message | Literal['lost'] | None":
        """The whole reply, or that it is lost, or None if the rest is still to come."""
        client, node, run = self._grid._runtime_client, self._grid.node, self._grid.run.run_id
        for part in reply.parts:
            if part in reply.contents:
                continue
            found = client.PullObject(PullObjectRequest(node=node, run_id=run, object_id=part))
            if not found.object_found or time.monotonic() - reply.since > _HALF:
                return "lost"
            if not found.object_available:
                return None
            reply.contents[part] = found.object_content
        client.ConfirmMessageReceived(ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=reply.name))
        return cast(Message, inflate_object_from_contents(reply.name, reply.contents))


@dataclass
class Arriving:
    """A reply whose parts are being fetched."""

    name: str
    parts: list[str]
    contents: dict[str, bytes]
    since: float


def report_in(message: Message) -> bytes | None:
    """A gateway's report; None if there is none, empty if it is something else."""
    if message.has_error():
        return None
    try:
        found = message.content[_RECORD][_REPORT]
    except (KeyError, TypeError):
        return b""
    return found if isinstance(found, bytes) else b""


# ── client ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def orders_in(message: Message) -> bytes:
    try:
        found = message.content[_RECORD][_ORDERS]
    except (KeyError, TypeError):
        found = None
    if not isinstance(found, bytes):
        raise MalformedError("this message is no order of a fedbuff server")
    return found


def reply(message: Message, report: bytes) -> Message:
    return Message(RecordDict({_RECORD: ConfigRecord({_REPORT: report})}), reply_to=message)


def client_app(task: Any, client: Any = None, seed: int = 0) -> ClientApp:
    """A ClientApp whose clients are those of `clients` in the node's config ("0-49"), or of its `partition-id`.

    task     a settings file; or a `Task`, or a function that makes one, with
    client   how its clients train, and
    seed     the server's

    The work is done by a worker that stays (see worker.py); its outbox is in `folder` of the node's config.
    """
    app = ClientApp()
    chosen = beside_the_app(task) if isinstance(task, str | Path) else task

    @app.train()
    def train(message: Message, context: Context) -> Message:
        from fedbuff.deploy.worker import ask

        return reply(message, ask(orders_in(message), chosen, client, seed, dict(context.node_config)))

    return app
