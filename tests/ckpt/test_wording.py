"""Messages about one thing speak of one thing."""

from __future__ import annotations

import torch

from forge_ckpt.hf.start import Coverage as Filled
from forge_ckpt.optimizers import Fit
from forge_ckpt.restoring import Coverage


def test_of_one_thing() -> None:
    one = Coverage(["a"], [], ["b"], {})
    assert str(one) == "1 of 1 tensor loaded; b in the checkpoint is not used"
    assert str(Coverage([], ["a"], [], {})) == "0 of 1 tensor loaded; a keeps its initial value"
    assert str(Filled(("a",), (), ("b",))) == "1 parameter filled, 1 tensor not used (b)"
    assert str(Fit({"a"}, {"b"}, {"momentum"})) == (
        "momentum of 1 parameter is of no use, and starts afresh; the state of 1 is kept"
    )


def test_of_several() -> None:
    several = Coverage(["a", "b"], ["c", "d"], ["e", "f"], {"a": (torch.float32, torch.float64)})
    assert str(several) == (
        "2 of 4 tensors loaded; c, d keep their initial values; e, f in the checkpoint are not used"
    )
