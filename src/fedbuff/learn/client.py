"""Local training as settings: what a client does in one trip."""

from dataclasses import dataclass

from fedbuff.core import check

_LARGEST = 3e38  # that float32 knows, about


@dataclass(frozen=True)
class LocalSGD:
    """Minibatch SGD on a client's own examples (the paper's Algorithm 2), reshuffled every epoch.

    lr            client learning rate η_l
    epochs        passes over the client's examples, unless
    steps         Q: exactly so many steps instead
    batch_size    B
    momentum, weight_decay   as in torch.optim.SGD
    proximal      FedProx's μ (and Xie et al.'s ρ): adds μ/2 ‖y − w‖² to the loss
    lr_norm       the paper's LR-Norm: a step on n < B examples uses η_l · n / B
    """

    lr: float
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 32
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0
    lr_norm: bool = False

    def __post_init__(self) -> None:
        check.number(0, _LARGEST, lr=self.lr, weight_decay=self.weight_decay, proximal=self.proximal)
        check.number(0, 1, momentum=self.momentum)
        check.integer(1, epochs=self.epochs, batch_size=self.batch_size)
        if self.steps is not None:
            check.integer(1, steps=self.steps)
        check.switch(lr_norm=self.lr_norm)
