"""The algorithms of the paper by name: each a choice of starting rule, buffer size, weighting and server optimizer.

A preset takes the client's local training and returns (server, client), as some algorithms change that too:

    server, client = fb.presets.fedprox(fb.LocalSGD(lr=0.1), concurrency=100, mu=0.01)
    fb.simulate(server, task, client=client, …)

`concurrency` is the number of trips in flight; for the synchronous ones, of those wanted per server step, and what
over-selection starts comes on top. In a settings file: `[algorithm.fedprox]`.
"""

from dataclasses import replace

from fedbuff.core.optimizers import adam, delay_adaptive, momentum, sgd
from fedbuff.core.server import Server
from fedbuff.core.staleness import constant, polynomial
from fedbuff.core.starting import cohort, refill
from fedbuff.learn.client import LocalSGD

Algorithm = tuple[Server, LocalSGD]


def fedbuff(
    client: LocalSGD, *, concurrency: int = 100, buffer_size: int = 10, lr: float = 1.0, beta: float = 0.0, a: float = 0.5
) -> Algorithm:
    """Nguyen et al. (2022): K updates per server step, each weighted by (1 + τ)^−a, server momentum β."""
    optimizer = momentum(lr, beta) if beta else sgd(lr)
    return Server(start=refill(concurrency), buffer_size=buffer_size, weigh=polynomial(a), optimizer=optimizer), client


def fedasync(client: LocalSGD, *, concurrency: int = 100, lr: float = 1.0, a: float = 0.5) -> Algorithm:
    """FedAsync as in the paper's tables: a server step on every single update, weighted by (1 + τ)^−a."""
    return Server(start=refill(concurrency), buffer_size=1, weigh=polynomial(a), optimizer=sgd(lr)), client


def fedasync_mixing(
    client: LocalSGD, *, concurrency: int = 100, alpha: float = 0.6, a: float = 0.5, rho: float = 0.005
) -> Algorithm:
    """FedAsync as Xie et al. (2019) wrote it: mixes models, w ← (1 − α_τ) w + α_τ w_client with α_τ = α (1 + τ)^−a.

    Clients add the proximal term ρ/2 ‖y − w‖² to their loss.
    """
    server = Server(start=refill(concurrency), buffer_size=1, weigh=polynomial(a), optimizer=sgd(alpha), mixing=True)
    return server, replace(client, proximal=rho)


def fedavg(client: LocalSGD, *, concurrency: int = 100, lr: float = 1.0, over_selection: float = 0.0) -> Algorithm:
    """McMahan et al. (2016), with a server learning rate; updates weigh the same (`weight_by="examples"` for theirs)."""
    start = cohort(concurrency, over_selection)
    return Server(start=start, buffer_size=concurrency, weigh=constant(), optimizer=sgd(lr)), client


def fedavgm(
    client: LocalSGD, *, concurrency: int = 100, lr: float = 1.0, beta: float = 0.9, over_selection: float = 0.0
) -> Algorithm:
    """Hsu et al. (2019): FedAvg with server momentum β."""
    start = cohort(concurrency, over_selection)
    return Server(start=start, buffer_size=concurrency, weigh=constant(), optimizer=momentum(lr, beta)), client


def fedprox(
    client: LocalSGD, *, concurrency: int = 100, lr: float = 1.0, mu: float = 0.01, over_selection: float = 0.0
) -> Algorithm:
    """Li et al. (2018): FedAvg whose clients add μ/2 ‖y − w‖² to their loss."""
    server, client = fedavg(client, concurrency=concurrency, lr=lr, over_selection=over_selection)
    return server, replace(client, proximal=mu)


def fedadam(
    client: LocalSGD,
    *,
    concurrency: int = 100,
    lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-3,
    over_selection: float = 0.0,
) -> Algorithm:
    """Reddi et al. (2020): FedAvg with Adam at the server (bias-corrected, as torch's)."""
    start, optimizer = cohort(concurrency, over_selection), adam(lr, beta1, beta2, eps)
    return Server(start=start, buffer_size=concurrency, weigh=constant(), optimizer=optimizer), client


def fadas(
    client: LocalSGD,
    *,
    concurrency: int = 100,
    buffer_size: int = 10,
    lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    threshold: int = 10,
) -> Algorithm:
    """Wang et al. (2024): FedBuff's buffer with AMSGrad at the server, and a learning rate that falls with the delay."""
    optimizer = delay_adaptive(adam(lr, beta1, beta2, eps, amsgrad=True), threshold)
    return Server(start=refill(concurrency), buffer_size=buffer_size, weigh=constant(), optimizer=optimizer), client


PRESETS = {f.__name__: f for f in (fedbuff, fedasync, fedasync_mixing, fedavg, fedavgm, fedprox, fedadam, fadas)}
