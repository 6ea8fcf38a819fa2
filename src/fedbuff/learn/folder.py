"""Where a dataset's files are: in the folder `data`, or else in the one that $FEDBUFF_DATA names."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path


def data_folder(data: str | None, wanted: str, source: str) -> Path:
    """The folder to look in; `wanted` and `source` are for whoever has none yet."""
    if data is None and not os.environ.get("FEDBUFF_DATA"):
        raise ValueError(f"data: no folder is given; put {wanted} ({source}) into one, and name it by --data or FEDBUFF_DATA")
    folder = Path(data if data is not None else os.environ["FEDBUFF_DATA"])
    if not folder.is_dir():
        by = "data" if data is not None else "FEDBUFF_DATA"
        raise ValueError(f"{by}={str(folder)!r}: no such folder; it should hold {wanted} ({source})")
    return folder


def locate(folder: Path, subfolders: Sequence[str], name: str, source: str) -> Path:
    """The file `name` in `folder` itself or in one of its subfolders."""
    places = [folder, *(folder / sub for sub in subfolders)]
    found = next((place / name for place in places if (place / name).is_file()), None)
    if found is None:
        if folders := [place / name for place in places if (place / name).is_dir()]:
            raise ValueError(f"{folders[0]}: a folder, where a file should be; get it from {source}")
        raise missing(places, name, source)
    return found


def missing(places: Iterable[Path], name: str, source: str) -> ValueError:
    """The error that says what is missing, where to get it, and what was found instead."""
    found = "; ".join(f"{place} holds {listing(place)}" for place in places if place.is_dir())
    return ValueError(f"{name} is missing; get it from {source}. {found}")


def listing(folder: Path) -> str:
    """The first few names in a folder, for error messages."""
    if not folder.is_dir():
        return "no such folder"
    names = sorted(p.name for p in folder.iterdir())
    return "nothing" if not names else ", ".join(names[:5]) + (" …" if len(names) > 5 else "")


def one_line(what: object) -> str:
    """Something that a damaged file holds, or an error about it, short enough for a message."""
    return " ".join(str(what).split())[:120] or type(what).__name__
