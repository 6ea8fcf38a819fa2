"""LEAF's JSON folders: `train/*.json` and `test/*.json`, each with "users" and "user_data": {user: {"x": …, "y": …}}."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.learn.folder import listing

Examples = tuple[NDArray[Any], NDArray[Any]]


def read_split(folder: Path) -> dict[str, Examples]:
    """The examples of every user in the folder's JSON files, in order of the files' names."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"{folder}: expected LEAF's JSON files, found {listing(folder)}")
    users: dict[str, Examples] = {}
    for file in files:
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            for user in data["users"]:
                x, y = np.asarray(data["user_data"][user]["x"]), np.asarray(data["user_data"][user]["y"])
                users[user] = (x.astype(np.float32), y.astype(np.int64))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
            raise ValueError(f"{file}: not readable as JSON: {e}") from e
        except (KeyError, TypeError) as e:
            raise ValueError(f"{file}: not a LEAF file: expected users and user_data with x and y ({e!r} is missing)") from e
        except ValueError as e:
            raise ValueError(f"{file}: x and y must be numbers, the same shape for every example ({e})") from e
    for user, (x, y) in users.items():
        if len(x) != len(y):
            raise ValueError(f"{folder}: user {user!r} has {len(x)} inputs and {len(y)} labels")
    return {user: examples for user, examples in users.items() if len(examples[1])}
