"""Room for the large arrays that kernels write, in blocks of memory that are used again and again.

malloc would put small things that live on between them, find no place for the next chunk's arrays where the last one's
were, and take more and more memory. If it gave all of it back, page faults would cost as much as the arithmetic.
"""

import math
import mmap
import threading
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LARGE = 1 << 20  # bytes
_STEP = 1 << 18  # blocks are multiples of it, so that the next array, if it is a little larger, fits too


class _Block:
    """Some memory, and whether a tensor lives in it: the array that a tensor was made of goes when its last view does."""

    def __init__(self, size: int) -> None:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a fork must not write into our activations
        self.memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, -(-size // _STEP) * _STEP, flags=private), np.uint8)
        self.size = len(self.memory)
        self.user: weakref.ref[NDArray[np.uint8]] | None = None

    def free(self) -> bool:
        return self.user is None or self.user() is None

    def bytes(self, count: int) -> Tensor:
        part = self.memory[:count]
        self.user = weakref.ref(part)
        return torch.from_numpy(part)


class _Blocks(threading.local):
    def __init__(self) -> None:
        self.all: list[_Block] = []


_blocks = _Blocks()


def room(
    *shape: int, dtype: torch.dtype = torch.float32, memory_format: torch.memory_format = torch.contiguous_format
) -> Tensor:
    """Uninitialised numbers as kernels have them, whatever torch's default is."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(shape, dtype=dtype, memory_format=memory_format)
    # not a view of anything, which a model could not change in place
    memory = _block(size).bytes(size).untyped_storage()
    like = torch.empty(shape, memory_format=memory_format, device="meta")  # which has strides, and no memory
    return torch.empty(0, dtype=dtype).set_(memory, 0, shape, like.stride())


def give_back() -> None:
    """Nothing is trained for a while: let this thread's blocks go as soon as nobody uses them."""
    _blocks.all.clear()


def _block(size: int) -> _Block:
    """The smallest free block with so many bytes. If there is none, a new one, in place of the largest free one."""
    free = [block for block in _blocks.all if block.free()]
    fits = [block for block in free if block.size >= size]
    if fits:
        return min(fits, key=lambda block: block.size)
    if free:
        _blocks.all.remove(max(free, key=lambda block: block.size))
    _blocks.all.append(_Block(size))
    return _blocks.all[-1]
