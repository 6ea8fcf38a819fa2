"""The dispatch, on a network that does its worst: no update is lost, and none is used twice."""

import contextlib
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fedbuff.core.events import TripLeft, UpdateArrived, UpdateRejected
from fedbuff.core.server import Server
from fedbuff.core.starting import refill
from fedbuff.core.trips import OUTCOMES
from fedbuff.deploy.reasons import NOT_ITS_CLIENTS
from fedbuff.deploy.wire import Orders, Report, Result
from fedbuff.settings import from_tables
from fedbuff.toml import SettingsError
from unreliable import JOB, Killed, World, update_of

NORTH_AND_SOUTH = {"north": "0-5", "south": "6-11"}
NODES = {"north": 1, "south": 2}
WHERE = ("before the commit", "in the commit", "after the commit", "while sending", "after sending")
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # thousands of commits, none of which has to survive us
WHICH = st.integers(0, 9)


class Unreliable(RuleBasedStateMachine):
    """Anything may happen, in any order."""

    @initialize(buffer_size=st.integers(1, 3), messages=st.integers(1, 2), linger=st.sampled_from([0.0, 2.0]))
    def begins(self, buffer_size, messages, linger):
        self.folder = Path(tempfile.mkdtemp(prefix="unreliable-", dir=MEMORY))
        self.world = World(self.folder, NORTH_AND_SOUTH, buffer_size=buffer_size, messages_per_gateway=messages, linger=linger)

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.1, 1.0, 11.0]))
    def the_server_looks(self, seconds):
        self.world.now += seconds
        self.world.turn()

    @rule(which=st.lists(WHICH, max_size=4), unsendable=st.integers(0, 2))
    def the_server_finds_some_replies_in_any_order(self, which, unsendable):
        outstanding = self.world.dispatch.outstanding
        self.world.turn({outstanding[n % len(outstanding)]: n for n in which if outstanding}, unsendable=unsendable)

    @rule(where=st.sampled_from(WHERE), cut=st.floats(0, 1))
    def the_server_is_killed_and_comes_back(self, where, cut):
        with contextlib.suppress(Killed):
            self.world.turn(killed=where, cut=cut)
        self.world.wake_up()

    @rule()
    def a_checkpoint_is_made(self):
        self.world.checkpoint()

    @precondition(lambda self: self.world.mail)
    @rule(which=WHICH)
    def a_message_arrives_and_is_answered(self, which):
        self.world.deliver(self._mail(which))

    @precondition(lambda self: self.world.mail)
    @rule(which=WHICH)
    def a_message_is_lost(self, which):
        del self.world.mail[self._mail(which)]

    @precondition(lambda self: self.world.replies)
    @rule(which=WHICH)
    def a_reply_is_lost(self, which):
        self.world.replies.pop(sorted(self.world.replies)[which % len(self.world.replies)])

    @precondition(lambda self: self.world.dispatch.outstanding)
    @rule(which=WHICH)
    def a_message_expires(self, which):
        outstanding = self.world.dispatch.outstanding
        self.world.replies[outstanding[which % len(outstanding)]] = None

    @precondition(lambda self: self.world.past)
    @rule(which=WHICH, name=st.sampled_from(sorted(NORTH_AND_SOUTH)))
    def an_old_message_is_worked_on_again(self, which, name):
        """By the gateway it was for, or by the other one."""
        message, data = self.world.past[-1 - which % len(self.world.past)]
        self.world.dispatch.reported(message, self.world.work(name, data), self.world.now)

    @rule(name=st.sampled_from(sorted(NORTH_AND_SOUTH)), mail_is_lost=st.booleans())
    def a_gateway_vanishes(self, name, mail_is_lost):
        self.world.nodes.pop(name, None)
        if mail_is_lost:
            self.world.mail = {m: mail for m, mail in self.world.mail.items() if mail[0] != name}

    @rule(name=st.sampled_from(sorted(NORTH_AND_SOUTH)), as_another_node=st.booleans())
    def a_gateway_is_started_again(self, name, as_another_node):
        """Whatever it had not written down is gone."""
        node = NODES[name] + 10 * as_another_node
        if self.world.nodes.get(name) != node:
            self.world.nodes[name] = node

    @rule(turns=st.integers(1, 4))
    def all_is_well_for_a_while(self, turns):
        for _ in range(turns):
            for message in list(self.world.mail):
                self.world.deliver(message)
            self.world.now += 0.1
            self.world.turn()

    @invariant()
    def promises_are_kept(self):
        self.world.check()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        waiting, version = set(world.dispatch.books.server.in_flight), world.dispatch.books.server.version
        world.settle()
        world.check()
        assert not waiting & world.dispatch.books.server.in_flight.keys(), "the network is well, and trips have not ended"
        assert world.dispatch.books.server.version > version
        world.check_the_journal()
        world.close()
        for name, gateway in world.gateways.items():
            assert not gateway._outbox.holding(JOB), f"the run is over, and {name} still holds results"
            gateway._outbox.close()
        world.check_the_journal()
        world.die()
        shutil.rmtree(self.folder)

    def _mail(self, which):
        return sorted(self.world.mail)[which % len(self.world.mail)]


TestUnreliable = Unreliable.TestCase
TestUnreliable.settings = hypothesis_settings(max_examples=25, stateful_step_count=25, deadline=None)


# ── one thing at a time ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def worlds(tmp_path):
    """Makes worlds, and cleans up after them."""
    made = []

    def make(gateways=NORTH_AND_SOUTH, **how):
        made.append(World(tmp_path / f"world {len(made)}", gateways, **how))
        return made[-1]

    yield make
    for world in made:
        world.die()
        for gateway in world.gateways.values():
            gateway._outbox.close()


def test_a_trip_that_waited_starts_from_the_newest_version():
    server = Server(start=refill(3), buffer_size=1, weights=np.zeros(2, np.float32), clients=5)
    first, waits, goes = (c.trip for c in server.begin())
    server.handle(UpdateArrived(first, np.ones(2)))
    assert server.handle(TripLeft(waits)) == []
    assert server.started(waits)[1] == 1
    assert server.started(goes)[1] == 0
    (stepped, *_) = server.handle(UpdateArrived(waits, np.ones(2)))
    assert stepped.staleness == (0,)
    assert 0 in server.versions  # one trip is still on it
    assert isinstance(server.handle(TripLeft(99))[0], UpdateRejected)


def test_trips_of_a_message_start_from_one_version_and_stay_there_when_they_are_sent_again(worlds):
    world = worlds(start=refill(8), trips_per_message=8)
    world.settle(3)
    for _ in range(6):
        world.turn()
        for message in list(world.mail):
            assert len({order.version for order in Orders.from_bytes(world.mail[message][2]).trips}) <= 1
            world.deliver(message)
    world.turn()
    sent = {order.trip: order.version for order in world.ordered.values() if world.dispatch.books.server.started(order.trip)}
    world.mail.clear()  # all of it is lost
    world.die()
    world.wake_up()
    world.ordered.clear()
    for _ in range(4):
        world.now += 0.1
        world.turn()
        for message in list(world.mail):
            world.deliver(message)
    again = {trip: order.version for trip, order in world.ordered.items() if trip in sent}
    assert again
    assert again == {trip: sent[trip] for trip in again}


def test_on_a_good_network_every_trip_arrives_once(worlds):
    world = worlds()
    world.settle()
    books = world.dispatch.books
    assert books.server.version > 20
    assert not books.counts.refused
    assert not books.counts.strikes
    world.check_the_journal()


def test_when_the_run_is_over_no_gateway_holds_anything(worlds):
    """Also of a trip in flight whose result was written down, and never arrived."""
    world = worlds()
    world.settle(2)
    for message in list(world.mail):
        world.deliver(message)
    world.replies.clear()
    world.close()
    assert [world.gateways[name]._outbox.holding(JOB) for name in NORTH_AND_SOUTH] == [[], []]


def test_no_trip_starts_for_clients_of_a_gateway_that_is_gone(worlds):
    world = worlds()
    world.settle(3)
    del world.nodes["north"]
    world.turn()
    started = len(world.dispatch.books.trips)
    for _ in range(10):
        for message in list(world.mail):
            world.deliver(message)
        world.now += 0.1
        world.turn()
    clients = world.dispatch.books.trips.client[started : len(world.dispatch.books.trips)]
    assert clients
    assert min(clients) >= 6


def test_an_acknowledgement_that_was_lost_is_given_again(worlds):
    """Also when there is nothing else to say."""
    world = worlds()
    world.settle(3)
    world.closing = True
    world.dispatch.close()
    for _ in range(4):
        for message in list(world.mail):
            if Orders.from_bytes(world.mail[message][2]).forget:
                del world.mail[message]
                world.replies[message] = None
            else:
                world.deliver(message)
        world.turn()
    assert any(gateway._outbox.holding(JOB) for gateway in world.gateways.values())
    world.close()
    assert [world.gateways[name]._outbox.holding(JOB) for name in NORTH_AND_SOUTH] == [[], []]


def test_a_message_that_was_overtaken_is_not_waited_for(worlds):
    """A gateway answers in order: what it has passed over, it never got."""
    world = worlds(start=refill(8))
    world.settle(2)
    first, second = [m for m, (name, _, _) in world.mail.items() if name == "north"]
    trips = {order.trip for order in Orders.from_bytes(world.mail.pop(first)[2]).trips}
    assert trips
    world.deliver(second)
    for _ in range(4):
        world.turn()
        for message in list(world.mail):
            world.deliver(message)
    assert trips <= world.done


def test_a_gateway_that_is_back_under_another_node_is_sent_its_trips_at_once(worlds):
    """What was on its way to the old node does not keep the new one waiting."""
    world = worlds()
    world.settle(3)
    world.mail.clear()
    world.nodes["north"] = 17
    trips = {t for t, (client, _) in world.dispatch.books.server.in_flight.items() if client <= 5}
    assert trips
    for _ in range(6):
        world.turn()
        for message in [m for m, (_, node, _) in world.mail.items() if node == 17]:
            world.deliver(message)
    assert trips <= world.done


def test_a_gateway_that_says_itself_whom_it_stands_for_may_return_as_another_node(worlds):
    """The network may list the node of a gateway that was killed for a while."""
    world = worlds()
    world.deployment = type(world.deployment)(**{**vars(world.deployment), "gateways": {}})
    world.die()
    world.wake_up()
    world.nodes = {"north": 1, "south": 2}

    def names():  # as Flower has it without registration: a node, and no name
        return dict.fromkeys(world.nodes.values(), "")

    def turn():
        world.dispatch.online(names(), world.now)
        for message in [m for m in world.dispatch.outstanding if m in world.replies]:
            world.dispatch.reported(message, world.replies.pop(message), world.now)
        world.dispatch.tick(world.now)
        world.commit()
        for node, orders, name in world.dispatch.messages():
            message = f"message {next(world.names)}"
            world.dispatch.sent(name, message)
            gateway = {2: "south"}.get(node, "north")
            if node in answering:
                world.replies[message] = world.work(gateway, orders.to_bytes())
        world.now += 0.1

    answering = {1, 2}
    for _ in range(5):
        turn()
    answering = {2, 3}
    world.nodes["new north"] = 3
    for _ in range(5):
        turn()
    assert not world.dispatch.books.counts.strikes, "an honest gateway was blamed"
    del world.nodes["north"]
    for _ in range(40):
        turn()
    started = world.dispatch.books.trips.client[-40:]
    assert world.dispatch.books.present.up(0)
    assert any(client <= 5 for client in started)


def test_a_failed_trip_is_counted_once(worlds):
    world = worlds()
    world.settle(2)
    message, (name, _, data) = next((m, mail) for m, mail in world.mail.items() if Orders.from_bytes(mail[2]).trips)
    trips = Orders.from_bytes(data).trips
    results = tuple(Result(order.trip, order.client, problem="ValueError: no data") for order in trips)
    before = world.dispatch.books.counts.refused.total()
    world.dispatch.reported(message, Report(JOB, world.gateways[name].mine, results).to_bytes(), world.now)
    assert world.dispatch.books.counts.refused.total() - before == len(results)


def test_a_cohort_of_poisson_size_is_not_for_a_network():
    """Who is not there can't be in it, so it would be no Poisson sample; and when nobody is, it steps without end."""
    tables = {
        "task": {"digits": {"clients": 20}},
        "server": {"start": {"cohort": {"size": 5, "poisson": True}}, "buffer_size": 5},
        "client": {"lr": 0.1},
        "until": {"trips": 100},
        "deploy": {"deadline": 30.0},
    }
    with pytest.raises(SettingsError, match="poisson"):
        from_tables(tables)


@pytest.mark.parametrize(
    ("deploy", "says"),
    [
        ({"gateways": "x"}, "deploy.gateways='x': expected clients by the name of their gateway"),
        ({"gateways": ["0-29"]}, "expected clients by the name of their gateway"),
        ({"gateways": {"a": 5}}, "gateways.a = 5: expected numbers and ranges"),
        ({"gateways": {"a": "1-"}}, "gateways.a = '1-': expected numbers and ranges"),
        ({"gateways": {"a": "0-99999999999"}}, "gateways.a = '0-99999999999': expected numbers and ranges"),
        ({"gateways": {"a": "0-9,3-4", "b": "8"}}, "gateways.b = '8': client 8 is behind a already"),
        ({"metrics": "127.0.0.1:99999"}, "expected HOST:PORT"),
        ({"metrics": "nonsense"}, "expected HOST:PORT"),
        ({"max_norm": 1.0}, "deploy.max_norm=1: with secure aggregation nobody sees how long an update is"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_deployment_is_one_line(deploy, says):
    tables = {
        "task": {"digits": {"clients": 20}},
        "server": {"start": {"refill": {"concurrency": 5}}, "buffer_size": 5},
        "client": {"lr": 0.1},
        "until": {"trips": 100},
        "secure_aggregation": {"mode": "enclave", "clip": 1.0},
        "deploy": deploy,
    }
    with pytest.raises(SettingsError) as error:
        from_tables(tables)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("reason", ["too late", "over"])
def test_a_run_that_is_over_takes_no_more_server_steps(worlds, reason):
    """Nor does a trip start or end, whoever times out, comes or goes while it drains."""

    def stands():
        books = world.dispatch.books
        return books.server.version, books.server.weights.tobytes(), len(books.trips), books.trips.ended

    world = worlds()
    world.settle(3)
    before = stands()
    world.closing = True
    world.dispatch.close()
    world.now += 11.0 if reason == "too late" else 0.1
    world.dispatch.online({1: "north"}, world.now)
    world.settle(5)
    assert stands() == before


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("deadline", "late"),
        ("norm too large", "failed"),
        ("client failed", "dropped"),
        ("shut out", "dropped"),
        ("staleness", "late"),
    ],
)
def test_a_trip_has_the_outcome_that_its_reason_means(worlds, reason, outcome):
    world = worlds()
    world.settle(2)
    books = world.dispatch.books
    trip = min(books.server.in_flight)
    if reason == "staleness":
        books.server.max_staleness = -1
        books.apply(
            {"kind": "update", "trip": trip, "examples": 1, "time": world.now}, np.zeros_like(books.server.weights).tobytes()
        )
    else:
        books.apply({"kind": "failed", "trip": trip, "reason": reason, "time": world.now})
    assert OUTCOMES[books.trips.outcome[trip]] == outcome


# ── what no honest client sends ──────────────────────────────────────────────────────────────────────────────────────

HONEST = {"north": "0-99", "south": "100-199"}
HOSTILE = {f"hostile {n}": f"{200 + 3 * n}-{202 + 3 * n}" for n in range(100)}


def hostile_report(rng, world, name):
    """A report that no honest gateway sends, and how many times it should be counted."""
    books = world.dispatch.books
    low, high = world.deployment.clients_of(name)[0]
    mine, good = ((low, high),), update_of(0, 0)
    in_flight = books.server.in_flight
    own = [(t, c) for t, (c, _) in in_flight.items() if low <= c <= high] or [(len(books.trips) + 5, low)]
    others = [(t, c) for t, (c, _) in in_flight.items() if c < 200]
    done = [t for t in sorted(world.done) if books.trips.client[t] < 200]
    bad = [np.nan, np.inf, -np.inf]

    def result(trip, client, update=good, examples=1):
        return Result(trip, client, update.tobytes(), examples)

    def spoilt():
        trip, client = rng.choice(own)
        kind = rng.randrange(5)
        if kind == 0:
            return result(trip, client, np.where(np.arange(3) == rng.randrange(3), np.float32(rng.choice(bad)), good))
        if kind == 1:
            return result(trip, client, np.float32(10.0) ** rng.randrange(3, 30) * good)
        if kind == 2:
            return result(trip, client, np.zeros(rng.choice([0, 1, 2, 4, 50]), np.float32))
        if kind == 3:
            return result(trip, client, good, 0)
        return result(len(books.trips) + rng.randrange(1000), rng.randint(low, high))

    def of_others():
        trip, client = rng.choice(others)
        return result(trip, rng.choice([client, low, 10**6]))

    def again():
        trip = rng.choice(done)
        client = books.trips.client[trip]
        return result(trip, rng.choice([client, low]), update_of(client, trip))

    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.randrange(200)), 1
    if kind == 1:
        whole = bytearray(Report(JOB, mine, (spoilt(),)).to_bytes())
        whole[rng.randrange(12)] ^= 255
        return bytes(whole), 1
    if kind == 2:
        return Report("another job", mine, (spoilt(),)).to_bytes(), 1
    if kind == 3:
        return Report(JOB, rng.choice([((0, 99),), (), ((low, 10**9),), ((0, 10**6),)]), (spoilt(),)).to_bytes(), 1
    if kind == 4:
        return Report(JOB, mine, (), problem="x" * 10**6).to_bytes(), 1
    makers = [spoilt, *([of_others] if others else []), *([again] if done else [])]
    results = tuple(rng.choice(makers)() for _ in range(rng.randrange(1, 12)))
    if kind == 5:
        results = (spoilt(),)
    if kind == 6:
        results = results[:1] * 30
    return Report(JOB, mine, results).to_bytes(), len(results)


def test_a_thousand_hostile_results_change_nothing_and_each_is_counted(worlds):
    """Then whoever sent them is shut out, and the honest train on to the end."""
    rng = random.Random(0)
    how = {"max_norm": 100.0, "results_per_minute": 20, "strikes": 5, "deadline": 60.0}
    world = worlds({**HONEST, **HOSTILE}, clients=500, start=refill(20), **how)
    books, world.honest = world.dispatch.books, set(HONEST)
    sent = 0
    while sent < 1000:
        world.now += 4.0
        world.turn()
        for message, (name, _, _) in list(world.mail.items()):
            if name in HONEST:
                world.deliver(message)
            elif message in world.dispatch.outstanding and rng.random() < 0.1:
                del world.mail[message]
                before, counted, out = state_of(books), books.counts.refused.total(), books.shut_out(f"gateway {name}")
                report, count = hostile_report(rng, world, name)
                world.dispatch.reported(message, report, world.now)
                after = state_of(books)
                assert before[:3] == after[:3], "a hostile report changed the model, the version or the buffer"
                assert before[3].items() <= after[3].items(), "a hostile report ended an honest trip"
                count = 1 if out else count  # of whoever is shut out not even a last word is read
                assert books.counts.refused.total() - counted == count, f"{count} sent, and not so many counted"
                sent += count
    assert books.server.version > 10
    for _ in range(100):
        world.now += 4.0
        world.turn()
        for message, (name, _, _) in list(world.mail.items()):
            if name in HONEST:
                world.deliver(message)
            else:
                del world.mail[message]
                world.replies[message] = b"rubbish"
    assert {who for who in books.counts.strikes if books.shut_out(who) and who.startswith("gateway")}
    assert not any(books.shut_out(f"gateway {name}") for name in HONEST)
    assert all(int(who.split()[1]) >= 200 for who in books.counts.strikes if who.startswith("client"))
    version = books.server.version
    for _ in range(20):
        world.now += 4.0
        world.turn()
        for message in list(world.mail):
            world.deliver(message)
    assert books.server.version > version + 20
    used = [books.trips.client[t] for t in range(len(books.trips)) if books.trips.weight[t] > 0]
    assert max(used) < 200


def state_of(books):
    server = books.server
    honest = {t: started for t, started in server.in_flight.items() if started[0] < 200}
    return server.weights.tobytes(), server.version, server.buffered, honest


@pytest.mark.parametrize(
    ("reason", "payload", "examples"),
    [
        ("not finite", np.array([1, np.nan, 0], np.float32), 1),
        ("not finite", np.array([1, 0, -np.inf], np.float32), 1),
        ("norm too large", np.array([60, 60, 60], np.float32), 1),
        ("wrong size", np.zeros(4, np.float32), 1),
        ("wrong size", np.zeros(0, np.float32), 1),
        ("bad number of examples", np.zeros(3, np.float32), 0),
    ],
)
def test_a_bad_update_ends_its_trip_with_a_reason_and_changes_nothing_else(worlds, reason, payload, examples):
    world = worlds(max_norm=100.0)
    world.settle(2)
    message, (name, _, data) = next((m, mail) for m, mail in world.mail.items() if Orders.from_bytes(mail[2]).trips)
    order, *others = Orders.from_bytes(data).trips
    before, in_flight = state_of(world.dispatch.books), set(world.dispatch.books.server.in_flight)
    bad = Result(order.trip, order.client, payload.tobytes(), examples)
    world.dispatch.reported(message, Report(JOB, world.gateways[name].mine, (bad,)).to_bytes(), world.now)
    books = world.dispatch.books
    assert state_of(books)[:3] == before[:3]
    assert books.counts.refused == {reason: 1}
    assert books.counts.strikes == {f"client {order.client}": 1}
    assert in_flight - books.server.in_flight.keys() == {order.trip}
    assert all(other.trip in books.server.in_flight for other in others)


def test_a_client_that_reports_too_often_is_not_listened_to(worlds):
    world = worlds(results_per_minute=3, strikes=100)
    world.honest.clear()
    world.settle(2)
    message, (name, _, _) = next(iter(world.mail.items()))
    client = world.gateways[name].mine[0][0]
    flood = (Result(10**6, client, update_of(0, 0).tobytes()),) * 10
    counts = world.dispatch.books.counts
    before = counts.refused["too often"]
    world.dispatch.reported(message, Report(JOB, world.gateways[name].mine, flood).to_bytes(), world.now)
    assert counts.refused["too often"] - before >= 7
    world.now += 61.0
    world.turn()
    message = next(m for m, mail in world.mail.items() if mail[0] == name)
    before = counts.refused["too often"]
    world.dispatch.reported(message, Report(JOB, world.gateways[name].mine, flood[:3]).to_bytes(), world.now)
    assert counts.refused["too often"] == before


def test_a_gateway_that_is_shut_out_stays_out(worlds):
    """What it was asked before may still be answered: its clients are not there any more all the same."""
    world = worlds(strikes=1, messages_per_gateway=2)
    world.settle(2)
    north = [m for m, (name, _, _) in world.mail.items() if name == "north"]
    assert len(north) == 2
    reports = [world.work("north", world.mail.pop(m)[2]) for m in north]
    world.dispatch.reported(north[0], b"rubbish", world.now)
    assert world.dispatch.books.shut_out("gateway north")
    version, buffered = world.dispatch.books.server.version, world.dispatch.books.server.buffered
    world.dispatch.reported(north[1], reports[1], world.now)
    assert not any(world.dispatch.books.present(client, world.now) for client in range(6))
    assert (world.dispatch.books.server.version, world.dispatch.books.server.buffered) == (version, buffered)
    del world.gateways["north"], world.nodes["north"]
    world.now += 11.0
    world.settle(5)
    assert all(client >= 6 for client, _ in world.dispatch.books.server.in_flight.values())


def test_a_gateway_that_is_shut_out_does_not_keep_the_run_from_ending(worlds):
    world = worlds(strikes=1)
    world.settle(2)
    for message, (name, _, _) in list(world.mail.items()):
        if name == "north":
            del world.mail[message]
            world.dispatch.reported(message, Report(JOB, ((0, 5),), (Result(99, 0),)).to_bytes(), world.now)
            world.dispatch.reported(message, b"rubbish", world.now)
    for message in [m for m in world.dispatch.outstanding if m not in world.mail]:
        world.dispatch.lost(message)
    world.dispatch.gateways["north"].forget.add(0)
    world.dispatch.books.counts.strikes["gateway north"] = 1
    world.close()


def test_one_bad_client_is_shut_out_and_its_gateway_and_neighbours_are_not(worlds):
    world = worlds(strikes=2, start=refill(6), trips_per_message=9)
    bad = 3
    for _ in range(40):
        world.now += 0.1
        world.turn()
        for message, (name, _, data) in list(world.mail.items()):
            del world.mail[message]
            report = Report.from_bytes(world.work(name, data))
            spoilt = tuple(
                Result(r.trip, r.client, np.full(3, np.nan, np.float32).tobytes()) if r.client == bad else r
                for r in report.results
            )
            world.replies[message] = Report(JOB, report.clients, spoilt, report.holding).to_bytes()
    books = world.dispatch.books
    assert books.counts.strikes == {f"client {bad}": 2}
    assert books.server.version > 15
    assert np.isfinite(books.server.weights).all()
    assert [books.trips.client[t] for t in range(len(books.trips))].count(bad) == 2


def test_a_claim_of_everybody_many_times_is_refused(worlds):
    world = worlds({}, clients=1_000_000)
    world.nodes = {"": 1}
    world.dispatch.online({1: ""}, 0.0)
    ((_, _, name),) = world.dispatch.messages()
    world.dispatch.reported(name, Report(JOB, ((0, 999_999),) * 20).to_bytes(), world.now)
    assert world.dispatch.books.counts.refused[NOT_ITS_CLIENTS] == 1
    assert not world.dispatch.books.trips


def test_reports_that_nobody_asked_for_are_not_even_read(worlds):
    world = worlds()
    world.settle(2)
    before = state_of(world.dispatch.books)
    world.dispatch.reported("a message of ours? no", Report(JOB, ((0, 5),), (Result(0, 0),)).to_bytes(), world.now)
    assert state_of(world.dispatch.books) == before
    assert not world.dispatch.records()
