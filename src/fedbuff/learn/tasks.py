"""Tasks ready to use. Each function returns a `Task`; in a settings file it is a table, `[task.digits]`."""

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np

from fedbuff import toml
from fedbuff.core import check
from fedbuff.core.random import generator
from fedbuff.learn.leaf import read_split
from fedbuff.learn.models import Model, linear, mlp
from fedbuff.learn.partition import dirichlet, iid, shards, split_examples
from fedbuff.learn.synthetic import SyntheticClients
from fedbuff.learn.task import Task

Split = iid | dirichlet | shards
P = ParamSpec("P")


def recorded(make: Callable[P, Task]) -> Callable[P, Task]:
    """Let a task remember the call that made it, so that a run folder can hold it."""

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Task:
        arguments = inspect.signature(make).bind(*args, **kwargs).arguments
        return replace(make(*args, **kwargs), settings=toml.table_of(make, arguments))

    return made


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
) -> Task:
    """The synthetic task of LEAF, for any α, β and number of clients, generated when asked for.

    Evaluated on 50 fresh examples of each of (at most) 200 clients.
    """
    check.number(0, alpha=alpha, beta=beta)
    check.integer(1, clients=clients, features=features, max_examples=max_examples)
    check.integer(2, classes=classes)
    population = SyntheticClients(alpha, beta, clients, features, classes, max_examples, split_seed)
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
def leaf(folder: str, model: Model = linear()) -> Task:
    """Any folder of LEAF JSON with numeric inputs: a client per user of `train`, evaluated on all of `test`."""
    train, test = (read_split(Path(folder) / split) for split in ("train", "test"))
    x, y = (np.concatenate([examples[i] for examples in test.values()]) for i in (0, 1))
    features = int(np.prod(x.shape[1:]))
    classes = 1 + max(int(labels.max()) for labels in [y, *(labels for _, labels in train.values())])
    return Task(
        model=partial(_flattened, model, features, classes),
        loss=cross_entropy,
        clients=list(train.values()),
        evaluate=(x, y),
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
    spec.loader.exec_module(module)
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


def _flattened(model: Model, features: int, classes: int) -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Flatten(), model(features, classes))
