"""Room for kernels' arrays: memory is used again, and never by two at once."""

import mmap
import os
import threading
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedbuff
from fedbuff.learn.kernels import library
from fedbuff.learn.kernels.room import _blocks, give_back, room

MB = 1 << 20
pytestmark = pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE"), reason="this system has no private mappings")


@pytest.fixture(autouse=True)
def nothing_kept():
    give_back()
    yield
    give_back()


def floats(mb: float) -> torch.Tensor:
    return room(round(mb * MB / 4))


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(1, 4)), max_size=30))
def test_no_two_arrays_overlap(orders: list[tuple[int, float]]):
    """Slots are filled anew in any order; each array still holds its own number in the end."""
    held: dict[int, tuple[torch.Tensor, float]] = {}
    for number, (slot, mb) in enumerate(orders):
        held.pop(slot, None)
        held[slot] = floats(mb).fill_(number), number
    for array, number in held.values():
        assert bool((array == number).all())


def test_memory_is_used_again_once_its_array_is_gone():
    first = floats(2)
    place = first.data_ptr()
    del first
    assert floats(2).data_ptr() == place
    assert floats(1.5).data_ptr() == place  # a smaller one fits, too


@pytest.mark.parametrize("part", [lambda x: x[5:], lambda x: x.view(2, -1).t(), lambda x: x.detach(), lambda x: x.numpy()])
def test_memory_is_in_use_as_long_as_any_view_of_it(part):
    view = part(floats(2).fill_(1.0))
    floats(2).fill_(2.0)
    assert (view == 1.0).all()


def test_what_autograd_keeps_for_the_way_back_is_in_use():
    w = torch.ones(MB, requires_grad=True)
    y = (w * floats(4).fill_(3.0)).sum()
    floats(4).fill_(5.0)
    y.backward()
    assert bool((w.grad == 3.0).all())


def test_there_are_as_many_blocks_as_arrays_at_once_however_sizes_change():
    for mb in (1, 3, 2, 5, 1.1, 4.7, 6):
        pair = floats(mb), floats(mb / 1.5 + 1)
        del pair
    assert len(_blocks.all) == 2
    assert sum(block.size for block in _blocks.all) <= 12.5 * MB


def test_a_small_array_is_none_of_its_business():
    room(100)
    assert not _blocks.all


def test_images_lie_channels_last_and_bytes_are_bytes():
    images = room(16, 32, 36, 36, memory_format=torch.channels_last)
    assert images.shape == (16, 32, 36, 36)
    assert images.stride() == torch.empty(16, 32, 36, 36, memory_format=torch.channels_last).stride()
    assert room(2 * MB, dtype=torch.uint8).dtype == torch.uint8


def test_a_fork_does_not_write_into_ours():
    ours = floats(2).fill_(1.0)
    pid = os.fork()
    if pid == 0:
        ours.fill_(2.0)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert bool((ours == 1.0).all())


def test_threads_have_rooms_of_their_own():
    floats(2)
    blocks = []
    thread = threading.Thread(target=lambda: blocks.extend([*_blocks.all, floats(2)]))
    thread.start()
    thread.join()
    assert len(blocks) == 1  # its own, and not ours, though that is free
    assert len(_blocks.all) == 1


def test_a_run_leaves_none_behind():
    rng = np.random.default_rng(0)
    clients = [(rng.standard_normal((30, 3, 32, 32), dtype=np.float32), rng.integers(0, 2, 30)) for _ in range(4)]
    task = fedbuff.Task(partial(fedbuff.models.cnn(), (3, 32, 32), 2), torch.nn.functional.cross_entropy, clients, clients[0])
    most = []
    server = fedbuff.Server(start=fedbuff.refill(concurrency=4), buffer_size=2)
    until = fedbuff.server_steps(2)
    client = fedbuff.LocalSGD(lr=0.1)
    fedbuff.simulate(server, task, client=client, until=until, workers=1, progress=lambda _: most.append(len(_blocks.all)))
    assert max(most) > 0 or library() is None
    assert not _blocks.all
