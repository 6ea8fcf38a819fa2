"""A study's folder: its settings, its database and what its data was, which must all be what they were to go on."""

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedbuff import settings, toml
from fedbuff.learn.data import data_of
from fedbuff.report.files import lock, write_text
from fedbuff.report.same_data import see_data
from fedbuff.toml import SettingsError, Table


@contextlib.contextmanager
def opened(out: Path, tables: Table, searched: Mapping[str, Any], make: Callable[[Path], Any]) -> Iterator[Path]:
    """The study's database, which nobody else is using, and which is whole and of the same settings, ranges and data.

    `make` puts a new study into a file.
    """
    out.mkdir(parents=True, exist_ok=True)
    text = toml.dumps({**tables, "tune": dict(searched)})
    with lock(out):
        kept = out / "settings.toml"
        begun = kept.exists()
        try:
            same = not begun or kept.read_text(encoding="utf-8") == text
        except (OSError, UnicodeDecodeError) as e:
            raise SettingsError(f"{kept}: not a study's settings ({e}); remove the study, or choose another --out") from e
        if not same:
            raise SettingsError(f"{out} holds a study of other settings or ranges; choose another --out, or remove it")
        database = (out / "study.db").resolve()
        if database.exists():
            check_whole(database)
        elif (out / "study.json").exists():
            raise SettingsError(f"{database} is gone, and its results are not; restore it, or choose another --out")
        else:  # whole or absent: half a database can't be gone on with
            fresh = database.with_name("study.new")
            for part in database.parent.glob("study.new*"):
                part.unlink()
            make(fresh)
            fresh.replace(database)
        see_data(out, data_of(settings.from_tables(tables).load_task()).digests(), "study")
        write_text(kept, text)
        yield database


def check_whole(database: Path) -> None:
    """Refuse a damaged database: Optuna may notice after hours."""
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=60)) as db:
            (found,) = db.execute("pragma integrity_check(1)").fetchone()
            db.execute("select 1 from trials, studies limit 1")  # SQLite calls an empty file whole
    except sqlite3.Error as e:
        found = str(e)
    if found != "ok":
        why = found.splitlines()[-1]  # the first only names the database
        raise SettingsError(f"{database}: not a whole database ({why}); remove the study, or choose another --out")
