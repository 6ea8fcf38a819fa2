"""Attacks are refused, with a reason and no change; and no bytes whatever crash a party or change it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbuff.secagg.client import check_offer
from fedbuff.secagg.messages import (
    Answer,
    Echo,
    List,
    Masked,
    MaskedElements,
    Offer,
    RefusedError,
    Release,
    Reply,
    Request,
    Seed,
    Share,
    Slot,
)
from fedbuff.secagg.policy import TaskPolicy
from fedbuff.secagg_demo.attacks import ATTACKS, BUFFER_SIZE, NOW, Outcome, enclave_world, helpers_world, tried, update
from fedbuff.trusted import answered

# what the issue asks for, and the words in which each is refused
REFUSALS = {
    ("replayed slot", "trusted aggregator"): "used before",
    ("forged slot", "trusted aggregator"): "not issued here",
    ("swapped ciphertext", "trusted aggregator"): "does not open",
    ("wrong policy hash", "trusted aggregator"): "does not open",
    ("wrong policy hash", "client"): "another key, policy or epoch",
    ("release of a subset", "trusted aggregator"): "exactly its accepted",
    ("second release", "trusted aggregator"): "released already",
    ("singleton list", "helper"): "1 masks",
    ("overlapping lists", "helper"): "was on another list",
    ("weight chosen by the server", "trusted aggregator"): "sealed for the step from version 3",
    ("weight chosen by the server", "helper"): "weight 128",
    ("U − 1 helpers", "server"): "3 helpers have answered",
    ("tampered share", "helper"): "does not open",
    ("stale evidence", "client"): "stale",
    ("debug evidence", "client"): "debug",
    ("enclave state rolled back", "trusted aggregator"): "rolled back",
    # and more
    ("swapped masked update", "trusted aggregator"): "does not open",
    ("release below K", "trusted aggregator"): "nothing is released below 4",
    ("an update more than K", "trusted aggregator"): "the buffer is full: the integers have room for 4",
    ("an update more than K", "helper"): "5 masks; the integers have room for a sum of 4",
    ("an update more than K", "server"): "the buffer of version 0 is full",
    ("a client twice in a buffer", "trusted aggregator"): "in this buffer already",
    ("simulated evidence, in production", "client"): "simulated",
    ("two lists at once", "helper"): "another list",
    ("start version chosen by the server", "helper"): "its client said 0",
    ("U − 1 echoes", "helper"): "4 are needed",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_it_is_refused_and_nothing_changes(attack):
    outcome = attack()
    assert REFUSALS[outcome.attack, outcome.party] in outcome.reason
    assert outcome.untouched


def test_every_attack_is_tried():
    assert len(ATTACKS) == len(REFUSALS)


def test_what_is_wrong_in_itself_is_refused_for_that_when_the_buffer_is_full():
    world = enclave_world()
    first = world.upload(0)
    assert world.enclave.submit([first], NOW) == [None]
    rest = [world.upload(client) for client in range(1, BUFFER_SIZE)]
    assert world.enclave.submit(rest, NOW) == [None] * len(rest)
    twice, late, bad = world.upload(0), world.upload(5), replace(world.upload(6), locked=bytes(48))
    reasons = world.enclave.submit([first, twice, bad, late], NOW)
    for reason, word in zip(reasons, ("used before", "in this buffer already", "does not open", "is full"), strict=True):
        assert word in reason

    committee = helpers_world()
    uploads = [committee.upload(client) for client in range(BUFFER_SIZE)]
    with pytest.raises(RefusedError, match="uploaded already"):
        committee.server.masked(uploads[0])


def test_a_batch_is_taken_up_to_k():
    """And what is refused then harms neither the sum nor the slot, which is good for the next buffer."""
    world = enclave_world()
    for client in range(BUFFER_SIZE + 1):
        world.upload(client)
    seeds = world.server.ready()
    reasons = world.enclave.submit(seeds, NOW)
    assert [reason is None for reason in reasons] == [True] * BUFFER_SIZE + [False]
    world.server.add(seeds, reasons)
    total = world.server.unmask(world.enclave.release(0, world.server.serials))
    assert np.array_equal(total, sum(world.policy.fixed_point.encode(update(i)).astype(int) for i in range(BUFFER_SIZE)))
    again, _ = world.clients[BUFFER_SIZE].upload(seeds[-1].slot, 0, 1, update(BUFFER_SIZE))
    assert world.enclave.submit([again], NOW) == [None]


def test_a_journal_with_more_than_k_is_not_released_but_can_be_given_up():
    """From before there was a limit."""
    world = enclave_world()
    world.fill()
    (slot,) = world.enclave.issue([BUFFER_SIZE], NOW)
    world.enclave._apply_accept({Slot.from_bytes(slot).serial: (BUFFER_SIZE, bytes(32), bytes(32))}, {})
    with pytest.raises(RefusedError, match="5 updates in the buffer: the integers have room for 4; abort it"):
        world.enclave.release(0, [serial for serial, _ in world.enclave.accepted()])
    world.enclave.abort(0)
    assert world.enclave.accepted() == []


def test_an_upload_between_the_list_and_the_answers_does_not_hold_the_step_up():
    world = helpers_world()
    with pytest.raises(RefusedError, match="0 updates in the buffer: helpers answer to no list of fewer than 4"):
        world.server.list()
    listed = world.fill()
    echoes = [helper.echo(listed) for helper in world.helpers]
    late = world.masked(BUFFER_SIZE)
    with pytest.raises(RefusedError, match="client 4: the buffer of version 0 is full with 4 updates; upload again"):
        world.server.masked(late)
    assert world.server.list() == listed
    for helper in world.helpers:
        world.server.answer(helper.answer(echoes))
    unit = world.policy.unit
    expected = sum(unit * world.policy.fixed_point.encode(update(i)).astype(int) for i in range(BUFFER_SIZE))
    assert np.array_equal(world.server.unmask(), expected)
    world.server.masked(late)  # it is one step staler by now
    assert world.server.count == 1


def test_an_attack_that_works_is_seen():
    world = enclave_world()
    seed = world.upload(0)
    assert not tried(
        "none at all", "trusted aggregator", world.enclave.state, lambda: world.enclave.submit([seed], NOW)
    ).refused
    assert not Outcome("changed", "helper", "refused, but changed", False).refused


def test_a_refused_batch_does_not_harm_those_beside_it():
    world = enclave_world()
    good, other = world.upload(0), world.upload(1)
    bad = replace(other, locked=bytes(48))
    assert [reason is None for reason in world.enclave.submit([good, bad, good], NOW)] == [True, False, False]
    assert [serial for serial, _ in world.enclave.accepted()] == [Slot.from_bytes(good.slot).serial]


def test_a_session_is_opened_by_its_client_only():
    world = enclave_world()
    seed = world.upload(0)
    assert "no session" in world.enclave.submit([replace(seed, opening=b"")], NOW)[0]
    stolen = world.upload(1)
    assert "does not open" in world.enclave.submit([replace(seed, opening=stolen.opening)], NOW)[0]
    assert world.enclave.submit([seed], NOW) == [None]


def test_a_release_of_another_enclave_is_refused():
    ours, other = enclave_world(), enclave_world()
    serials = ours.fill(), other.fill()
    before = ours.server.state()
    with pytest.raises(RefusedError, match="not signed"):
        ours.server.unmask(other.enclave.release(0, serials[1]))
    assert ours.server.state() == before
    release = ours.enclave.release(0, serials[0])
    for change in ({"words": release.words + 1}, {"version": 1}, {"accepted": release.accepted[1:]}):
        with pytest.raises(RefusedError, match="not signed"):
            ours.server.unmask(replace(release, **change))
    assert ours.server.state() == before


# ── any bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────

MESSAGES = [Answer, Echo, List, Masked, MaskedElements, Offer, Release, Reply, Request, Seed, Share, Slot, TaskPolicy]


@given(st.sampled_from(MESSAGES), st.binary(max_size=400), st.integers(0, 0x40))
def test_random_bytes_are_no_message(kind, data, first):
    for candidate in (data, bytes([first]) + data):
        try:
            made = kind.from_bytes(candidate)
        except RefusedError as e:
            assert str(e)
        else:
            assert made.to_bytes() == candidate  # what is accepted is exactly what would be sent


@st.composite
def damaged(draw, data: bytes) -> bytes:
    """Not `data`, but close to it."""
    at = draw(st.integers(0, len(data) - 1))
    how = draw(st.sampled_from(["flip", "cut", "drop", "insert", "double"]))
    if how == "flip":
        return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
    if how == "cut":
        return data[:at]
    if how == "drop":
        return data[:at] + data[at + 1 :] if len(data) > 1 else b""
    if how == "insert":
        return data[:at] + draw(st.binary(min_size=1, max_size=9)) + data[at:]
    return data + data


ENCLAVE, COMMITTEE = enclave_world(), helpers_world()
SEED = ENCLAVE.upload(0)
OFFER = Offer(ENCLAVE.policy.to_bytes(), ENCLAVE.enclave.evidence(NOW), SEED.slot, 0)
SHARE = COMMITTEE.clients[7].share(0)[2][0]
LIST = COMMITTEE.fill()
ECHOES = [helper.echo(LIST) for helper in COMMITTEE.helpers]
ANSWER = COMMITTEE.helpers[1].answer(ECHOES)
DONE = enclave_world()
RELEASE = DONE.enclave.release(0, DONE.fill())


def refuses(state, act) -> None:
    """It says no, by an exception or by reasons, and is what it was."""
    outcome = tried("any bytes", "anybody", state, act)
    assert outcome.refused, outcome


@settings(max_examples=300)
@given(damaged(SEED.to_bytes()))
def test_the_trusted_aggregator_refuses_a_damaged_seed(data):
    if data[-len(SEED.to_bytes()) :] != SEED.to_bytes() or len(data) != len(SEED.to_bytes()):
        refuses(ENCLAVE.enclave.state, lambda: ENCLAVE.enclave.submit([Seed.from_bytes(data)], NOW))


@settings(max_examples=150)
@given(damaged(SHARE.to_bytes()))
def test_a_helper_refuses_a_damaged_share(data):
    refuses(COMMITTEE.helpers[0].state, lambda: COMMITTEE.helpers[0].keep(Share.from_bytes(data), NOW))


@settings(max_examples=150)
@given(damaged(LIST.to_bytes()))
def test_a_helper_refuses_a_damaged_list(data):
    refuses(COMMITTEE.helpers[0].state, lambda: COMMITTEE.helpers[0].echo(List.from_bytes(data)))


@settings(max_examples=150)
@given(damaged(ECHOES[3].to_bytes()))
def test_a_helper_refuses_a_damaged_echo(data):
    state, helper = COMMITTEE.helpers[0].state, COMMITTEE.helpers[0]
    refuses(state, lambda: helper.answer([*ECHOES[:3], Echo.from_bytes(data)]))


@settings(max_examples=150)
@given(damaged(ANSWER.to_bytes()))
def test_the_server_refuses_a_damaged_answer(data):
    refuses(COMMITTEE.server.state, lambda: COMMITTEE.server.answer(Answer.from_bytes(data)))


@settings(max_examples=150)
@given(damaged(RELEASE.to_bytes()))
def test_the_server_refuses_a_damaged_release(data):
    refuses(DONE.server.state, lambda: DONE.server.unmask(Release.from_bytes(data)))


@settings(max_examples=150)
@given(damaged(OFFER.to_bytes()))
def test_a_client_refuses_a_damaged_offer(data):
    """All but the slot and the start version, which the trusted aggregator checks when they come back."""
    try:
        offer = Offer.from_bytes(data)
    except RefusedError:
        return
    if (offer.policy, offer.evidence) != (OFFER.policy, OFFER.evidence):
        with pytest.raises(RefusedError):
            check_offer(offer, ENCLAVE.reference, NOW)


@settings(max_examples=150)
@given(st.data())
def test_the_server_survives_damaged_uploads(data):
    world, committee = DONE, COMMITTEE
    masked = Masked(SEED.slot, RELEASE.words)
    elements = MaskedElements(SHARE.mask, 7, 0, ANSWER.words)
    for message, take in (
        (masked, lambda b: world.server.masked(Masked.from_bytes(b))),
        (SEED, lambda b: world.server.seed(Seed.from_bytes(b))),
        (elements, lambda b: committee.server.masked(MaskedElements.from_bytes(b))),
    ):
        state = committee.server.state if message is elements else world.server.state
        before = state()
        try:
            take(data.draw(damaged(message.to_bytes())))
        except RefusedError:
            assert state() == before
        else:  # it can't tell a damaged masked update from a whole one; it waits for a seed that never fits
            for slot in [*world.server._masked, *world.server._seeds]:
                world.server.forget(slot)


@settings(max_examples=300)
@given(st.data())
def test_the_trusted_aggregators_door_refuses_whatever_it_does_not_know(data):
    enclave = ENCLAVE.enclave
    whole = Request("submit", (), (SEED.to_bytes(),)).to_bytes()
    message = data.draw(st.binary(max_size=60) | damaged(whole))
    before = enclave.state()
    reply = answered(enclave, message)
    assert reply.refused or all(reply.parts)  # refused as a whole, or each of its seeds
    assert enclave.state() == before
    assert Reply.from_bytes(reply.to_bytes()) == reply


@settings(max_examples=200)
@given(
    st.sampled_from(["evidence", "version", "accepted", "submit", "release", "abort", "issue", "shutdown"]),
    st.lists(st.integers(0, 2**64 - 1), max_size=4),
    st.lists(st.binary(max_size=300), max_size=3),
)
def test_well_formed_nonsense_changes_nothing(word, numbers, parts):
    world = enclave_world() if word in ("abort", "issue") else ENCLAVE
    before = world.enclave.state()
    reply = answered(world.enclave, Request(word, tuple(numbers), tuple(parts)).to_bytes())
    if reply.refused or word not in ("abort", "issue"):
        assert world.enclave.state() == before


def test_another_slots_masked_update_is_not_added():
    """A masked update without its seed, or a seed without its masked update, is not in the sum."""
    world = enclave_world()
    a, b = world.clients[0], world.clients[1]
    slots = world.enclave.issue([0, 1], NOW)
    world.server.seed(a.upload(slots[0], 0, 0, update(0))[0])
    world.server.masked(b.upload(slots[1], 0, 0, update(1))[1])
    assert world.server.ready() == []
    with pytest.raises(RefusedError, match="uploaded already"):
        world.server.seed(a.upload(slots[0], 0, 0, update(0))[0])
    for slot in slots:
        world.server.forget(slot)
    assert world.server.state() == enclave_world().server.state()


def test_a_client_that_lies_about_its_hash_harms_nobody_else():
    world = enclave_world()
    slot, other = world.enclave.issue([0, 1], NOW)
    seed, _ = world.clients[0].upload(slot, 0, 0, update(0))
    _, masked = world.clients[1].upload(other, 0, 0, update(1))
    for first, second in ((world.server.seed, world.server.masked), (world.server.masked, world.server.seed)):
        messages = {world.server.seed: seed, world.server.masked: replace(masked, slot=slot)}
        first(messages[first])
        before = world.server.state()
        with pytest.raises(RefusedError, match="not the one that its seed is for"):
            second(messages[second])
        assert world.server.state() == before
        world.server.forget(slot)


def test_only_complete_buffers_have_a_sum():
    world = enclave_world()
    for client in range(BUFFER_SIZE - 1):
        world.enclave.submit([world.upload(client)], NOW)
    with pytest.raises(RefusedError, match="nothing is released below"):
        world.enclave.release(0, [serial for serial, _ in world.enclave.accepted()])


def test_a_slot_that_is_asked_for_twice_shows_nothing_of_its_seeds(monkeypatch):
    """AES-GCM's key is for all that a seed is bound to: two of one slot under one key would let the server forge a third."""
    world = enclave_world()
    (slot,) = world.enclave.issue([0], NOW)
    monkeypatch.setattr(world.clients[0], "_random_bytes", bytes)  # the same secret each time
    first, second = (world.clients[0].upload(slot, 0, version, update(0))[0].locked for version in (3, 2))
    assert first[:16] != second[:16]
