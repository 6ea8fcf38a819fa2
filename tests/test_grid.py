"""Flower's Grid as a transport: a reply that is still being sent is not waited for, and half a reply is no reply."""

from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from fedbuff.deploy import flower
from fedbuff.deploy.flower import GridTransport, Replies, reply


@pytest.fixture(autouse=True)
def a_process_of_flowers(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class SuperLink:
    """The part of Flower's Runtime API that fetches replies, with one reply, some parts of which are not there yet."""

    def __init__(self, report: bytes) -> None:
        order = Message(RecordDict({"fedbuff": ConfigRecord({"orders": b""})}), 1, MessageType.TRAIN)
        order.metadata.__dict__["_message_id"] = "order"
        self.reply = reply(order, report)
        self.reply.metadata.__dict__["_message_id"] = self.reply.object_id
        self.objects = {name: part.deflate() for name, part in get_all_nested_objects(self.reply).items()}
        self.there: set[str] = set()
        self.told, self.confirmed = False, 0

    def PullMessages(self, request):  # noqa: N802
        new, self.told = not self.told and "order" in request.message_ids, True
        found = [message_to_proto(self.reply)] if new else []
        return SimpleNamespace(messages_list=found, message_object_trees=[get_object_tree(self.reply)] if new else [])

    def PullObject(self, request):  # noqa: N802
        name = request.object_id
        content = self.objects[name] if name in self.there else b""
        return SimpleNamespace(object_found=name in self.objects, object_available=name in self.there, object_content=content)

    def ConfirmMessageReceived(self, request):  # noqa: N802
        self.confirmed += 1


def replies_of(superlink):
    return Replies(SimpleNamespace(_runtime_client=superlink, node=Node(node_id=1), run=SimpleNamespace(run_id=1)))


def test_a_whole_reply_is_there_at_once():
    superlink = SuperLink(b"a report")
    superlink.there = set(superlink.objects)
    assert replies_of(superlink).pull(["order"]) == [("order", b"a report")]
    assert superlink.confirmed == 1


def test_a_reply_that_is_still_being_sent_is_taken_when_it_is_whole():
    superlink = SuperLink(b"a report")
    replies = replies_of(superlink)
    for name in list(superlink.objects):
        assert replies.pull(["order"]) == []
        superlink.there.add(name)
    assert replies.pull(["order"]) == [("order", b"a report")]
    assert replies.pull(["order"]) == []


def test_half_a_reply_is_lost_after_a_while(monkeypatch):
    superlink = SuperLink(b"a report")
    replies = replies_of(superlink)
    assert replies.pull(["order"]) == []
    monkeypatch.setattr(flower, "_HALF", 0.0)
    assert replies.pull(["order"]) == [("order", None)]


def test_a_reply_whose_parts_were_deleted_is_lost():
    superlink = SuperLink(b"a report")
    replies = replies_of(superlink)
    assert replies.pull(["order"]) == []
    superlink.objects.clear()
    assert replies.pull(["order"]) == [("order", None)]


def test_a_reply_to_a_message_that_was_given_up_is_not_fetched():
    superlink = SuperLink(b"a report")
    replies = replies_of(superlink)
    assert replies.pull(["order"]) == []
    superlink.there = set(superlink.objects)
    assert replies.pull(["another"]) == []
    assert superlink.confirmed == 0


# ── nodes that come back ─────────────────────────────────────────────────────────────────────────────────────────────


class Grid:
    """A Grid with one node, nothing of which is ever answered."""

    def __init__(self):
        self.activated, self.pushed = "monday", 0

    def get_nodes(self):
        return [SimpleNamespace(node_id=7, name="north", last_activated_at=self.activated)]

    def push_messages(self, messages):
        self.pushed += len(messages)
        return [f"message {self.pushed}"]

    def pull_messages(self, names):
        return []


def test_what_a_node_had_before_it_was_started_again_is_lost():
    grid = Grid()
    transport = GridTransport(grid, ttl=60.0)
    assert transport.nodes() == {7: "north"}
    (before,) = transport.push([(7, b"orders")])
    assert transport.pull([before]) == []
    grid.activated = "tuesday"
    assert transport.nodes() == {7: "north"}
    (after,) = transport.push([(7, b"orders")])
    assert transport.pull([before, after]) == [(before, None)]
    assert transport.pull([after]) == []
