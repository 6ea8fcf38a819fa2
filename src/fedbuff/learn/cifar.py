"""CIFAR-10's Python version: six pickles of 10,000 images each, in a folder or still in their .tar.gz.

A pickle can run any code of its author's choice, so these are read by an unpickler that knows a handful of names, and
for each of them only takes down what it was called with. The array is built here, from bytes that were checked.
"""

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedbuff.learn.cache import New
from fedbuff.learn.folder import missing, one_line

VERSION = 3  # of what `prepare` makes, and checks
SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"
ARCHIVE, FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"
TRAIN, TEST = tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",)
CLASSES, SHAPE = 10, (3, 32, 32)
# of the 50,000 training images, channel by channel; FLSim's std (0.2023, 0.1994, 0.2010) is the mean of the images' own
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

# what a whole set has of each part: images, the mean of each channel, and its fingerprint
_WHOLE = {
    "train": (50_000, (0.49139968, 0.48215841, 0.44653091), 0xFF78E2361FA1E64F),
    "test": (10_000, (0.49421428, 0.48513139, 0.45040909), 0x8028989D7F7EAE66),
}
_MD5 = "c58f30108f718f92721af3b95e74349a"  # of the archive, as its page says
_PIXELS = 3 * 32 * 32
_LARGEST = 1 << 27  # bytes; a batch has 31 MB

Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]


def find(folder: Path) -> list[Path]:
    """The six batches where they are unpacked, or else the archive."""
    batches = (*TRAIN, *TEST)
    places = [place / sub for place in (folder, folder / "cifar10") for sub in ("", FOLDER)]
    for place in places:
        if all((place / name).is_file() for name in batches):
            return [place / name for name in batches]
    for place in places:
        if (place / ARCHIVE).is_file():
            return [place / ARCHIVE]
    for place in places:
        absent = [name for name in batches if not (place / name).is_file()]
        if len(absent) < len(batches):
            raise missing([place], absent[0], SOURCE)
    raise missing(places, f"{ARCHIVE} (or its folder {FOLDER})", SOURCE)


def prepare(sources: list[Path], new: New) -> None:
    """train_x, train_y, test_x and test_y."""
    found = dict(read_archive(sources[0]) if len(sources) == 1 else read_folder(sources[0].parent))
    for part, names in (("train", TRAIN), ("test", TEST)):
        count = sum(len(found[name][1]) for name in names)
        x, y = new(f"{part}_x", (count, *SHAPE), np.uint8), new(f"{part}_y", (count,), np.int64)
        np.concatenate([found[name][0] for name in names], out=x)
        np.concatenate([found[name][1] for name in names], out=y)
        check_whole(part, x, y, str(sources[0] if len(sources) == 1 else sources[0].parent))


def check_whole(part: str, x: NDArray[np.uint8], y: NDArray[np.int64], where: str) -> None:
    """As many images as CIFAR-10 has must be its own; fewer are somebody's choice."""
    count, means, whole = _WHOLE[part]
    if len(y) != count:
        return
    again = f"get it again from {SOURCE}"
    found = x.sum((0, 2, 3), dtype=np.int64) / (255 * x[:, 0].size)
    if np.abs(found - means).max() > 1e-6:
        these, those = (", ".join(f"{mean:.6f}" for mean in three) for three in (found, means))
        raise ValueError(
            f"{where}: its {count:,} {part} images are not CIFAR-10's: their channels' means are {these}, not {those}; {again}"
        )
    counts = np.bincount(y, minlength=CLASSES)
    if (counts != count // CLASSES).any():
        classes = ", ".join(map(str, counts))
        raise ValueError(
            f"{where}: its {part} labels are not CIFAR-10's: {count // CLASSES:,} of each class are, found {classes}; {again}"
        )
    if fingerprint(x, y) != whole:
        raise ValueError(f"{where}: some of its {count:,} {part} images or labels are not as CIFAR-10 has them; {again}")


def fingerprint(x: NDArray[np.uint8], y: NDArray[np.int64]) -> int:
    """A number that any other pixel or label changes, and another order of the images does not."""
    times = np.arange(1, _PIXELS // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    total = 0
    for i in range(0, len(y), 1000):
        pixels = np.ascontiguousarray(x[i : i + 1000]).reshape(-1, _PIXELS).view("<u8")
        rows = (pixels * times).sum(1) + y[i : i + 1000].astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
        for shift, factor in ((31, 0xBF58476D1CE4E5B9), (29, 0x94D049BB133111EB)):  # so that changes don't cancel in the sum
            rows = (rows ^ (rows >> np.uint64(shift))) * np.uint64(factor)
        total += int(rows.sum())
    return total % 2**64


def read_folder(folder: Path) -> Iterator[tuple[str, Batch]]:
    """The name, images [n, 3, 32, 32] and labels of each batch in turn."""
    for name in (*TRAIN, *TEST):
        path = folder / name
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"{path}: {path.stat().st_size:,} bytes are too many for a batch of CIFAR-10")
        yield name, read_batch(path.read_bytes(), str(path))


def read_archive(path: Path) -> Iterator[tuple[str, Batch]]:
    """The same from the .tar.gz, which is read to its end so that its checksum is looked at."""
    seen = set()
    try:
        with gzip.open(path) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as archive:
            for member in archive:
                name = Path(member.name).name
                if name in (*TRAIN, *TEST) and member.isfile() and member.size <= _LARGEST:
                    file = archive.extractfile(member)
                    assert file is not None
                    if name in seen:
                        raise _RefusedError(f"{path}: holds {name} twice; {_compare(path)}")
                    seen.add(name)
                    yield name, read_batch(file.read(), f"{path}: {name}")
            while unpacked.read(1 << 20):
                pass
    except _RefusedError:
        raise
    except Exception as e:  # tarfile, gzip and zlib have a dozen kinds between them
        raise ValueError(f"{path}: not a whole .tar.gz ({one_line(e)}); {_compare(path)}") from e
    if absent := [name for name in (*TRAIN, *TEST) if name not in seen]:
        raise ValueError(f"{path}: holds no {', '.join(absent)}; {_compare(path)}")


def read_batch(data: bytes, where: str) -> Batch:
    """Images [n, 3, 32, 32] and labels out of a pickled batch; `where` is for error messages."""
    file = io.BytesIO(data)
    try:
        found = _Unpickler(file).load()
        if left := len(data) - file.tell():
            raise ValueError(f"{left:,} bytes follow its end")
    except Exception as e:  # a damaged pickle can raise nearly anything
        why = f"{one_line(e)} is no beginning of one" if isinstance(e, KeyError) else one_line(e)
        raise _RefusedError(f"{where}: not a whole pickle of CIFAR-10 ({why}); get it again from {SOURCE}") from e
    if not isinstance(found, dict):
        raise _RefusedError(f"{where}: expected a dictionary with data and labels, found a {type(found).__name__}")
    names = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in found.items()}
    if not {"data", "labels"} <= names.keys():
        listed = ", ".join(map(str, names)) or "an empty one"
        raise _RefusedError(f"{where}: expected a dictionary with data and labels, found {one_line(listed)}")
    for key, kind in (("data", _Array), ("labels", list)):
        if not isinstance(names[key], kind):
            what = "an ndarray" if isinstance(names[key], _Array) else f"a {type(names[key]).__name__}"
            raise _RefusedError(f"{where}: expected data as an ndarray and labels as a list, found {key} as {what}")
    labels = names["labels"]
    if not all(type(label) is int and 0 <= label < CLASSES for label in labels):
        wrong = next(label for label in labels if type(label) is not int or not 0 <= label < CLASSES)
        raise _RefusedError(f"{where}: expected labels from 0 to {CLASSES - 1}, found {one_line(wrong)}")
    pixels = names["data"].pixels()
    if pixels is None or pixels.shape[1] != _PIXELS or len(pixels) != len(labels) or not labels:
        shape = "no array of bytes" if pixels is None else f"{pixels.shape[0]} × {pixels.shape[1]} bytes"
        raise _RefusedError(f"{where}: expected {len(labels)} × {_PIXELS} bytes for its {len(labels)} labels, found {shape}")
    return pixels.reshape(-1, *SHAPE), np.array(labels, np.int64)


class _RefusedError(ValueError):
    """A complaint that says where already."""


class _Array:
    """What is left of a pickled ndarray: what it was restored with."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def pixels(self) -> NDArray[np.uint8] | None:
        """The matrix of bytes that it was, if it was one."""
        match self.state:
            case (1, (int(rows), int(columns)), _Dtype() as dtype, 0 | 1 as by_columns, bytes() | bytearray() as raw):
                fits = dtype.name in ("u1", "uint8") and rows >= 0 and columns >= 0 and rows * columns == len(raw)
                return np.frombuffer(raw, np.uint8).reshape((rows, columns), order="F" if by_columns else "C") if fits else None
        return None


class _Dtype:
    """What is left of a dtype: its name."""

    def __init__(self, name: Any = None, *_: Any) -> None:
        self.name = (name.decode("latin-1") if isinstance(name, bytes) else str(name)).lstrip("|")

    def __setstate__(self, state: Any) -> None:
        pass


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _frombuffer(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    return _Array((1, shape, dtype, int(order == "F"), raw))


def _encode(text: Any, _: Any) -> bytes:
    return str(text).encode("latin-1")


_KNOWN = {
    "ndarray": _Array,
    "dtype": _Dtype,
    "_reconstruct": _reconstruct,
    "_frombuffer": _frombuffer,
    "encode": _encode,  # how Python 3 writes bytes for Python 2
}
_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric", "_codecs")


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler: the one in C makes room for whatever size a damaged file claims."""

    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="bytes")  # the files were written by Python 2

    def find_class(self, module: str, name: str) -> Any:
        if module not in _MODULES or name not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-10 file needs")
        return _KNOWN[name]

    def load_bytearray8(self: Any) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(min(size, _LARGEST))))

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8


def _compare(path: Path) -> str:
    with path.open("rb") as f:
        found = hashlib.file_digest(f, "md5").hexdigest()
    return f"its md5 is {found}, that of {SOURCE} is {_MD5}"
