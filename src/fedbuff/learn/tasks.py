"""Tasks ready to use. Each function returns a `Task`; in a settings file it is a table, `[task.digits]`."""

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec

import numpy as np
from numpy.typing import NDArray

from fedbuff import toml
from fedbuff.core import check
from fedbuff.core.random import generator
from fedbuff.learn import celeba as faces
from fedbuff.learn import cifar
from fedbuff.learn import glove as word_vectors
from fedbuff.learn import hugging_face as partitions
from fedbuff.learn import leaf as users
from fedbuff.learn import sent140 as tweets
from fedbuff.learn.cache import prepared
from fedbuff.learn.folder import data_folder, locate
from fedbuff.learn.models import ImageModel, Model, TextModel, cnn, image_model, linear, lstm, mlp, text_model
from fedbuff.learn.partition import dirichlet, iid, shards, some_of_each, split_examples
from fedbuff.learn.parts import check_inputs, count_classes
from fedbuff.learn.rows import Chosen, RowClients, Scaled
from fedbuff.learn.synthetic import SyntheticClients
from fedbuff.learn.task import Task

Split = iid | dirichlet | shards
P = ParamSpec("P")
_CHOICES = {  # how many arguments each takes, and what it is
    "split": (3, "how examples are shared out, e.g. fedbuff.dirichlet(0.1)"),
    "model": (2, "what is trained, e.g. fedbuff.models.mlp((64,))"),
}


def recorded(make: Callable[P, Task]) -> Callable[P, Task]:
    """Let a task remember the call that made it, so that a run folder can hold it."""

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Task:
        arguments = inspect.signature(make).bind(*args, **kwargs).arguments
        _check_choices(arguments)
        return replace(make(*args, **kwargs), settings=toml.table_of(make, arguments))

    return made


def _check_choices(arguments: Mapping[str, Any]) -> None:
    """A name is for a settings file; in Python a choice is an object, or a function of your own."""
    for name, (count, expected) in _CHOICES.items():
        if name in arguments:
            check.function(count, expected, **{name: arguments[name]})


@recorded
def digits(
    clients: int = 400, split: Split = dirichlet(0.1), model: Model = mlp((32,)), test: float = 0.2, split_seed: int = 0
) -> Task:
    """scikit-learn's 1,797 handwritten digits of 8 × 8 pixels: real data that needs no download."""
    check.integer(1, clients=clients)
    check.number(0, 1, above=True, test=test)
    try:
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise ValueError("the digits come with scikit-learn: pip install 'fedbuff[demo]'") from e
    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32), y.astype(np.int64)
    rng = generator(split_seed, "digits")
    order = rng.permutation(len(y))
    held_out, kept = order[: math.ceil(test * len(y))], order[math.ceil(test * len(y)) :]
    parts = split(y[kept], clients, rng)
    return Task(
        model=partial(model, x.shape[1], 10),
        loss=cross_entropy,
        clients=split_examples(x[kept], y[kept], parts),
        evaluate=(x[held_out], y[held_out]),
        name="digits",
    )


@recorded
def synthetic(
    alpha: float = 1.0,
    beta: float = 1.0,
    clients: int = 1000,
    features: int = 60,
    classes: int = 10,
    max_examples: int = 500,
    model: Model = linear(),
    split_seed: int = 0,
    iid: bool = False,
) -> Task:
    """The synthetic task of LEAF, for any α, β and number of clients, generated when asked for; `iid`: all clients are alike.

    Evaluated on 50 fresh examples of each of (at most) 200 clients.
    """
    check.number(0, alpha=alpha, beta=beta)
    check.integer(1, clients=clients, features=features, max_examples=max_examples)
    check.integer(2, classes=classes)
    population = SyntheticClients(alpha, beta, clients, features, classes, max_examples, split_seed, iid)
    chosen = np.unique(np.linspace(0, clients - 1, min(clients, 200)).astype(int))
    drawn = [population.draw(int(client), 50, "test") for client in chosen]
    return Task(
        model=partial(model, features, classes),
        loss=cross_entropy,
        clients=population,
        evaluate=(np.concatenate([x for x, _ in drawn]), np.concatenate([y for _, y in drawn])),
        name="synthetic",
    )


@recorded
def cifar10(
    data: str | None = None,
    clients: int = 5_000,
    split: Split = dirichlet(0.1),
    model: ImageModel = cnn(),
    split_seed: int = 0,
) -> Task:
    """CIFAR-10: 50,000 images of ten classes shared out over clients, evaluated on the 10,000 test images.

    data   the folder with cifar-10-python.tar.gz or cifar-10-batches-py; by default $FEDBUFF_DATA
    """
    check.integer(1, clients=clients)
    sources = cifar.find(data_folder(data, cifar.ARCHIVE, cifar.SOURCE))
    arrays = prepared("cifar10", sources, [cifar.VERSION], partial(cifar.prepare, sources))
    y, test_y = arrays["train_y"], arrays["test_y"]
    x, test_x = (Scaled(arrays[name], cifar.MEAN, cifar.STD) for name in ("train_x", "test_x"))
    parts = split(y, clients, generator(split_seed, "cifar10"))
    whole = (len(y), len(test_y)) == (50_000, 10_000)
    return Task(
        model=partial(image_model, model, cifar.SHAPE, cifar.CLASSES),
        loss=cross_entropy,
        clients=RowClients(x, y, np.concatenate(parts), [len(part) for part in parts]),
        evaluate=(test_x, test_y),
        name="cifar10" if whole else f"cifar10 (subset: {len(y):,} + {len(test_y):,} images)",
    )


@recorded
def celeba(
    data: str | None = None,
    min_images: int = 5,
    model: ImageModel = cnn(),
    hold_out: Literal["images", "clients"] = "images",
    split_seed: int = 0,
) -> Task:
    """CelebA as in LEAF: is the celebrity smiling? A client per celebrity, images of 32 × 32, a tenth held out.

    data         the folder with img_align_celeba.zip, identity_CelebA.txt and list_attr_celeba.txt, or of their folder
                 celeba; by default $FEDBUFF_DATA. Whatever images the archive holds are used
    min_images   celebrities with fewer are left out
    hold_out     "images": a tenth of every client's, at least one, as LEAF does by sample; "clients": a tenth of them
    """
    check.integer(1, min_images=min_images)
    check.one_of(("images", "clients"), hold_out=hold_out)
    names = faces.ARCHIVE, faces.IDENTITIES, faces.ATTRIBUTES
    folder = data_folder(data, ", ".join(names), faces.SOURCE)
    sources = [locate(folder, ("celeba",), name, faces.SOURCE) for name in names]
    arrays = prepared("celeba", sources, [faces.VERSION], partial(faces.prepare, sources))
    owners, y, x = arrays["owners"], arrays["y"], Scaled(arrays["x"], faces.MEAN, faces.STD)
    _, celebrity, images = np.unique(owners, return_inverse=True, return_counts=True)
    used = np.flatnonzero(images[celebrity] >= min_images)
    if len(used) == 0:
        raise ValueError(f"min_images={min_images}: {sources[0]} holds at most {images.max()} of a celebrity")
    rng = generator(split_seed, "celeba")
    if hold_out == "images":
        out = some_of_each(owners[used], 0.9, rng)
    else:
        out = np.isin(owners[used], _shares(np.unique(owners[used]), (0.9, 0.1), rng)[1])
    train, test = used[~out], used[out]
    if len(test) == 0 or len(train) == 0:
        raise ValueError(f"{sources[0]}: {len(used)} images are too few to train on some and hold out others")
    return Task(
        model=partial(image_model, model, (3, faces.SIDE, faces.SIDE), 2),
        loss=cross_entropy,
        clients=RowClients(x, y, train, np.unique(owners[train], return_counts=True)[1]),
        evaluate=(Chosen(x, test), y[test]),
        name=_celeba_name(len(owners), images[images >= min_images]),
    )


def _celeba_name(found: int, images: NDArray[np.int64]) -> str:
    if found == faces.IMAGES:
        return "celeba"
    if images.min() == images.max():
        return f"celeba ({images.min()} images per client)"
    return f"celeba (subset: {images.sum():,} images of {len(images):,} clients)"


@recorded
def sent140(
    data: str | None = None,
    model: TextModel = lstm(),
    glove: str | None = None,
    vocabulary: int = 10_000,
    tokens: int = 25,
    min_tweets: int = 1,
    share: float = 1.0,
    split_seed: int = 0,
) -> Task:
    """Sentiment140: is a tweet positive? A client per account; 80 % of them train, 10 % validate, 10 % test.

    data         the folder with training.1600000.processed.noemoticon.csv and GloVe's text file, or of their folders
                 sent140 and glove; by default $FEDBUFF_DATA
    glove        the name of GloVe's file; by default the only glove*.txt there is, or the paper's, glove.6B.300d.txt
    vocabulary   so many of the tweets' words that GloVe knows, the commonest
    tokens       tweets are cut after this many words
    min_tweets   accounts with fewer are left out
    share        accounts are drawn at random until they have this share of the tweets, as LEAF does
    """
    check.integer(1, vocabulary=vocabulary, tokens=tokens, min_tweets=min_tweets)
    check.number(0, 1, above=True, share=share)
    folder = data_folder(data, f"{tweets.FILE} and a glove*.txt", f"{tweets.SOURCE} and {word_vectors.SOURCE}")
    sources = [locate(folder, ("sent140",), tweets.FILE, tweets.SOURCE), word_vectors.find(folder, glove)]
    facts = [tweets.VERSION, vocabulary, tokens]
    arrays = prepared("sent140", sources, facts, partial(tweets.prepare, sources, vocabulary, tokens))
    x, y, owners, vectors = (arrays[name] for name in ("x", "y", "owners", "vectors"))
    rng = generator(split_seed, "sent140")
    counts = np.bincount(owners)
    drawn = rng.permutation(len(counts))
    drawn = drawn[: 1 + np.searchsorted(np.cumsum(counts[drawn]), share * len(y))]
    drawn = np.sort(drawn[counts[drawn] >= min_tweets])
    if len(drawn) < 3:
        raise ValueError(f"min_tweets={min_tweets}, share={share:g}: {len(drawn)} accounts are left, too few for three parts")
    train, validation, test = (np.flatnonzero(np.isin(owners, part)) for part in _shares(drawn, (0.8, 0.1, 0.1), rng))
    return Task(
        model=partial(text_model, model, vectors, 2),
        loss=cross_entropy,
        clients=RowClients(x, y, train, np.unique(owners[train], return_counts=True)[1]),
        evaluate={"validation": (x[validation], y[validation]), "test": (x[test], y[test])},
        name="sent140" if (used := int(counts[drawn].sum())) == tweets.TWEETS else f"sent140 (subset: {used:,} tweets)",
    )


def _shares(owners: NDArray[np.int64], shares: tuple[float, ...], rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """The owners at random in groups of these shares, at least one in each if there are enough."""
    cuts = np.round(np.cumsum(shares[:-1]) * len(owners)).astype(int)
    for i in range(len(cuts) - 1, -1, -1):  # the last groups are the small ones
        cuts[i] = min(cuts[i], (cuts[i + 1] if i + 1 < len(cuts) else len(owners)) - 1)
    return np.split(rng.permutation(owners), np.maximum(cuts, 0))


def hugging_face(
    train: Any,
    test: Any,
    by: str | None = None,
    clients: int = 100,
    split: Split = dirichlet(0.1),
    inputs: str | None = None,
    label: str = "label",
    model: ImageModel = linear(),
    split_seed: int = 0,
) -> Task:
    """Hugging Face `datasets`, or partitions of flwr-datasets: images, or inputs that are numbers.

    train    a `datasets.Dataset`, split by the column `by` (a client for each value) or by `split` over `clients`;
             or a list of them, one for each client, as `FederatedDataset.load_partition` gives
    test     a `datasets.Dataset` to evaluate on
    inputs   the column of inputs, by default the only one beside `label` and `by`

    Either may be the name of a folder that `Dataset.save_to_disk` wrote.
    """
    arguments = dict(locals())
    _check_choices(arguments)
    settings = toml.table_of(hugging_face, arguments) if isinstance(train, str) and isinstance(test, str) else None
    train, test = (
        partitions.from_disk(part, name) if isinstance(part, str) else part for name, part in (("train", train), ("test", test))
    )
    parts = [*partitions.in_parts(train), ("test", test)]
    for where, part in parts:
        partitions.check_dataset(part, where)
    _, first = parts[0]
    if by is not None and first is not train:
        raise ValueError(f"by={by!r}: train is a list of partitions, one for each client already; leave one of them out")
    if by is not None:
        partitions.check_column(first, by)
    partitions.check_names(parts, label)
    inputs = inputs or partitions.input_column(first.column_names, label, by)
    found = [(where, *partitions.columns(part, inputs, label, where)) for where, part in parts]
    check_inputs(found)
    classes = count_classes(found)
    *held, (x, y) = [(x, y) for _, x, y in found]
    if first is train and by is not None:
        held = split_examples(*held[0], partitions.by_column(train, by))
    elif first is train:
        check.integer(1, clients=clients)
        held = split_examples(*held[0], split(held[0][1], clients, generator(split_seed, "hugging face")))
    name = str(getattr(getattr(first, "info", None), "dataset_name", None) or "hugging_face")
    return Task(
        model=partial(image_model, model, x.shape[1:], classes),
        loss=cross_entropy,
        clients=held,
        evaluate=(x, y),
        name=name,
        settings=settings,
    )


@recorded
def leaf(folder: str, model: Model = linear()) -> Task:
    """Any folder of LEAF JSON with numeric inputs: a client per user of `train`, evaluated on all of `test`."""
    train, test = users.files_of(Path(folder))
    arrays = prepared("leaf", [*train, *test], [users.VERSION, len(train)], partial(users.prepare, train, test))
    x, y, sizes = (arrays[name] for name in ("train_x", "train_y", "train_sizes"))
    return Task(
        model=partial(image_model, model, x.shape[1:], int(arrays["classes"][0])),
        loss=cross_entropy,
        clients=RowClients(x, y, np.arange(len(y)), sizes),
        evaluate=(arrays["test_x"], arrays["test_y"]),
        name=Path(folder).name,
    )


@recorded
def python(file: str, function: str = "task", arguments: dict[str, Any] | None = None) -> Task:
    """Your own: the `Task` that `function` in the Python file `file` returns when called with `arguments`."""
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"file={file!r}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that its classes can be found again by name
    sys.path.insert(0, str(path.parent.resolve()))  # and that it can import its neighbours
    try:
        spec.loader.exec_module(module)
    except SyntaxError as e:
        raise ValueError(f"file={file!r}: line {e.lineno}: {e.msg}") from e
    except ImportError as e:
        raise ValueError(f"file={file!r}: {e}") from e
    if not hasattr(module, function):
        raise ValueError(f"function={function!r}: {file} has no function of that name")
    try:
        inspect.signature(getattr(module, function)).bind(**(arguments or {}))
    except TypeError as e:
        raise ValueError(f"arguments={arguments!r}: {function} in {file} can't be called with them: {e}") from e
    made = getattr(module, function)(**(arguments or {}))
    if not isinstance(made, Task):
        raise ValueError(f"function={function!r}: expected a fedbuff.Task, got {type(made).__name__}")
    return made


def cross_entropy(output: Any, label: Any) -> Any:
    """Torch's cross entropy, for a task that is made before torch is imported."""
    import torch

    return torch.nn.functional.cross_entropy(output, label)
