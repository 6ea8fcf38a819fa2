"""Steps to come are a queue: whatever is added and taken, what a list of them would say."""

import tracemalloc
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbuff.sim import steps as module
from fedbuff.sim.steps import Step, Steps

A_STEP = st.tuples(st.lists(st.integers(0, 1 << 40), max_size=4), st.integers(0, 9), st.floats(0, 9))


def made(version, trips, first, time):
    weights, staleness = [0.5 * t for t in trips], [t % 7 for t in trips]
    return Step.restored((version, trips, weights, staleness, first, first + 1, time, 3 * version))


@given(first=st.integers(0, 1000), what=st.lists(st.one_of(A_STEP, st.sampled_from(["take", "take", "clear"])), max_size=60))
def test_steps_are_the_list_of_what_was_added_less_what_was_taken(first, what):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_KEPT", 3)
        steps, expected, version = Steps(), [], first
        for event in what:
            if event == "clear":
                steps.clear()
                expected.clear()
                version += 5  # after that it may go on anywhere
            elif event == "take":
                if expected:
                    steps.taken()
                    del expected[0]
            else:
                expected.append(made(version, *event))
                steps.extend([expected[-1]])
                version += 1
            assert list(steps) == expected
            assert len(steps) == len(expected)
            assert not expected or steps.first == expected[0].first
            for sight in (version - 4, version - 1, version + 2):
                within = [step.ended for step in expected if step.version <= sight]
                assert steps.ended_by(sight) == (within[-1] if within else None)


def test_what_is_added_is_a_copy():
    steps, trips = Steps(), array("q", [1, 2])
    steps.add(1, trips, array("d", [1, 1]), array("q", [0, 0]), 0, 2, 1.0, 2)
    trips[0] = 9
    assert steps[0].trips == array("q", [1, 2])


@pytest.mark.parametrize("number", [-1, 1])
def test_there_is_no_step_beyond_the_last(number):
    steps = Steps()
    steps.extend([made(1, [1], 2, 0.5)])
    with pytest.raises(IndexError):
        steps[number]
    steps.taken()
    with pytest.raises(IndexError):
        steps.taken()


def test_steps_that_were_taken_are_let_go():
    steps, trips, weights = Steps(), array("q", [1]) * 500, array("d", [1]) * 500
    tracemalloc.start()
    for version in range(2000):
        steps.add(version, trips, weights, trips, 0, 0, 0.0, 0)
        steps.taken()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100 * 3 * trips.itemsize * len(trips) * 2  # a hundred steps, and room to grow
