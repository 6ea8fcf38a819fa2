"""How trips are computed, as settings."""

from dataclasses import dataclass
from typing import Literal

from fedbuff.core import check


@dataclass(frozen=True)
class Training:
    """How trips are computed: it changes what a run costs, and its result by rounding only.

    batched     trips together where the model allows it; if not, one at a time in the obvious loop
    device      where torch computes: "cpu", "cuda", "cuda:1" (other devices than the CPU are not tested)
    precision   "bfloat16" rounds the factors of products to it; sums, weights and updates stay as they are
    ahead_gib   memory for updates that wait for their server step, 1 GiB if not given. Trips of one version are trained
                together if the updates of all trips in flight fit into it: large models at high concurrency are up to twice
                as fast with more
    """

    batched: bool = True
    device: str = "cpu"
    precision: Literal["float32", "bfloat16"] = "float32"
    ahead_gib: float | None = None

    def __post_init__(self) -> None:
        check.switch(batched=self.batched)
        if self.ahead_gib is not None:
            check.number(0, above=True, ahead_gib=self.ahead_gib)
        check.one_of(("float32", "bfloat16"), precision=self.precision)
        if not self.batched and (self.device != "cpu" or self.precision != "float32"):
            raise ValueError("batched = false is the plain loop on the CPU in float32 and nothing else")
