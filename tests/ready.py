"""A process that has imported what commands need, and forks one whenever it is asked: most take less time than to import torch.

A line of JSON on stdin says which, where and with what; the answer on stdout is its exit code. What it runs in is a process
of its own, which ends as any other does.
"""

import gc
import json
import os
import signal
import sys

import pyarrow.parquet  # noqa: F401
import torch  # noqa: F401

from fedbuff.cli import main


def become(asked: dict) -> None:
    """Make this process the one that was asked for, for five minutes at most."""
    signal.alarm(300)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    files = [os.open(os.devnull, os.O_RDONLY), *(os.open(asked[name], os.O_WRONLY) for name in ("out", "err"))]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["fedbuff", *asked["arguments"]]


if __name__ == "__main__":
    gc.freeze()
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            become(json.loads(line))
            sys.exit(main())
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
