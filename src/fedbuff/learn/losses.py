"""What is known of a loss: whether it is torch's cross entropy, and which labels its mean is over."""

from typing import Any

from torch import nn
from torch.nn import functional as F  # noqa: N812

from fedbuff.learn.tasks import cross_entropy

# losses whose mean over a batch is the mean of what they give with reduction="none"
MEANS = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy_with_logits,
    F.binary_cross_entropy,
)


def is_mean_cross_entropy(loss: Any) -> bool:
    """Whether it is torch's, its classes weighed or some labels left out of the mean, perhaps."""
    return loss in (cross_entropy, F.cross_entropy) or (type(loss) is nn.CrossEntropyLoss and loss.reduction == "mean")


def is_plain_cross_entropy(loss: Any) -> bool:
    """Whether it is torch's, without weights, smoothing or labels of its own that do not count."""
    return loss in (cross_entropy, F.cross_entropy) or (
        type(loss) is nn.CrossEntropyLoss
        and (loss.weight, loss.ignore_index, loss.reduction, loss.label_smoothing) == (None, -100, "mean", 0.0)
    )


def counts_labels(loss: Any) -> bool:
    """Whether it is known which labels its mean is over: those that torch is not told to leave out."""
    return is_mean_cross_entropy(loss) or (type(loss) is nn.NLLLoss and loss.reduction == "mean")
