"""GloVe's text files: a word and its numbers on each line, the same count on all; a few words of glove.840B have spaces."""

from collections.abc import Container, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbuff.learn.folder import locate, missing

SOURCE = "https://nlp.stanford.edu/projects/glove (glove.6B.zip)"
PAPERS = "glove.6B.300d.txt"


def find(folder: Path, name: str | None) -> Path:
    """The file of that name, or else the only glove*.txt, or the paper's among several."""
    subfolders = ("glove", "sent140")
    if name is not None:
        return locate(folder, subfolders, name, SOURCE)
    places = [folder, *(folder / sub for sub in subfolders)]
    found = [path for place in places for path in sorted(place.glob("glove*.txt")) if path.is_file()]
    if not found:
        raise missing(places, "glove*.txt", SOURCE)
    if len(found) == 1:
        return found[0]
    if papers := [path for path in found if path.name == PAPERS]:
        return papers[0]
    names = ", ".join(path.name for path in found)
    raise ValueError(f'glove: choose one of {names} in {folder} by [task.sent140] glove = "NAME", or leave only one there')


def read_vectors(path: Path, wanted: Container[str]) -> dict[str, NDArray[np.float32]]:
    """The vectors of those wanted words that the file has; all lines are checked for their width."""
    found: dict[str, NDArray[np.float32]] = {}
    width = None
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as f:
            for number, line in enumerate(f, 1):
                line = line.rstrip("\n")
                columns = line.count(" ")
                width = columns if width is None else width
                word, _, numbers = line.partition(" ")
                if columns > width and not any(map(_is_number, line.split(" ")[1:-width])):
                    word, *fields = line.rsplit(" ", width)
                    columns, numbers = width, " ".join(fields)
                if columns != width or width == 0:
                    raise ValueError(
                        f"{path}: line {number}: a word with {columns} numbers"
                        + (f", but {width} on the lines before" if columns != width else f"; is it GloVe? get it from {SOURCE}")
                    )
                if word in wanted:
                    found[word] = _vector(numbers.split(" "), f"{path}: line {number}")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not text in UTF-8: {e}") from e
    if width is None:
        raise ValueError(f"{path}: an empty file; get it from {SOURCE}")
    return found


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _vector(numbers: Iterable[str], where: str) -> NDArray[np.float32]:
    try:
        vector = np.array([float(number) for number in numbers], np.float64)
    except ValueError as e:
        raise ValueError(f"{where}: expected a word and numbers ({e})") from e
    if not np.isfinite(vector).all() or np.abs(vector).max() > 1e6:
        raise ValueError(f"{where}: its numbers are not finite, or too large for a word's vector")
    return vector.astype(np.float32)
