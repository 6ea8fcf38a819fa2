"""Messages: what one side says the other side reads, and what nobody said is refused, quickly and by one kind of error."""

import contextlib
import json
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fedbuff.deploy.wire import MalformedError, Order, Orders, Report, Result

NUMBER = st.integers(0, 2**53 - 1)
DTYPES = st.sampled_from([np.float16, np.float32, np.float64])
VECTORS = st.tuples(st.lists(st.floats(-1e4, 1e4, width=16), max_size=5), DTYPES).map(lambda v: np.array(v[0], v[1]))
ORDERS = st.builds(
    Orders,
    job=st.text(max_size=9),
    trips=st.lists(st.builds(Order, NUMBER, NUMBER, NUMBER), max_size=4).map(tuple),
    weights=st.dictionaries(NUMBER, VECTORS, max_size=3),
    forget=st.lists(NUMBER, max_size=4).map(tuple),
    sgd=st.text(max_size=9),
    ask=st.lists(st.tuples(NUMBER, st.binary(max_size=5), NUMBER), max_size=2).map(tuple),
    offer=st.binary(max_size=9),
)
RESULTS = st.builds(Result, NUMBER, NUMBER, st.binary(max_size=20), NUMBER, st.floats(0, 9e8), st.text(max_size=200))
RANGES = st.lists(st.tuples(NUMBER, NUMBER).map(sorted).map(tuple), max_size=3).map(tuple)
REPORTS = st.builds(
    Report,
    job=st.text(max_size=9),
    clients=RANGES,
    results=st.lists(RESULTS, max_size=3).map(tuple),
    holding=st.lists(NUMBER, max_size=4).map(tuple),
    problem=st.text(max_size=200),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def message(kind: bytes, facts: object, rest: bytes = b"") -> bytes:
    line = json.dumps(facts).encode()
    return struct.pack("<4sI", kind, len(line)) + line + rest


def read_or_refuse(data: bytes) -> None:
    """Both ways of reading; whatever it is, it is a message or malformed."""
    for kind in (Orders, Report):
        with contextlib.suppress(MalformedError):
            kind.from_bytes(data)


@given(ORDERS)
@hypothesis_settings(max_examples=100)
def test_orders_arrive_as_they_were_sent(orders):
    found = Orders.from_bytes(orders.to_bytes())
    assert found.weights.keys() == orders.weights.keys()
    for version, weights in orders.weights.items():
        assert found.weights[version].dtype == weights.dtype
        assert found.weights[version].tobytes() == weights.tobytes()
    without = {**vars(orders), "weights": {}}
    assert {**vars(found), "weights": {}} == without


@given(REPORTS)
@hypothesis_settings(max_examples=100)
def test_a_report_arrives_as_it_was_sent(report):
    assert Report.from_bytes(report.to_bytes()) == report


@given(st.one_of(ORDERS, REPORTS), st.data())
@hypothesis_settings(max_examples=200)
def test_changed_bytes_are_a_message_or_malformed(sent, data):
    """Flipped, cut out, repeated or put in: never anything but MalformedError."""
    changed = bytearray(sent.to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed)))
        until = data.draw(st.integers(at, min(len(changed), at + 9)))
        changed[at:until] = data.draw(st.binary(max_size=9) | st.just(bytes(changed[at:until]) * 2))
    read_or_refuse(bytes(changed))


@given(st.binary(max_size=60), st.sampled_from([b"", b"fbO1", b"fbR1"]))
@hypothesis_settings(max_examples=200)
def test_any_bytes_are_a_message_or_malformed(data, kind):
    read_or_refuse(kind + data)
    read_or_refuse(kind + struct.pack("<I", len(data)) + data)


@given(st.one_of(ORDERS, REPORTS), st.data())
@hypothesis_settings(max_examples=200)
def test_fields_of_any_type_are_a_message_or_malformed(sent, data):
    """What a program would send that speaks JSON, and not our language."""
    packed = sent.to_bytes()
    (size,) = struct.unpack("<I", packed[4:8])
    facts = json.loads(packed[8 : 8 + size])
    facts[data.draw(st.sampled_from(sorted(facts)))] = data.draw(JSON | st.lists(st.lists(JSON, max_size=7), max_size=2))
    read_or_refuse(message(packed[:4], facts, packed[8 + size :]))


@pytest.mark.parametrize(
    "weights",
    [
        [[0, "float32", 10**30]],
        [[0, "float32", -5]],
        [[0, "O", 1]],
        [[0, "f,,", 1]],
        [[0, {"names": ["a"], "formats": ["O"]}, 1]],
        [[[], "float32", 1]],
        [[0, "float32"]],
    ],
)
def test_weights_that_are_no_vector_are_malformed(weights):
    facts = json.loads(Orders("job").to_bytes()[8:])
    with pytest.raises(MalformedError):
        Orders.from_bytes(message(b"fbO1", {**facts, "weights": weights}, bytes(4)))


def test_what_takes_long_or_much_to_read_is_refused_quickly():
    facts = {"job": "j", "clients": [], "results": [], "holding": [], "problem": ""}
    hostile = [
        struct.pack("<4sI", b"fbR1", 2**32 - 1) + bytes(1000),
        message(b"fbR1", {**facts, "results": [[0, 0, 2**52, 1, 0.0, ""]]}),
        struct.pack("<4sI", b"fbR1", 300_000) + b"[" * 300_000,
        struct.pack("<4sI", b"fbR1", 300_006) + b'{"a":' + b"9" * 300_000 + b"}",
        message(b"fbR1", {**facts, "clients": [[5, 4]]}),
        message(b"fbR1", {**facts, "results": [[0, 0, 0, 1, float("nan"), ""]]}),
        message(b"fbR1", {**facts, "results": [[0, 0, 0, 1, 10**400, ""]]}),
        message(b"fbR1", {**facts, "holding": [True]}),
        message(b"fbR1", {**facts, "more": 1}),
        message(b"fbR1", facts, b"rest"),
    ]
    tracemalloc.start()
    for data in hostile:
        with pytest.raises(MalformedError):
            Report.from_bytes(data)
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()


def test_a_payload_is_not_copied():
    """A report of many updates is as large as the weights times the trips: reading it takes no second copy."""
    data = Report("job", ((0, 0),), (Result(0, 0, bytes(8_000_000)),)).to_bytes()
    tracemalloc.start()
    report = Report.from_bytes(data)
    assert tracemalloc.get_traced_memory()[1] < 1e5
    tracemalloc.stop()
    assert len(report.results[0].payload) == 8_000_000
