"""Which data a folder's results are of: written down once, and compared whenever the work goes on."""

import json
from pathlib import Path

from fedbuff.report.files import FolderError, write_json

DATA = "data.json"


def see_data(folder: Path, digest: str, what: str) -> None:
    """Write the digest down, or see that it is the same; `what` the folder holds, a run or a study."""
    kept = folder / DATA
    if not kept.exists():
        write_json(kept, {"digest": digest})
        return
    try:
        there = json.loads(kept.read_text(encoding="utf-8"))["digest"]
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise FolderError(f"{kept} is damaged ({e!r}): remove it if the data is what it was") from e
    if there != digest:
        raise FolderError(
            f"{folder} holds a {what} on other data, whose clients have other examples or labels (digest {there}, at hand "
            f"{digest}): choose another --out"
        )
