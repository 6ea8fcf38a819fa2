"""Secure aggregation, part by part: known vectors, arithmetic beside Python's own integers, what each party promises."""

import itertools
import json
import math
import os
import tracemalloc
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbuff.core.staleness import cutoff, polynomial
from fedbuff.secagg import field, sealing
from fedbuff.secagg.attestation import simulated_attester
from fedbuff.secagg.client import Aggregator, EnclaveClient
from fedbuff.secagg.coding import Code
from fedbuff.secagg.committee import Directory, certificate
from fedbuff.secagg.enclave import Enclave, measurement
from fedbuff.secagg.field import P
from fedbuff.secagg.fixed_point import FIELD, RING, FixedPoint, finest_scale, norm
from fedbuff.secagg.messages import RefusedError
from fedbuff.secagg.pad import mask, pad, signed
from fedbuff.secagg.policy import TaskPolicy, enclave_policy, helpers_policy
from fedbuff.secagg.server import EnclaveServer
from fedbuff.secagg_demo.attacks import BUFFER_SIZE, NOW, enclave_world, helpers_world, update

VECTORS = json.loads((Path(__file__).parent / "secagg_vectors.json").read_text())
elements = st.lists(
    st.sampled_from([0, 1, 2, P // 2, P // 2 + 1, P - 2, P - 1]) | st.integers(0, P - 1), min_size=1, max_size=20
)


# ── known vectors ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_pad_of_a_known_seed():
    found = pad(bytes.fromhex(VECTORS["prg"]["seed_hex"]), 8)
    assert found.tolist() == VECTORS["prg"]["aes256_ctr_zero_iv_first8_u32le"]


def test_a_known_derived_key():
    known = VECTORS["hkdf_sha256_example"]
    assert sealing.derive(bytes.fromhex(known["ikm_hex"]), known["info"].encode()).hex() == known["out32_hex"]


def test_known_shares():
    known = VECTORS["lightsecagg"]
    code = Code(known["N"], known["U"], known["T"])
    shares = code.encode(np.array(known["mask_z"], np.uint64), np.array(known["random_rows"], np.uint64))
    assert shares.tolist() == known["coded_shares"]
    assert code.decode({j: shares[j] for j in known["survivors"]}, 6).tolist() == known["decoded"]


def test_known_integers():
    known = VECTORS["fixed_point"]
    number = FixedPoint(clip=1.0, scale=known["example_scale"])
    assert number.encode(np.array(known["x"], np.float32)).tolist() == known["q_trunc"]


# ── fixed point ──────────────────────────────────────────────────────────────────────────────────────────────────────

floats = st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, 1.0, -1.0, 2.0**-30, 0.1])


@given(st.lists(floats, min_size=1, max_size=40), st.sampled_from([1.0, 0.5, 0.1, 1e-4, 3.0]), st.floats(0.001, 1.0))
def test_quantising_never_lengthens_an_update(values, clip, weight):
    number = FixedPoint(clip, 2.0**18)
    vector = np.array(values, np.float32)
    integers = [int(q) for q in number.encode(vector, weight)]
    exact = sum(q * q for q in integers)  # in Python's integers
    assert exact <= (weight * clip * number.scale) ** 2 * (1 + 1e-15)
    length = min(1.0, clip / max(norm(vector), 1e-300))
    for q, x in zip(integers, vector.tolist(), strict=True):  # truncated toward zero, by less than one and float32's grain
        assert abs(q) <= abs(x) * length * weight * number.scale * (1 + 1e-15)
        assert abs(q - x * length * weight * number.scale) < 1 + abs(q) * 2.0**-21


doubles = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([1e39, 1e300, 5e299, 1.7e308, -1.7e308, 0.1])


@given(st.lists(doubles, min_size=1, max_size=20), st.sampled_from([1.0, 0.1, 3.0, 1e-9, 1e300]), st.floats(0.001, 1.0))
def test_any_finite_float64_update_is_clipped_exactly_enough(values, clip, weight):
    """Beside Python's fractions: beyond float32's range, and where the length itself is beyond float64's."""
    number = FixedPoint(clip, finest_scale(clip, 10, RING))
    integers = [int(q) for q in number.encode(np.array(values), weight)]
    assert sum(q * q for q in integers) <= (weight * clip * number.scale) ** 2 * (1 + 1e-15)
    squares = sum(Fraction(x) ** 2 for x in values)
    for q, x in zip(integers, values, strict=True):
        wanted = Fraction(x) * Fraction(weight) * Fraction(number.scale)
        if squares > Fraction(clip) ** 2:  # times clip over the length, whose root has 60 bits here
            wanted *= Fraction(clip) / Fraction(math.isqrt(int(squares * 4**1200)), 2**1200)
        assert abs(q - wanted) < 1 + abs(q) * 2.0**-21


def test_a_float64_update_beyond_float32_keeps_its_sign_and_direction():
    found = FixedPoint(1.0, 2.0**27).encode(np.array([1e300, 5e299, 0.0, 0.0])) / 2.0**27
    assert found == pytest.approx([0.8**0.5, 0.2**0.5, 0.0, 0.0], rel=1e-6)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1), st.floats(0.001, 1.0))
def test_float32_updates_are_scaled_in_float32(values, weight):
    """Bit for bit what was always sent: one product in float32 by a factor rounded to it."""
    vector, number = np.array(values, np.float32), FixedPoint(1.0, 2.0**27)
    factor = weight * number.scale * min(1.0, 1.0 / max(norm(vector), 1e-300))
    factor *= 1.0 if math.frexp(factor)[0] == 0.5 else 1.0 - 2.0**-22
    assert np.array_equal(number.encode(vector, weight), (vector * np.float32(factor)).astype(np.int32))


def test_an_update_that_is_not_finite_is_no_update():
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(ValueError, match="not finite"):
            FixedPoint(1.0, 2.0**10).encode(np.array([0.1, bad], np.float32))
        with pytest.raises(ValueError, match="not finite"):
            FixedPoint(1.0, 2.0**10).encode(np.array([1e300, bad]))


@given(st.floats(1e-3, 1e3), st.integers(1, 5000), st.sampled_from([RING, FIELD]), st.floats(0, 50))
def test_the_finest_scale_fits_and_the_next_does_not(clip, terms, limit, noise):
    scale = finest_scale(clip, terms, limit, noise)
    worst = lambda s: terms * int(clip * s) + noise * s  # noqa: E731
    assert worst(scale) < limit <= worst(2 * scale) + 1
    assert FixedPoint(clip, scale).largest * terms < limit


def test_what_can_not_fit_is_refused_when_it_is_configured():
    with pytest.raises(ValueError, match="do not fit"):
        finest_scale(1e-9, 1 << 40, FIELD)
    policy = enclave_policy(10, 4, 1.0, polynomial(0.5), 5)
    with pytest.raises(ValueError, match="the sum may exceed"):
        replace(policy, scale=2 * policy.scale)
    with pytest.raises(ValueError, match="the sum may exceed"):
        replace(policy, noise_bound=4.0)


@given(st.lists(st.integers(-(2**20), 2**20), min_size=1, max_size=10), st.integers(0, 2**32))
def test_rounding_noise_commutes_with_adding_integers(total, seed):
    number = FixedPoint(1.0, 2.0**10)
    noise = np.random.default_rng(seed).standard_normal(len(total))
    noise[0] = 2.5 / number.scale  # a tie
    sums = np.array(total)
    assert np.array_equal(sums + number.noise(noise), number.noise(sums / number.scale + noise))


@given(st.integers(0, 2**32), st.integers(1, 300))
def test_pads_cancel_modulo_2_to_the_32(seed, length):
    rng = np.random.default_rng(seed)
    integers = rng.integers(-(2**28), 2**28, (3, length), dtype=np.int32)
    seeds = [rng.bytes(32) for _ in integers]
    total = sum(mask(q, s) for q, s in zip(integers, seeds, strict=True)) - sum(pad(s, length) for s in seeds)
    assert np.array_equal(signed(total), integers.sum(axis=0))


# ── the field, beside Python's integers ──────────────────────────────────────────────────────────────────────────────


def array(values):
    return np.array(values, np.uint64)


@given(elements, st.data())
def test_the_field_is_pythons_modulo_p(values, data):
    others = data.draw(st.lists(st.integers(0, P - 1), min_size=len(values), max_size=len(values)))
    pairs = list(zip(values, others, strict=True))
    assert field.add(array(values), array(others)).tolist() == [(a + b) % P for a, b in pairs]
    assert field.subtract(array(values), array(others)).tolist() == [(a - b) % P for a, b in pairs]
    assert field.scale(array(values), others[0]).tolist() == [a * others[0] % P for a in values]
    assert field.weighted_sum([array(values), array(others)], [5, P - 1]).tolist() == [(5 * a - b) % P for a, b in pairs]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1) | st.just([2**64 - 1, P, P - 1, P + 1, 2 * P, 0, P * P, 2**62]))
def test_reduction_of_any_word(values):
    assert field.reduce(array(values)).tolist() == [x % P for x in values]


@settings(max_examples=30)
@given(st.integers(1, 64), st.integers(1, 70), st.integers(1, 40), st.integers(0, 2**32), st.booleans())
def test_a_matrix_product_is_exact(terms, rows, columns, seed, worst):
    rng = np.random.default_rng(seed)
    a = rng.integers(P - 3 if worst else 0, P, (rows, terms)).astype(np.uint64)
    b = rng.integers(P - 3 if worst else 0, P, (terms, columns)).astype(np.uint64)
    exact = [[sum(int(x) * int(y) for x, y in zip(line, column, strict=True)) % P for column in b.T] for line in a[:5]]
    assert field.matmul(a, b)[:5].tolist() == exact


def test_a_wide_product_is_the_product_of_its_columns():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, P, (64, 64)).astype(np.uint64), rng.integers(0, P, (64, 1001)).astype(np.uint64)
    assert np.array_equal(field.matmul(a, b)[:, 777], field.matmul(a, b[:, 777:778])[:, 0])
    with pytest.raises(ValueError, match="not exact"):
        field.matmul(np.zeros((1, 65), np.uint64), np.zeros((65, 1), np.uint64))


@given(st.lists(st.integers(-(P // 2), P // 2), min_size=1) | st.just([P // 2, -(P // 2), 0, -1, 1]))
def test_signs_survive_the_field(values):
    assert field.to_signed(field.from_signed(np.array(values))).tolist() == values


def test_uniform_elements_leave_p_out(monkeypatch):
    real = field.expand

    def with_p(seed, out):
        out = real(seed, out)
        out[::3] = P  # and with the highest bit set, which is masked off
        out[1::3] |= 1 << 31
        return out

    monkeypatch.setattr(field, "expand", with_p)
    drawn = field.uniform(bytes(32), 1000)
    assert len(drawn) == 1000
    assert int(drawn.max()) < P
    assert len(np.unique(drawn)) > 990  # what is drawn after is not what was drawn before


# ── shares ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("length", [1, 5, 6, 7])
def test_any_u_shares_recover_a_weighted_sum(length):
    code, rng = Code(6, 5, 3), np.random.default_rng(length)
    masks = [rng.integers(0, P, length).astype(np.uint64) for _ in range(3)]
    rows = [rng.integers(0, P, (3, code.width(length))).astype(np.uint64) for _ in masks]
    shares = [code.encode(m, r) for m, r in zip(masks, rows, strict=True)]
    weights = [64, 1, 37]
    expected = [sum(w * int(m[i]) for w, m in zip(weights, masks, strict=True)) % P for i in range(length)]
    for chosen in itertools.combinations(range(6), 5):
        mixed = {j: field.weighted_sum([s[j] for s in shares], weights) for j in chosen}
        assert code.decode(mixed, length).tolist() == expected
    with pytest.raises(ValueError, match="4 shares: 5 are needed"):
        code.decode(dict(list(mixed.items())[:4]), length)


@pytest.mark.parametrize("code", [Code(5, 4, 2), Code(7, 6, 3), Code(6, 6, 4)])
def test_any_t_shares_hide_the_mask(code):
    """The random rows enter any T shares by an invertible matrix: whatever the mask, these shares are uniform."""
    unit_rows = [
        code.encode(np.zeros(code.recovery - code.privacy, np.uint64), array([[int(i == k)] for i in range(code.privacy)]))
        for k in range(code.privacy)
    ]
    for chosen in itertools.combinations(range(code.helpers), code.privacy):
        matrix = [[int(rows[j][0]) for rows in unit_rows] for j in chosen]
        assert determinant(matrix) % P != 0


def determinant(matrix: list[list[int]]) -> int:
    if not matrix:
        return 1
    minors = ([row[:i] + row[i + 1 :] for row in matrix[1:]] for i in range(len(matrix)))
    return sum((-1) ** i * matrix[0][i] * determinant(minor) for i, minor in enumerate(minors))


@pytest.mark.parametrize("wrong", [(5, 4, 4), (5, 6, 2), (8, 4, 2), (200, 120, 2), (0, 1, 1)])
def test_committees_that_could_not_work_are_refused(wrong):
    with pytest.raises(ValueError):
        Code(*wrong)


def test_two_lists_have_an_honest_signer_in_common():
    """With 2U − N ≤ T the helpers that sign for both may all conspire, and the two sums differ by one client."""
    for helpers, privacy in itertools.product(range(2, 14), range(1, 13)):
        for recovery in range(privacy + 1, helpers + 1):
            first, second = set(range(recovery)), set(range(helpers - recovery, helpers))  # as different as they can be
            if len(first & second) > privacy:
                Code(helpers, recovery, privacy)
            else:
                with pytest.raises(ValueError, match="2 · recovery − helpers > privacy"):
                    Code(helpers, recovery, privacy)
    with pytest.raises(ValueError, match=r"helpers=5, recovery=3, privacy=2: .* take a recovery of 4 or more"):
        Code(5, 3, 2)
    for good in ((8, 6, 3), (16, 12, 6), (32, 24, 12), (64, 48, 24)):
        Code(*good)


# ── policy ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_policy_has_one_form_and_one_name():
    policy = enclave_policy(10, 4, 1.0, polynomial(0.5), 5)
    assert TaskPolicy.from_bytes(policy.to_bytes()) == policy
    with pytest.raises(RefusedError, match="canonical"):
        TaskPolicy.from_bytes(policy.to_bytes().replace(b",", b", "))
    others = [
        replace(policy, length=11),
        replace(policy, buffer_size=3),
        replace(policy, clip=0.5),
        replace(policy, separation=2),
    ]
    others += [replace(policy, weights=policy.weights[:-1]), replace(policy, lifetime=1.0), replace(policy, participations=1)]
    assert len({policy.id, *(other.id for other in others)}) == 1 + len(others)


def test_a_buffer_of_one_is_refused():
    with pytest.raises(ValueError, match="buffer_size=1"):
        enclave_policy(10, 1, 1.0, polynomial(0.5), 5)


def test_an_update_that_weighs_nothing_would_hide_nobody():
    with pytest.raises(ValueError, match="hides nobody"):
        enclave_policy(10, 4, 1.0, cutoff(3), 5)
    with pytest.raises(ValueError, match=r"weights\[1\]=1e-12.*hides nobody"):  # nothing on the grid
        enclave_policy(10, 4, 1.0, lambda staleness: 1e-12 if staleness else 1.0, 5)
    with pytest.raises(ValueError, match="larger unit"):
        helpers_policy(10, 4, 1.0, polynomial(3.0), 10, Code(5, 4, 2))
    enclave_policy(10, 4, 1.0, cutoff(3), 3)


# ── the trusted aggregator ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_buffer_is_its_sum():
    world = enclave_world()
    for step in range(3):
        world.fill()
        total = world.server.unmask(world.enclave.release(step, world.server.serials))
        weight = world.policy.weights[step]
        assert np.array_equal(
            total, sum(world.policy.fixed_point.encode(update(i), weight).astype(int) for i in range(BUFFER_SIZE))
        )


def test_noise_is_added_inside():
    noise = {step: np.random.default_rng(step).standard_normal(50) for step in range(2)}
    policy = enclave_policy(50, 2, 1.0, polynomial(0.5), 5, noise_bound=10.0, noise="gaussian")
    enclave = Enclave.create(policy, simulated_attester(bytes(32), measurement(b"")), os.urandom, noise=noise.__getitem__)
    evidence = enclave.evidence(0.0)
    aggregator = Aggregator(policy, evidence[:32], evidence[32:64], enclave.epoch)
    server, clients = EnclaveServer(policy, aggregator.signer), [EnclaveClient(i, aggregator, os.urandom) for i in range(2)]
    for step in range(2):
        for i, client in enumerate(clients):
            seed, masked = client.upload(enclave.issue([i], 0.0)[0], step, step, update(i))
            server.seed(seed)
            server.masked(masked)
        seeds = server.ready()
        server.add(seeds, enclave.submit(seeds, 0.0))
        total = server.unmask(enclave.release(step, server.serials))
        plain = sum(policy.fixed_point.encode(update(i)).astype(int) for i in range(2))
        assert np.array_equal(total, plain + np.floor(noise[step] * policy.scale + 0.5))
    with pytest.raises(ValueError, match="source of noise"):
        Enclave.create(policy, simulated_attester(bytes(32), bytes(32)), os.urandom)


def test_the_trusted_aggregators_memory_does_not_grow_with_the_buffer():
    length, count = 100_000, 30
    policy = enclave_policy(length, count, 1.0, polynomial(0.5), 5)
    enclave = Enclave.create(policy, simulated_attester(bytes(32), bytes(32)), os.urandom)
    evidence = enclave.evidence(0.0)
    aggregator, zeros = Aggregator(policy, evidence[:32], evidence[32:64], enclave.epoch), np.zeros(length, np.float32)
    slots = enclave.issue(range(count), 0.0)
    seeds = [EnclaveClient(i, aggregator, os.urandom).upload(slot, 0, 0, zeros)[0] for i, slot in enumerate(slots)]
    tracemalloc.start()
    try:
        assert not any(enclave.submit(seeds, 0.0))
        assert tracemalloc.get_traced_memory()[1] < 4 * length  # beside the sum and room for one pad: less than one vector
    finally:
        tracemalloc.stop()


def test_a_client_takes_part_only_as_often_as_the_policy_allows():
    policy = replace(enclave_policy(50, 2, 1.0, polynomial(0.5), 20), participations=2, separation=3)
    records = []
    enclave = Enclave.create(policy, simulated_attester(bytes(32), bytes(32)), os.urandom, records.append)
    evidence = enclave.evidence(0.0)
    aggregator = Aggregator(policy, evidence[:32], evidence[32:64], enclave.epoch)
    clients = [EnclaveClient(i, aggregator, os.urandom) for i in range(20)]

    def submit(*numbers):
        seeds = [
            clients[i].upload(s, 0, enclave.version, update(i))[0]
            for i, s in zip(numbers, enclave.issue(numbers, 0.0), strict=True)
        ]
        return enclave.submit(seeds, 0.0)

    def step():
        enclave.release(enclave.version, [serial for serial, _ in enclave.accepted()])

    assert submit(0, 1) == [None, None]
    step()
    assert "separation is 3" in submit(0)[0]
    for others in ((2, 3), (4, 5)):
        assert submit(*others) == [None, None]
        step()
    assert submit(0, 6) == [None, None]
    step()
    for others in ((7, 8), (9, 10), (11, 12)):
        submit(*others)
        step()
    assert "took part 2 times" in submit(0)[0]
    again = Enclave.restore(records[-2:], enclave.number, policy, simulated_attester(bytes(32), bytes(32)))
    assert again.state() == enclave.state()


def test_given_up_buffers_burn_their_slots():
    world = enclave_world()
    seed = world.upload(0)
    world.enclave.submit([seed], NOW)
    world.enclave.abort(0)
    assert world.enclave.accepted() == []
    assert "used before" in world.enclave.submit([seed], NOW)[0]
    other = enclave_world()
    late = other.upload(0)
    assert "expired" in other.enclave.submit([late], NOW + other.policy.lifetime + 1)[0]


def test_what_was_written_ahead_is_the_enclave_again():
    world = enclave_world()
    world.fill()
    attester = simulated_attester(world.root, measurement(b"attacks"))
    for counter in (world.enclave.number, world.enclave.number - 1):  # the counter may lag behind by one
        again = Enclave.restore(world.records, counter, world.policy, attester)
        assert again.state() == world.enclave.state()
    for counter in (0, world.enclave.number - 2):
        with pytest.raises(RefusedError, match="the counter was turned back, or lost"):
            Enclave.restore(world.records, counter, world.policy, attester)
    released = world.enclave.release(0, world.server.serials)
    again = Enclave.restore(world.records[-1:], world.enclave.number, world.policy, attester)
    assert again.state() == world.enclave.state()
    assert again.release(0, world.server.serials).to_bytes() == released.to_bytes()
    seeds = [serial for serial, _ in released.accepted]
    assert world.server.unmask(released) is not None and len(seeds) == BUFFER_SIZE
    with pytest.raises(RefusedError, match="another policy"):
        Enclave.restore(world.records[-1:], 1, replace(world.policy, clip=0.5), attester)


def test_no_seed_is_kept_after_a_release():
    world = enclave_world()
    world.fill()
    kept = b"".join(world.records)
    seeds = [secret for _, _, secret in world.enclave._accepted.values()]
    assert all(seed in kept for seed in seeds)  # needed after a crash …
    world.enclave.release(0, world.server.serials)
    assert not any(seed in world.records[-1] or seed in world.enclave.state() for seed in seeds)  # … and no longer


# ── helpers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("gone", range(5))
def test_any_helper_may_vanish_in_the_middle(gone):
    world = helpers_world()
    listed = world.fill()
    echoes = [helper.echo(listed) for helper in world.helpers if helper.number != gone]
    for helper in world.helpers:
        if helper.number != gone:
            world.server.answer(helper.answer(echoes))
    unit = world.policy.unit
    expected = sum(unit * world.policy.fixed_point.encode(update(i)).astype(int) for i in range(BUFFER_SIZE))
    assert np.array_equal(world.server.unmask(), expected)


@pytest.mark.parametrize("liar", [0, 2, 4])
def test_a_wrong_answer_is_noticed_if_there_is_one_to_spare(liar):
    world = helpers_world()
    listed = world.fill()
    echoes = [helper.echo(listed) for helper in world.helpers]
    for helper in world.helpers:
        answer = helper.answer(echoes)
        if helper.number == liar:  # off by one in one place, and signed
            words = answer.words.copy()
            words[-1] = (int(words[-1]) + 1) % P
            answer = replace(answer, words=words)
            answer = replace(answer, signature=sealing.sign(helper._signing, answer.body()))
        world.server.answer(answer)
    before = world.server.state()
    with pytest.raises(RefusedError, match="the answers of helpers 0, 1, 2, 3, 4 do not fit together: one or more are wrong"):
        world.server.unmask()
    assert world.server.state() == before


def test_nobody_is_on_a_list_twice():
    world = helpers_world()
    listed = world.fill()
    helper = world.helpers[0]
    with pytest.raises(RefusedError, match="a mask is on it twice"):
        helper.echo(replace(listed, lines=(*listed.lines, listed.lines[0])))
    name, _, shares = world.clients[0].share(0)
    helper.keep(shares[0], NOW)
    with pytest.raises(RefusedError, match="a client is on it twice"):
        helper.echo(replace(listed, lines=(*listed.lines, (name, 0, 64))))


def test_a_helper_answers_the_same_again_and_keeps_no_share_of_it():
    world = helpers_world()
    listed = world.fill()
    echoes = [helper.echo(listed) for helper in world.helpers]
    helper = world.helpers[0]
    assert helper.echo(listed) == echoes[0]
    assert helper.answer(echoes).to_bytes() == helper.answer(echoes).to_bytes()
    assert not helper._shares


def test_shares_of_clients_that_never_upload_expire():
    world = helpers_world()
    name, secret, shares = world.clients[0].share(0)
    for share in shares:
        world.helpers[share.helper].keep(share, NOW)
    for helper in world.helpers:
        helper.expire(NOW + world.policy.lifetime)
        assert helper._shares
        helper.expire(NOW + world.policy.lifetime + 1)
        assert not helper._shares
    world.server.masked(world.clients[0].upload(name, secret, 0, update(0)))
    for client in range(1, BUFFER_SIZE):
        world.upload(client)
    with pytest.raises(RefusedError, match="has expired"):
        world.helpers[0].echo(world.server.list())
    with pytest.raises(RefusedError, match="known already"):
        world.helpers[0].keep(shares[0], NOW)


def test_old_masks_are_forgotten_once_they_are_too_stale_to_come_back():
    world = helpers_world()
    listed = world.fill()
    helper = world.helpers[0]
    _, _, shares = world.clients[0].share(0)
    helper.echo(listed)
    helper.answer([h.echo(listed) for h in world.helpers])
    for client in range(BUFFER_SIZE):
        _, _, later = world.clients[client].share(40)
        helper.keep(later[0], NOW)
    lines = tuple((mask, 40, 64) for mask in helper._shares)
    helper.echo(replace(listed, version=40, lines=lines))
    assert helper._past.keys() == {mask for mask, _, _ in lines}
    with pytest.raises(RefusedError, match="too stale for any list"):
        helper.keep(shares[0], NOW)


def test_a_key_that_the_root_has_not_signed_is_nobodys():
    root, key = os.urandom(32), sealing.public(os.urandom(32))
    directory = Directory(sealing.signer(root))
    with pytest.raises(RefusedError, match="not signed by the root"):
        directory.add("helper", 0, key, sealing.sign(os.urandom(32), certificate("helper", 0, key)))
    with pytest.raises(RefusedError, match="not signed by the root"):
        directory.add("helper", 1, key, sealing.sign(root, certificate("helper", 0, key)))
    directory.add("helper", 0, key, sealing.sign(root, certificate("helper", 0, key)))
    other = sealing.public(os.urandom(32))
    with pytest.raises(RefusedError, match="another key already"):
        directory.add("helper", 0, other, sealing.sign(root, certificate("helper", 0, other)))
    with pytest.raises(RefusedError, match="no key"):
        directory.helper(7)


@pytest.mark.parametrize("clip", [1e-36, 1e-30, 1e-20])
def test_a_tiny_clip_has_a_grid_that_float32_can_multiply_by(clip):
    scale = finest_scale(clip, terms=2, limit=RING)
    update = np.array([0.3, -0.4, 0.0], np.float32) * np.float32(clip)
    encoded = FixedPoint(clip, scale).encode(update)
    assert FixedPoint(clip, scale).decode(encoded) == pytest.approx(update.astype(np.float64), abs=1 / scale)
