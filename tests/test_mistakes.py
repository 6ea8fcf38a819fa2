"""A natural mistake in the Python API is one line that names the argument, says what was expected, and what was given."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import fedbuff as fb
from fedbuff.core import check
from fedbuff.learn.first_look import first_look
from fedbuff.learn.local import initial_weights
from fedbuff.sim.fastplan import fastest
from fedbuff.sim.timing import Sizes

F = torch.nn.functional
X, Y = np.zeros((10, 8), np.float32), np.arange(10) % 3


def fitting(**changes: Any) -> fb.Task:
    """Eight numbers in, three classes out."""
    parts = {"model": lambda: torch.nn.Linear(8, 3), "loss": F.cross_entropy, "clients": [(X, Y)] * 5, "evaluate": (X, Y)}
    return fb.Task(**{**parts, **changes})


@contextlib.contextmanager
def refused(complaint: str) -> Iterator[None]:
    """A ValueError of one line that is not endless."""
    with pytest.raises(ValueError, match=complaint) as said:
        yield
    assert "\n" not in str(said.value)
    assert len(str(said.value)) < 400


# ── how many examples a client holds ─────────────────────────────────────────────────────────────────────────────────


def timeline(**changes: Any) -> fb.Timeline:
    how = {"start": fb.refill(5), "buffer_size": 1, "clients": 30, "trips": 100, "timing": fb.half_normal(1.0)}
    return fb.timeline(**{**how, **changes})


LISTS = [
    ([1, 2], r"examples: a list of 2 for 30 clients"),
    (np.arange(1, 99), r"examples: a list of 98 for 30 clients"),
    ([], r"examples: a list of 0 for 30 clients"),
    ([3] * 29 + [-1], r"examples\[29\]=-1: expected an integer >= 1"),
    ([0] * 30, r"examples\[0\]=0: expected an integer >= 1"),
    ([1.7] * 30, r"examples\[0\]=1\.7: expected an integer >= 1"),
    (np.ones(30), r"examples\[0\]=1\.0: expected an integer >= 1"),
    ([True] * 30, r"examples\[0\]=True: expected an integer >= 1"),
    ([2**53 + 1] * 30, r"examples\[0\]=9007199254740993: expected an integer >= 1, and not absurdly large"),
    ([2**80] * 30, r"examples\[0\]=1208925819614629174706176: expected"),
    (["a"] * 30, r"examples\[0\]='a': expected"),
    (np.ones((30, 2), int), r"examples\[0\]=\[1, 1\]: expected"),
    (dict.fromkeys(range(30), 3), r"examples=\{0: 3, .*: expected how many .* a list"),
    (5, r"examples=5: expected how many .* a list"),
    ((3 for _ in range(30)), r"examples=<generator .*: expected how many"),
    ("3" * 30, r"examples='3+': expected how many"),
]
RULES = [fb.refill(5), fb.arrivals(concurrency=5), fb.cohort(5)]
TIMINGS = [fb.half_normal(1.0), fb.per_example(fb.exponential(1.0))]


@pytest.mark.parametrize(("examples", "complaint"), LISTS)
@pytest.mark.parametrize("timing", TIMINGS)
def test_a_wrong_list_of_sizes_never_reaches_the_plan(examples, complaint, timing):
    for start in RULES:
        with refused(complaint):
            timeline(start=start, timing=timing, examples=examples)
    with refused(complaint):
        timeline(timing=timing, examples=examples, availability=fb.windows(24.0, 12.0))


@pytest.mark.parametrize("answer", [-1, 0, 1.7, float("nan"), None, "a", 1e300, 2**80])
@pytest.mark.parametrize("timing", TIMINGS)
def test_neither_does_a_wrong_answer(answer, timing):
    for start in RULES:
        with refused(r"examples\(\d+\)=.*: expected an integer >= 1"):
            timeline(start=start, timing=timing, examples=lambda client: answer)


def test_a_plan_of_other_clients_refuses_the_sizes():
    """Whoever makes it."""
    made = {"start": fb.refill(5), "buffer_size": 5, "weigh": fb.polynomial(0.5), "max_staleness": None, "clients": 50}
    with refused("examples: a list of 49 for 50 clients"):
        fastest(**made, sizes=Sizes([1] * 49), timing=fb.half_normal(1.0), seed=0)


@pytest.mark.parametrize(
    "examples", [list(range(1, 31)), tuple(range(1, 31)), range(1, 31), np.arange(1, 31), np.arange(1, 31, dtype=np.uint8)]
)
def test_sizes_are_taken_as_they_come(examples):
    for given in (examples, lambda client: examples[client]):
        t = timeline(examples=given)
        assert np.array_equal(t.examples, t.client + 1)


class Lying:
    """Clients that are made when asked for, and count wrongly."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, client: int) -> tuple[Any, Any]:
        return X, Y

    def examples(self, client: int) -> int:
        return -1


def test_clients_that_count_wrongly_are_refused(tmp_path):
    for timing in TIMINGS:
        with refused(r"examples\(\d+\)=-1: expected an integer >= 1"):
            simulate(task=fitting(clients=Lying()), timing=timing)


# ── the parts of a run ───────────────────────────────────────────────────────────────────────────────────────────────


def simulate(**changes: Any) -> fb.Run:
    how = {"server": fb.Server(start=fb.refill(2), buffer_size=2), "task": fitting(), "client": fb.LocalSGD(lr=0.1)}
    return fb.simulate(**{**how, "until": fb.trips(10), "workers": 1, **changes})


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        ({"server": None}, r"server=None: expected .*fedbuff\.Server\("),
        ({"server": fb.Server}, r"server=<class .*: expected .*fedbuff\.Server\("),
        ({"task": None}, r"task=None: expected .*fedbuff\.tasks\.digits\("),
        ({"task": "digits"}, r"task='digits': expected .*fedbuff\.tasks\.digits\("),
        ({"server": fitting()}, r"server=Task\(.*: expected .*fedbuff\.Server\("),
        ({"timing": None}, r"timing=None: expected .*fedbuff\.half_normal\("),
        ({"timing": 1.0}, r"timing=1\.0: expected .*fedbuff\.half_normal\("),
        ({"timing": fb.half_normal}, r"timing=<class .*: expected .*fedbuff\.half_normal\("),
        ({"timing": lambda rng: 1.0}, r"timing=.*: can't be called with 2 arguments .*fedbuff\.half_normal\("),
        ({"training": None}, r"training=None: expected .*fedbuff\.Training\("),
        ({"training": {}}, r"training=\{\}: expected .*fedbuff\.Training\("),
        ({"privacy": {}}, r"privacy=\{\}: expected .*fedbuff\.Privacy\("),
        ({"privacy": 8.0}, r"privacy=8\.0: expected .*fedbuff\.Privacy\("),
        ({"secure_aggregation": "enclave"}, r"secure_aggregation='enclave': expected .*fedbuff\.SecureAggregation\("),
        ({"availability": "x"}, r"availability='x': expected .*fedbuff\.windows\("),
        ({"availability": 0.5}, r"availability=0\.5: expected .*fedbuff\.windows\("),
        ({"algorithm": 3}, r"algorithm=3: expected a name"),
        ({"algorithm": None}, r"algorithm=None: expected a name"),
        ({"progress": 3}, r"progress=3: expected a function"),
        ({"say": None}, r"say=None: expected a function"),
    ],
)
def test_a_part_of_the_wrong_kind_is_named(part, complaint, tmp_path):
    with refused(complaint):
        simulate(**part, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("start", [None, 5, "refill", fb.refill])
def test_when_trips_start_is_a_rule(start):
    with refused(r"start=.*: expected when trips start, e\.g\. fedbuff\.refill\("):
        fb.Server(start=start, buffer_size=2)
    with refused(r"start=.*: expected when trips start, e\.g\. fedbuff\.refill\("):
        timeline(start=start)


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        ({"timing": None}, r"timing=None: expected .*fedbuff\.half_normal\("),
        ({"availability": "x"}, r"availability='x': expected .*fedbuff\.windows\("),
        ({"clients": None}, r"clients=None: expected how many"),
        ({"clients": 30.0}, r"clients=30\.0: expected how many"),
        ({"max_staleness": -1}, r"max_staleness=-1: expected an integer >= 0"),
        ({"max_staleness": 1.5}, r"max_staleness=1\.5: expected an integer >= 0"),
        ({"weigh": 0.5}, r"weigh=0\.5: expected a function of staleness"),
    ],
)
def test_so_are_those_of_a_timeline(part, complaint):
    with refused(complaint):
        timeline(**part)


@pytest.mark.parametrize("wrap", [fb.per_example, fb.per_client])
def test_a_timing_model_of_a_timing_model_is_one(wrap):
    for timing in (1.0, None, fb.exponential):
        with refused(r"timing=.*: expected .*fedbuff\.half_normal\("):
            wrap(timing)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fb.trips(1 << 63),
        lambda: fb.server_steps(1 << 63),
        lambda: fb.Server(start=fb.refill(5), buffer_size=2, max_staleness=1 << 64),
        lambda: fb.timeline(start=fb.refill(5), buffer_size=2, clients=50, trips=20, max_staleness=1 << 64),
    ],
)
def test_what_no_machine_can_count_to_is_refused(make):
    with pytest.raises(ValueError, match=r"expected an integer >= . and <= 4,611,686,018,427,387,904"):
        make()


def test_clients_that_hardly_ever_finish_a_message_are_refused():
    with pytest.raises(ValueError, match=r"dropout=0\.99: expected a number >= 0 and <= 0\.9"):
        fb.SecureAggregation("enclave", clip=1.0, dropout=0.99)


def test_mixing_is_yes_or_no():
    with refused("mixing='no': expected True or False"):
        fb.Server(start=fb.refill(2), buffer_size=2, mixing="no")


def test_what_was_given_is_shown_in_one_line_that_ends():
    many = fitting(clients=[(X, Y)] * 100_000)
    for value in (np.arange(10_000), np.eye(20), "x" * 10_000, "a\nb", many, list(many.clients)):
        with refused("value="):
            check.fits(False, "something else", value=value)
        with refused("value="):
            check.integer(1, value=value)
    with refused(r"value=1\.5: expected an integer >= 1$"):
        check.integer(1, value=1.5)


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: fb.tasks.digits(split="iid"), r"split='iid': expected .*fedbuff\.dirichlet\("),
        (lambda: fb.tasks.digits(split=fb.iid), r"split=<class .*: expected .*fedbuff\.dirichlet\("),
        (lambda: fb.tasks.digits(400, None), r"split=None: expected .*fedbuff\.dirichlet\("),
        (lambda: fb.tasks.digits(model="mlp"), r"model='mlp': expected .*fedbuff\.models\.mlp\("),
        (lambda: fb.tasks.digits(model=fb.models.mlp), r"model=<class .*: expected .*fedbuff\.models\.mlp\("),
        (lambda: fb.tasks.digits(model=lambda: torch.nn.Linear(64, 10)), "model=.*: can't be called with 2 arguments"),
        (lambda: fb.tasks.synthetic(model=None), r"model=None: expected .*fedbuff\.models\.mlp\("),
        (lambda: fb.tasks.hugging_face([], [], split="iid"), r"split='iid': expected .*fedbuff\.dirichlet\("),
        (lambda: fb.models.mlp(64), r"hidden=64: expected .*\(64,\)"),
        (lambda: fb.models.mlp("64"), r"hidden='64': expected .*\(64,\)"),
    ],
)
def test_the_choices_of_a_task_are_objects(make, complaint):
    with refused(complaint):
        make()


@pytest.mark.parametrize(
    ("x", "y", "parts", "complaint"),
    [
        ([1, 2], [1], [[0]], "split_examples: 2 inputs and 1 labels"),
        (np.ones(3), np.ones(3), [[0], [5]], r"parts\[1\]: index 5; expected 0 to 2"),
        (np.ones(3), np.ones(3), [[0, -1]], r"parts\[0\]: index -1; expected 0 to 2"),
        (np.ones(3), np.ones(3), [[0.5]], r"parts\[0\]: expected a row of indices, got float64\[1\]"),
        (np.ones(3), np.ones(3), [["a"]], r"parts\[0\]: expected a row of indices, got <U1\[1\]"),
        (np.ones(3), np.ones(3), [0, 1, 2], r"parts\[0\]: expected a row of indices, got int64\[\]"),
        (np.ones((3, 2)), np.ones(3), [[[0, 1]]], r"parts\[0\]: expected a row of indices, got int64\[1, 2\]"),
        (np.ones(3), np.ones(3), [np.array([True, False])], r"parts\[0\]: expected a row of indices, got bool\[2\]"),
        (np.ones(3), np.ones(3), 7, "parts=7: expected the indices of each client"),
    ],
)
def test_examples_are_split_by_indices_that_exist(x, y, parts, complaint):
    with refused(complaint):
        fb.split_examples(x, y, parts)


@pytest.mark.parametrize(
    "part", [[0, 2], (0, 2), np.array([0, 2]), np.array([True, False, True]), slice(0, 3, 2), range(0, 3, 2)]
)
def test_examples_are_split_by_whatever_says_which(part):
    for kind in (list, np.array, torch.tensor):
        ((x, y),) = fb.split_examples(kind([[5.0], [6.0], [7.0]]), kind([1, 2, 3]), [part])
        assert (x.tolist(), y.tolist()) == ([[5.0], [7.0]], [1, 3])


def test_a_mask_of_one_example_is_a_mask():
    assert fb.split_examples(np.ones(1), np.ones(1), [np.array([True])])[0][1].tolist() == [1.0]


def test_rows_of_pandas_are_counted_from_the_first():
    """Whatever their labels are after a shuffle."""
    pandas = pytest.importorskip("pandas")
    x, y = pandas.DataFrame({"a": [5.0, 6.0, 7.0]}, index=[2, 0, 1]), pandas.Series([1, 2, 3], index=[2, 0, 1])
    ((inputs, labels),) = fb.split_examples(x, y, [[0, 2]])
    assert (inputs.tolist(), labels.tolist()) == ([[5.0], [7.0]], [1, 3])


class Detached(torch.nn.Linear):
    """Has no gradient when it is evaluated, as nobody needs one then."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training else super().forward(x).detach()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": None}, "model=None: expected a function that makes it"),
        ({"model": "mlp"}, "model='mlp': expected a function that makes it"),
        ({"model": torch.nn.Linear}, "model=<class .*Linear'>: can't be called with no arguments .*'in_features'.*lambda"),
        ({"model": lambda features, classes: None}, "can't be called with no arguments .*'features'"),
        ({"loss": None}, "loss=None: expected a function"),
        ({"accuracy": 0.5}, r"accuracy=0\.5: expected a function .*or None"),
        ({"name": 3}, "name=3: expected a string"),
        ({"evaluate": {1: (X, Y)}}, "evaluate: a split is called 1; expected a string"),
        ({"evaluate": {"test": X}}, r"evaluate, test: expected \(inputs, labels\)"),
        ({"evaluate": {"a": (X, Y), "b": (X, Y[:3])}}, "evaluate, b: 10 inputs and 3 labels"),
        ({"evaluate": {}}, "evaluate: expected at least one split"),
        ({"clients": ((X, Y) for _ in range(3))}, "clients=<generator .*: expected a sequence .* list"),
        ({"clients": None}, "clients=None: expected a sequence"),
        ({"clients": 30}, "clients=30: expected a sequence"),
        ({"clients": {"ann": (X, Y)}}, r"clients=\{'ann'.*: expected a sequence"),
        ({"clients": [1, 2, 3]}, r"clients\[0\]: expected \(inputs, labels\), got 1"),
        ({"clients": [(X, Y), (X, Y, Y)]}, r"clients\[1\]: expected \(inputs, labels\)"),
        ({"clients": [(X, Y), (X, 3)]}, r"clients\[1\]: expected \(inputs, labels\)"),
    ],
)
def test_a_task_of_the_wrong_parts_is_not_made(changes, complaint):
    with refused(complaint):
        fitting(**changes)


def one_number(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return torch.tensor(1.0)


def without(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.detach(), label)


class Two(torch.nn.Linear):
    """Gives more than an accuracy can judge."""

    def __init__(self) -> None:
        super().__init__(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


def first_of_two(output: Any, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[0], label)


def by_numpy(output: torch.Tensor, label: torch.Tensor) -> float:
    return float((output.argmax(1) != label).float().mean())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"loss": one_number}, "loss: has no gradient"),
        ({"loss": without}, "loss: has no gradient"),
        ({"loss": by_numpy}, "loss: expected the mean over the examples, one number; got float"),
        ({"clients": [(X, Y)] * 3 + [(X[:, :7], Y)]}, r"clients\[3\]: .*float32\[10, 7\].*cannot be multiplied"),
        ({"clients": [(X, Y)] * 3 + [(X[:, :7].tolist(), Y)]}, r"clients\[3\]: .*float64\[10, 7\].*cannot be multiplied"),
        ({"clients": [(X, Y)] * 3 + [(X.astype(np.uint8), Y)]}, r"clients\[3\]: .*uint8\[10, 8\]"),
        ({"clients": [(X, Y)] * 3 + [(X, Y / 2)]}, r"clients\[3\]: .*labels float64\[10\]"),
        ({"model": Two, "loss": first_of_two}, "evaluate, test: accuracy can't be applied .*'tuple'"),
    ],
)
def test_what_does_not_fit_is_said_before_a_folder_is_made(changes, complaint, tmp_path):
    with refused(complaint):
        simulate(task=fitting(**changes), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_fits_is_not_refused():
    """A model without a gradient where none is needed, a class as the function that makes it, texts of any length."""
    assert simulate(task=fitting(model=lambda: Detached(8, 3))).summary["trips"] == 10
    words = [(np.full((4, 3 + client), client), np.arange(4) % 3) for client in range(5)]
    embedded = lambda: torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4), torch.nn.Linear(4, 3))  # noqa: E731
    assert simulate(task=fitting(model=embedded, clients=words, evaluate=words[0])).summary["trips"] == 10
    assert simulate(task=fitting(clients=dict(enumerate([(X, Y)] * 5)))).summary["trips"] == 10


def test_a_look_for_a_gradient_leaves_no_trace():
    """Though it takes the model as it trains: dropout draws, and buffers change."""

    class Counts(Detached):
        def __init__(self) -> None:
            super().__init__(8, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return F.dropout(super().forward(x), training=self.training)

    task = fitting(model=Counts)
    flat, weights = initial_weights(task, 0)
    before = torch.get_rng_state()
    first_look(task, flat)
    assert torch.equal(torch.get_rng_state(), before)
    assert flat.module.training
    assert float(flat.module.seen) == 0
    assert np.array_equal(flat.weights(), weights)
    assert not flat.gradient.any()


# ── plots ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def run() -> fb.Run:
    return simulate()


@pytest.mark.parametrize("metric", ["split", "nothing"])
def test_a_column_that_is_no_number_is_not_drawn(metric, run):
    with refused(f"metric='{metric}': the run recorded loss, accuracy"):
        run.plot(metric)


def test_a_plot_is_where_save_says(run, tmp_path):
    for name, written in (("x", "x.png"), ("new/y.svg", "new/y.svg"), ("z.pdf", "z.pdf")):
        saved = run.plot("loss").save(tmp_path / name)
        assert saved == tmp_path / written
        assert saved.is_file()
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with refused(f"{tmp_path}: is a folder"):
        run.plot("loss").save(tmp_path)


def test_labels_that_a_loss_can_be_computed_of_but_not_trained_on():
    task = fitting(model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 1), torch.nn.Flatten(0)), loss=F.huber_loss)
    with refused(
        r"clients\[0\]: model and loss can't be trained on inputs float32\[10, 8\] and labels int64\[10\]: Found dtype Long"
    ):
        first_look(task, initial_weights(task, 0)[0])


def test_a_learning_rate_beyond_float32():
    with refused(r"lr=1e\+39: expected a number >= 0 and <= 3e\+38"):
        fb.LocalSGD(lr=1e39)


# ── absurd numbers, and words where a switch is ──────────────────────────────────────────────────────────────────────

ABSURD = {
    "workers": (lambda: simulated(workers=10**6), r"workers=1000000: expected an integer >= 1 and <= 1,024"),
    "more arrivals than can be counted": (
        lambda: timeline(start=fb.arrivals(rate=1e30)),
        r"start: 1,000,000 clients arrived in a row while nobody was free, up to virtual time .*: give a lower rate",
    ),
    "hardly any arrivals": (lambda: timeline(start=fb.arrivals(rate=5e-324)), r"nobody arrives in a time that can be counted"),
    "hardly anybody in flight": (lambda: timeline(start=fb.arrivals(concurrency=1e-320)), r"nobody arrives in a time that"),
    "clients": (lambda: timeline(clients=10**30), r"clients=1000.*: expected an integer >= 1 and <= 4,611,"),
    "buffer_size": (lambda: timeline(buffer_size=10**20), r"buffer_size=1000.*: expected an integer >= 1 and <= 4,611,"),
    "over_selection": (lambda: fb.cohort(4, 1e308), r"over_selection=1e\+308: expected a number >= 0 and <= 1e\+06"),
    "alpha": (lambda: fb.dirichlet(1e308), r"alpha=1e\+308: expected a number > 0 and"),
    "evaluate_share": (lambda: simulated(evaluate_share=5e-324), r"evaluate_share=5e-324: expected a number >= 1e-09"),
    "max_staleness": (lambda: fb.SecureAggregation("plain", 1.0, max_staleness=10**9), r"max_staleness=.*<= 1,000,000"),
    "clip": (lambda: fb.SecureAggregation("plain", 5e-324), r"clip=5e-324: expected a number >= 1e-30"),
    "helpers": (lambda: fb.SecureAggregation("plain", 1.0, helpers="x"), r"helpers='x': expected an integer >= 1"),
    "lr_norm": (lambda: fb.LocalSGD(lr=0.1, lr_norm="false"), r"lr_norm='false': expected True or False"),
    "amsgrad": (lambda: fb.adam(amsgrad="no"), r"amsgrad='no': expected True or False"),
    "poisson": (lambda: fb.arrivals(rate=1.0, poisson="no"), r"poisson='no': expected True or False"),
    "resume": (lambda: simulated(resume="no"), r"resume='no': expected True or False"),
    "optimizer": (lambda: fb.delay_adaptive(None, 1), r"optimizer=None: expected .*fedbuff.adam"),
    "seed": (lambda: fb.windows(4.0, 2.0, seed="x"), r"seed='x': expected an integer >= 0"),
    "model": (lambda: simulated(fitting(model=lambda: 1)), r"model\(\) returned 1; expected a torch.nn.Module"),
    "folder": (lambda: fb.load(None), r"folder=None: expected the path of a run folder"),
    "trace": (lambda: fb.trace(None), r"path=None: expected the path of a CSV file"),
}


def simulated(task: fb.Task | None = None, **how: Any) -> fb.Run:
    server = fb.Server(start=fb.refill(2), buffer_size=1)
    return fb.simulate(server, task or fitting(), client=fb.LocalSGD(lr=0.1), until=fb.trips(4), **how)


@pytest.mark.parametrize("what", ABSURD)
def test_what_nobody_can_mean_is_refused_at_once(what):
    call, complaint = ABSURD[what]
    with refused(complaint):
        call()


def test_a_seed_may_be_as_long_as_it_likes():
    assert len(timeline(seed=2**100).trip) == 100
