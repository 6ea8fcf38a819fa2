"""Logs of a deployment: readable lines on stderr, and one JSON object per line in log.jsonl of the run folder.

    log = logging.getLogger("fedbuff.deploy")
    log.warning("refused", {"client": 7, "reason": "wrong size"})        # an event, and its fields as one dict

    12:30:01 warning: refused client=7 reason="wrong size"
    {"time": "2026-10-17T12:30:01.042+00:00", "level": "warning", "event": "refused", "fields": {"client": 7, …}}

Names and details come from the network: nothing in them can break a line or steer a terminal.
"""

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path
from typing import Any

FILE = "log.jsonl"
_LARGEST = 10_000_000  # bytes of a file; then it becomes log.jsonl.1, and so on
_OLDER = 5  # files that are kept
_EARLY = 100_000  # records to hold back until there is a folder


@contextlib.contextmanager
def logged() -> Iterator[Callable[[Path], None]]:
    """Have what the deployment says on stderr, and in a run folder from the moment on that one is given.

    What was said before is in the folder's file too. It comes later because a folder that another server uses is not ours.
    """
    log = logging.getLogger("fedbuff.deploy")
    lines, early = logging.StreamHandler(), MemoryHandler(_EARLY, flushLevel=logging.CRITICAL + 1)
    lines.setFormatter(Lines())
    level, propagate = log.level, log.propagate
    log.setLevel(level or logging.INFO)
    log.propagate = False  # or a handler of the root logger would say everything twice
    for handler in (lines, early):
        log.addHandler(handler)

    def keep(folder: Path) -> None:
        file = RotatingFileHandler(folder / FILE, maxBytes=_LARGEST, backupCount=_OLDER, encoding="utf-8")
        file.setFormatter(Objects())
        early.setTarget(file)
        early.flush()
        early.capacity = 1

    try:
        yield keep
    finally:
        log.propagate = propagate
        log.setLevel(level)
        for handler in (lines, early):
            log.removeHandler(handler)
        file = early.target
        early.close()
        if file is not None:
            file.close()


def printable(text: str) -> str:
    r"""A text on one line, without anything that steers a terminal.

    >>> printable("north\n\x1b[2J")
    'north\\x0a\\x1b[2J'
    """
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of an event, and the traceback if there is one."""
    fields = dict(record.args) if isinstance(record.args, Mapping) else {}
    if record.exc_info:
        fields["traceback"] = logging.Formatter().formatException(record.exc_info)
    return fields


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value, default=str, ensure_ascii=False) if not isinstance(value, str) or " " in value else value


def _without_nan(value: Any) -> Any:
    """JSON has no word for a number that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _without_nan(inner) for key, inner in value.items()}
    return [_without_nan(inner) for inner in value] if isinstance(value, list | tuple) else value


class Objects(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "fields": fields_of(record),
        }
        try:
            return json.dumps(said, allow_nan=False, default=str)
        except ValueError:
            return json.dumps(_without_nan(said), allow_nan=False, default=str)


class Lines(logging.Formatter):
    """A record as a line for people; a traceback follows as it is."""

    def format(self, record: logging.LogRecord) -> str:
        fields = fields_of(record)
        traceback = fields.pop("traceback", "")
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        at = datetime.fromtimestamp(record.created).astimezone()
        said = [f"{at:%H:%M:%S} {level}{record.getMessage()}", *(f"{name}={_short(value)}" for name, value in fields.items())]
        return printable(" ".join(said)) + (f"\n{traceback}" if traceback else "")
