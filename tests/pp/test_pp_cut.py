"""Where models are cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from ppkit import BASE, merged, plugins_of

from forge_core.errors import ConfigError
from forge_core.testing import tiny_config, tiny_session
from forge_pp.costs import find_cut
from forge_pp.cut import even_cuts
from forge_pp.parts import Cut, StagedModel, staged


def dearest(costs: list[float], cuts: list[int], first: float, last: float) -> float:
    places = [0, *cuts, len(costs)]
    stages = [sum(costs[a:b]) for a, b in pairwise(places)]
    stages[0] += first
    stages[-1] += last
    return max(stages)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
def test_no_other_cut_is_better(stages: int) -> None:
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    for first, last in ((0.0, 0.0), (10.0, 0.0), (2.0, 8.0)):
        cuts = even_cuts(costs, stages, first, last)
        assert len(cuts) == stages - 1
        others = combinations(range(1, len(costs)), stages - 1)
        best = min(dearest(costs, list(other), first, last) for other in others)
        assert dearest(costs, cuts, first, last) == best


def cut(**pp: object) -> Cut:
    tables = merged(BASE, {"pp": {"size": 2, **pp}})
    plugins = plugins_of(tables)
    config = tiny_config(plugins=plugins, world_size=2, **tables)
    alone = plugins_of({})
    with tiny_session(tiny_config(plugins=alone, **BASE), alone) as session:
        session.config = config
        return find_cut(session, session.model)


def test_the_head_counts_as_work_and_the_embedding_does_not() -> None:
    # a block: 4 * 16 * 16 + 3 * 16 * 32 = 2560 weights; the head 16 * 64 = 1024; embedding looks up
    assert cut().begins == (0, 2)
    assert cut(schedule="looped_bfs").begins == (0, 1, 2, 3)


def test_stated_names() -> None:
    assert cut(split=["3"]).begins == (0, 3)
    with pytest.raises(ConfigError, match="there is no block '7'"):
        cut(split=["7"])
    with pytest.raises(ConfigError, match="do not begin stages in order"):
        cut(split=["0"])


def test_parts_have_the_names_of_the_whole() -> None:
    plugins = plugins_of({})
    with tiny_session(tiny_config(plugins=plugins, **BASE), plugins) as session:
        model = session.model
    names = {name for name, _ in model.named_parameters()}
    where = Cut((0, 2), ("0", "1", "2", "3"))
    parts = [staged(model, where, [stage]) for stage in (0, 1)]
    found = [{n.partition(".")[2] for n, _ in part.named_parameters()} for part in parts]
    assert found[0] | found[1] == names
    assert not found[0] & found[1]
    assert {n for n in found[0] if not n.startswith("layers")} == {"embed.weight"}
    assert isinstance(parts[0], StagedModel)
    assert model.head is not None  # the whole model is as it was


def test_gradients_flow_as_in_the_whole() -> None:
    plugins = plugins_of({})
    with tiny_session(tiny_config(plugins=plugins, **BASE), plugins) as session:
        model = session.model
    (first,), (second,) = (staged(model, Cut((0, 1), ("0", "1", "2", "3")), [s]).parts for s in (0, 1))
    tokens = torch.arange(16)[None]
    assert torch.equal(second(embeds=first(tokens)), model(tokens))
