"""Where noise comes from: standard normal vectors addressed by (tree, level, index), the same whenever they are asked for.

    draw = secure(key, dimension)      # AES-256 in counter mode: for what is released
    draw = seeded(0, dimension)        # Philox: for experiments, repeatable by anyone who knows the seed
    draw(0, 3, 5)                      # the noise of tree 0's node 5 on level 3

An address is a range of the generator's counter, and no two ranges overlap: nothing is ever drawn twice for two purposes, and
a run that was killed draws again what it drew before, not something else.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.compiled.normals import normals

Noise = NDArray[np.float64]
Draw = Callable[[int, int, int], Noise]

_BLOCK = 1 << 13
_MOST = 1 << 41  # numbers of 8 bytes: the last 5 bytes of the counter number blocks of 16


def secure(key: bytes, dimension: int) -> Draw:
    """Noise that nobody can predict without the key, 32 random bytes: one per run, kept as secret as the updates."""
    if not isinstance(key, bytes) or len(key) != 32:
        raise ValueError(f"key: expected 32 random bytes, e.g. os.urandom(32), got {_shown(key)}")
    if not 1 <= dimension <= _MOST:
        raise ValueError(f"dimension={dimension}: expected 1 to 2^41")
    cipher, algorithm, counter = _aes()

    def draw(tree: int, level: int, index: int) -> Noise:
        start = tree.to_bytes(4, "big") + level.to_bytes(1, "big") + index.to_bytes(6, "big") + bytes(5)
        stream = cipher(algorithm(key), counter(start)).encryptor()
        return _normals(stream.update_into, dimension)

    return draw


def seeded(seed: int, dimension: int) -> Draw:
    """Noise of an experiment: who knows the seed can subtract it, so it protects nobody."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 128:
        raise ValueError(f"seed: expected an integer from 0 to 2^128 − 1, got {_shown(seed)}")

    def draw(tree: int, level: int, index: int) -> Noise:
        counter = tree << 192 | level << 128 | index << 64
        return np.random.Generator(np.random.Philox(counter=counter, key=seed)).standard_normal(dimension)

    return draw


def _normals(keystream: Callable[[Any, Any], Any], dimension: int) -> Noise:
    """From the uniform bits that encrypting zeros gives, a block that stays in the cache at a time."""
    even = dimension + dimension % 2  # two words make two numbers
    out = np.empty(even)
    zeros, bits = np.zeros(8 * _BLOCK, np.uint8), np.empty(_BLOCK, np.uint64)
    for at in range(0, even, _BLOCK):
        block = out[at : at + _BLOCK]
        words = bits[: len(block)]
        keystream(zeros[: words.nbytes], words.view(np.uint8))
        normals(words, block)
    return out[:dimension]


def fingerprint(key: bytes | int) -> str:
    """Tells two keys apart and gives neither away: kept with a stream's state, so that it goes on with its own key only."""
    return hashlib.sha256(b"fedbuff noise key " + (key if isinstance(key, bytes) else b"seed %d" % key)).hexdigest()[:16]


def _shown(key: object) -> str:
    return f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__  # a key is a secret, also in errors


def _aes() -> tuple[Any, Any, Any]:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES256
        from cryptography.hazmat.primitives.ciphers.modes import CTR
    except ImportError as e:
        raise ValueError("secure noise needs the package cryptography: pip install 'fedbuff[privacy]'") from e
    return Cipher, AES256, CTR
