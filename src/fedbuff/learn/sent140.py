"""Sentiment140: a CSV file in Latin-1, six quoted columns without a header, of which polarity, account and text are used."""

import codecs
import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedbuff.learn.cache import New
from fedbuff.learn.glove import read_vectors

VERSION = 2  # of what `prepare` makes
SOURCE = "http://help.sentiment140.com/for-students"
FILE = "training.1600000.processed.noemoticon.csv"
TWEETS = 1_600_000  # in the whole set

_OTHER = 1  # the number of every word without one of its own; 0 is padding

# words and LEAF's punctuation; "don't" and "i'm" as GloVe has them: do n't, i 'm
_TOKEN = re.compile(r"n't\b|'\w+|\w+?(?=n't\b)|\w+|[.,!?;]")


def prepare(sources: Sequence[Path], vocabulary: int, tokens: int, new: New) -> None:
    """X (words by number, padding first), y (1 if positive), owners (accounts by number), and the words' vectors."""
    path, glove = sources
    count: Counter[str] = Counter()
    accounts, labels, texts = [], [], []
    for account, label, text in read_tweets(path):
        found = words(text)
        count.update(found)
        accounts.append(account)
        labels.append(label)
        texts.append(found[:tokens])
    vectors = read_vectors(glove, count)
    known = [word for word, _ in count.most_common() if word in vectors][:vocabulary]
    if not known:
        raise ValueError(f"{glove}: knows none of the tweets' words")
    table = np.array([vectors[word] for word in known])
    rows = new("vectors", (2 + len(known), table.shape[1]), np.float32)
    rows[_OTHER], rows[_OTHER + 1 :] = table.mean(0), table  # the row before, padding, stays zero
    number = {word: _OTHER + 1 + i for i, word in enumerate(known)}
    _, owners = np.unique(accounts, return_inverse=True)
    order = np.argsort(owners, kind="stable")  # an account's tweets lie side by side
    x = new("x", (len(texts), tokens), np.int32)
    for row, i in enumerate(order):
        if texts[i]:
            x[row, -len(texts[i]) :] = [number.get(word, _OTHER) for word in texts[i]]
    new("y", (len(texts),), np.int64)[:] = np.array(labels)[order]
    new("owners", (len(texts),), np.int64)[:] = owners[order]


def read_tweets(path: Path) -> Iterator[tuple[str, int, str]]:
    """Account, sentiment (1 if positive) and text of each tweet."""
    _whole(path)
    over = False
    with path.open(encoding=_encoding(path), newline="") as f:

        def lines() -> Iterator[str]:
            nonlocal over
            yield from f
            over = True
            yield "\n"  # a row of its own, but where a quote is open

        reader = csv.reader(lines())
        try:
            began = 1
            for row in reader:
                line = reader.line_num
                if row and over:
                    raise ValueError(f"{path}: line {began}: a quote that is not closed; get it again from {SOURCE}")
                if not row and not any(reader):  # blank lines at the end
                    if began == 1:
                        raise ValueError(f"{path}: holds no tweet; get it from {SOURCE}")
                    return
                if len(row) != 6 or row[0] not in ("0", "4"):
                    found = f"{len(row)} columns" if len(row) != 6 else f"polarity {row[0][:20]!r}"
                    where = f"{path}: line {line}"
                    raise ValueError(f"{where}: expected six columns, the first 0 or 4, found {found}; get it from {SOURCE}")
                yield row[4], int(row[0] == "4"), row[5]
                began = line + 1
        except (csv.Error, UnicodeDecodeError) as e:
            raise ValueError(f"{path}: line {reader.line_num}: not CSV ({e}); get it from {SOURCE}") from e


def words(text: str) -> list[str]:
    """The words of a tweet in lower case.

    >>> words("Can't wait, I'm SO happy!")
    ['ca', "n't", 'wait', ',', 'i', "'m", 'so', 'happy', '!']
    """
    return _TOKEN.findall(text.lower())


def _encoding(path: Path) -> str:
    """Latin-1 as it is published; who saved it again with a byte order mark made it UTF-8."""
    with path.open("rb") as f:
        return "utf-8-sig" if f.read(3) == codecs.BOM_UTF8 else "latin-1"


def _whole(path: Path) -> None:
    with path.open("rb") as f:
        size = f.seek(0, 2)
        if size == 0:
            raise ValueError(f"{path}: an empty file; get it from {SOURCE}")
        f.seek(size - 1)
        if f.read(1) != b"\n":
            raise ValueError(f"{path}: ends in the middle of a line, after {size:,} bytes; get it again from {SOURCE}")
