"""Which data a folder's results are of: written down once, and compared whenever the work goes on."""

import json
from collections.abc import Mapping
from pathlib import Path

from fedbuff.report.files import FolderError, write_json

DATA = "data.json"


_OF = {"digest": "whose clients have other examples or labels", "held_out": "with other held-out examples or labels"}


def see_data(folder: Path, digests: Mapping[str, str], what: str) -> None:
    """Write the digests down, or see that they are the same; `what` the folder holds, a run or a study."""
    kept = folder / DATA
    if not kept.exists():
        write_json(kept, dict(digests))
        return
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
        there = {name: found[name] for name in digests}
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise FolderError(f"{kept} is damaged ({e!r}): remove it if the data is what it was") from e
    for name, digest in digests.items():
        if there[name] != digest:
            raise FolderError(
                f"{folder} holds a {what} on other data, {_OF[name]} (digest {there[name]}, at hand {digest}): "
                "choose another --out"
            )
