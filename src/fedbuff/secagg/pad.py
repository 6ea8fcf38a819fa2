"""A one-time pad from a 32-byte seed: AES-256 in counter mode, counter from zero, since a seed is used once.

Words are little-endian uint32, and added modulo 2³²: what is masked is as random as the pad.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedbuff.secagg.sealing import Cipher, algorithms, modes

Words = NDArray[np.uint32]

SEED = 32  # bytes
_FROM_ZERO = modes.CTR(bytes(16))


@lru_cache(maxsize=4)
def _zeros(size: int) -> bytes:
    return bytes(size)


def expand(seed: bytes, out: Words) -> Words:
    """Fill `out` with the pad of this seed."""
    if len(seed) != SEED:
        raise ValueError(f"a seed has {SEED} bytes, got {len(seed)}")
    encryptor = Cipher(algorithms.AES(seed), _FROM_ZERO).encryptor()
    encryptor.update_into(_zeros(out.nbytes), out.view(np.uint8).data)
    return out


def pad(seed: bytes, length: int) -> Words:
    return expand(seed, np.empty(length, "<u4"))


def mask(integers: NDArray[np.int32], seed: bytes) -> Words:
    """The integers plus the pad, modulo 2³²."""
    masked = pad(seed, len(integers))
    masked += integers.view(np.uint32)
    return masked


def signed(words: Words) -> NDArray[np.int32]:
    """Words modulo 2³² read as two's complement: −2³¹ to 2³¹ − 1."""
    return words.view(np.int32)
