"""Who draws random numbers without asking draws its own, and the same ones again with the same seed."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from casekit import ListData, Scalar, ScalarForward, case_plugin, case_session, sgd, unit

from forge_core.loop.ranks import Ranks
from forge_core.loop.seeds import process_seed, seed_generators, worker_seed


def draws(seed: int) -> tuple[float, float, float]:
    seed_generators(seed)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_ranks_workers_and_epochs_draw_apart() -> None:
    """The first draws of 2 ranks x 2 workers x 2 epochs differ pairwise, for each generator, and repeat."""
    who = list(itertools.product((0, 1), (0, 1), (0, 1)))
    first = [draws(worker_seed(7, *coordinates)) for coordinates in who]
    for generator in range(3):
        assert len({values[generator] for values in first}) == 8
    assert first == [draws(worker_seed(7, *coordinates)) for coordinates in who]
    assert first != [draws(worker_seed(8, *coordinates)) for coordinates in who]


def test_data_ranks_draw_apart() -> None:
    assert draws(process_seed(7, 0)) != draws(process_seed(7, 1))


def test_a_run_seeds_all_generators(tmp_path: Path) -> None:
    plugin = case_plugin(Scalar, ListData([unit(1.0)]), ScalarForward(), sgd(0.1))

    def first_draws(name: str, seed: int) -> Any:
        with case_session(tmp_path / name, plugin, f"--train.seed={seed}") as session:
            assert session.ranks == Ranks()
            return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert first_draws("a", 1) == first_draws("b", 1)
    assert first_draws("c", 2) != first_draws("a2", 1)
