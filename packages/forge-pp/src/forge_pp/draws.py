"""Random numbers of a rank with several stages, whatever the order in which they run."""

from __future__ import annotations

import torch

from forge_core.loop.seeds import derive_seed


class Draws:
    """What torch draws in the forward of a stage follows from the update, the micro-batch and the stage.

    A schedule runs the stages of a rank in an order of its own, a forward beside training in another. With
    one stage a rank both go through micro-batches in order and draw alike without this.

    Args:
        several: whether the rank has more than one stage; otherwise nothing is done.
    """

    def __init__(self, several: bool) -> None:
        self.several = several
        self.base = 0

    def begin(self) -> None:
        """A pass over the micro-batches of an update begins: from equal random states, with equal draws."""
        if self.several:
            self.base = int(torch.randint(2**62, (), device="cpu"))

    def of(self, stage: int, number: int) -> None:
        """A stage is about to run micro-batch `number`."""
        if self.several:
            torch.manual_seed(derive_seed(self.base, stage, number))
