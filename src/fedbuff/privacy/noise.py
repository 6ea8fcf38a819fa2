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

Noise = NDArray[np.float64]
Draw = Callable[[int, int, int], Noise]

_PAIRS = 1 << 13  # normals are made two at a time, in blocks that stay in the cache
_WORDS = 1 << 41  # what 5 bytes of the counter can number, in 8-byte words


def secure(key: bytes, dimension: int) -> Draw:
    """Noise that nobody can predict without the key, 32 random bytes: one per run, kept as secret as the updates."""
    if not isinstance(key, bytes) or len(key) != 32:
        raise ValueError(f"key: expected 32 random bytes, e.g. os.urandom(32), got {_shown(key)}")
    cipher, algorithm, counter = _aes()

    def draw(tree: int, level: int, index: int) -> Noise:
        start = tree.to_bytes(4, "big") + level.to_bytes(1, "big") + index.to_bytes(6, "big") + bytes(5)
        stream = cipher(algorithm(key), counter(start)).encryptor()
        return normals(stream.update_into, dimension)

    return draw


def seeded(seed: int, dimension: int) -> Draw:
    """Noise of an experiment: who knows the seed can subtract it, so it protects nobody."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 128:
        raise ValueError(f"seed: expected an integer from 0 to 2^128 − 1, got {_shown(seed)}")

    def draw(tree: int, level: int, index: int) -> Noise:
        counter = tree << 192 | level << 128 | index << 64
        return np.random.Generator(np.random.Philox(counter=counter, key=seed)).standard_normal(dimension)

    return draw


def normals(keystream: Callable[[Any, Any], Any], dimension: int) -> Noise:
    """Independent N(0, 1), by Box and Muller, from the uniform bits that encrypting zeros gives."""
    if dimension > _WORDS:
        raise ValueError(f"dimension={dimension}: expected at most 2^41")
    out = np.empty(dimension)
    for at in range(0, dimension, 2 * _PAIRS):
        block = out[at : at + 2 * _PAIRS]
        pairs = (len(block) + 1) // 2
        bits = np.zeros(2 * pairs, np.uint64)
        keystream(bits.view(np.uint8), bits.view(np.uint8))
        bits >>= np.uint64(11)
        uniform = bits.astype(np.float64)
        uniform += 0.5  # never 0, whose logarithm there is not
        radius, angle = uniform[:pairs], uniform[pairs:]
        radius *= 2.0**-53
        np.log(radius, out=radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        angle *= np.pi * 2.0**-52
        np.multiply(radius, np.cos(angle), out=block[:pairs])
        rest = len(block) - pairs
        np.multiply(radius[:rest], np.sin(angle[:rest]), out=block[pairs:])
    return out


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
