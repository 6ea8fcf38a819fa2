"""Sentiment140: a CSV file in Latin-1, six quoted columns without a header, of which polarity, account and text are used."""

import codecs
import csv
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

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
    t = _taken_in(path, tokens)
    vectors = read_vectors(glove, t.words)
    by_count = np.argsort(-np.asarray(t.counts), kind="stable")  # of equally many, the one that was met first
    names = list(t.words)
    known = [names[i] for i in by_count if names[i] in vectors][:vocabulary]
    if not known:
        raise ValueError(f"{glove}: knows none of the tweets' words")
    table = np.array([vectors[word] for word in known])
    rows = new("vectors", (2 + len(known), table.shape[1]), np.float32)
    rows[_OTHER], rows[_OTHER + 1 :] = table.mean(0), table  # the row before, padding, stays zero
    number = np.full(len(names), _OTHER, np.int32)
    number[[t.words[word] for word in known]] = range(_OTHER + 1, _OTHER + 1 + len(known))
    place = np.empty(len(t.accounts), np.int64)  # of each account, in the order of their names
    place[[t.accounts[account] for account in sorted(t.accounts)]] = range(len(place))
    owners = place[np.asarray(t.owners)]
    order = np.argsort(owners, kind="stable")  # an account's tweets lie side by side
    x = new("x", (len(order), tokens), np.int32)
    texts, ends = np.asarray(t.texts), np.cumsum(t.lengths)
    for row, i in enumerate(order):
        length = t.lengths[i]
        x[row, tokens - length :] = number[texts[ends[i] - length : ends[i]]]
    new("y", (len(order),), np.int64)[:] = np.asarray(t.labels)[order]
    new("owners", (len(order),), np.int64)[:] = owners[order]


class _Tweets(NamedTuple):
    """All tweets as numbers, which take a small part of the room of their words."""

    words: dict[str, int]  # numbered as they are met, and so are accounts
    accounts: dict[str, int]
    counts: "array[int]"  # of each word
    texts: "array[int]"  # the words of all tweets, one after another
    lengths: "array[int]"
    owners: "array[int]"
    labels: "array[int]"


def _taken_in(path: Path, tokens: int) -> _Tweets:
    t = _Tweets({}, {}, *(array(kind) for kind in "qiiii"))
    for account, label, text in read_tweets(path):
        numbers = [t.words.setdefault(word, len(t.words)) for word in words(text)]
        t.counts.extend([0] * (len(t.words) - len(t.counts)))
        for number in numbers:
            t.counts[number] += 1
        t.texts.extend(numbers[:tokens])
        t.lengths.append(min(len(numbers), tokens))
        t.owners.append(t.accounts.setdefault(account, len(t.accounts)))
        t.labels.append(label)
    return t


def read_tweets(path: Path) -> Iterator[tuple[str, int, str]]:
    """Account, sentiment (1 if positive) and text of each tweet."""
    _whole(path)
    over = False
    with path.open(encoding=_encoding(path), newline="") as f:

        def lines() -> Iterator[str]:
            nonlocal over
            for line in f:
                if "\0" in line:  # Python's reader takes it, and two half rows for one
                    raise csv.Error("it holds a zero byte")
                yield line
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
