"""torch's default generator, which modules draw from: ours for a while, and as it was afterwards.

There is one for all threads, so runs in several of them take turns.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_turn = threading.RLock()


@contextmanager
def default_generator() -> Iterator[torch.Generator]:
    with _turn, torch.random.fork_rng(devices=[]):
        yield torch.default_generator


def _anew() -> None:
    """A forked process has none of the threads that might hold the lock."""
    global _turn
    _turn = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_anew)
