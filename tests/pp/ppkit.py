"""Runs under stages beside the same run in one process. Runs in the workers of a pool."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

import forge_pp.plugin
from forge_core.contract import Component, LossTerm
from forge_core.testing import isolated_plugins, plugin_object, run_tiny, tiny_config
from forge_core.testing.tiny import TinyRun

STEPS = 10
ASKED: list[int] = []
"""Samples that sources of tests were asked for, in this process."""
KINDS = (
    "packed_masked_unsupervised",
    "packed_lengths_masked",
    "masked_unsupervised",
    "nothing",
    "halves",
    "halves_late",
)

BASE: dict[str, dict[str, Any]] = {
    "model": {"n_layers": 4},
    "train": {"dtype": "fp64", "grad_accum_steps": 4, "batch_size": 2, "max_steps": STEPS},
    "eval": {"steps": 2, "interval": 5},
}


def merged(*layers: dict[str, Any]) -> dict[str, Any]:
    """Tables laid over each other key by key."""
    found: dict[str, Any] = {}
    for layer in layers:
        for table, keys in layer.items():
            found[table] = {**found.get(table, {}), **keys} if isinstance(keys, dict) else keys
    return found


def plugins_of(tables: dict[str, Any], **more: object) -> Any:
    """The plugins whose tables are named, `more` by name among them."""
    known: dict[str, object] = {"pp": forge_pp.plugin, **more}
    if "moe" in tables:
        import forge_moe.plugin

        known["moe"] = forge_moe.plugin
    if "checkpoint" in tables:
        import forge_ckpt.plugin

        known["checkpoint"] = forge_ckpt.plugin
    if "vlm" in tables:
        import seekit

        import forge_vlm.plugin

        known |= {"vlm": forge_vlm.plugin, "pictures": seekit.pictures()}
    known |= {"terms": extra_terms(), "spoil": spoiling(), "plain": plain_descent()}
    known |= {f"data_{kind}": odd_data(kind.replace("_", "+")) for kind in KINDS}
    return isolated_plugins({name: plugin for name, plugin in known.items() if name in tables})


def run(tables: dict[str, Any], folder: str | None = None, **more: object) -> TinyRun:
    """Train a tiny run on this rank, with `more` plugins by name."""
    plugins = plugins_of(tables, **more)
    return run_tiny(tiny_config(plugins=plugins, **tables), plugins, folder=folder)


def alone(tables: dict[str, Any]) -> dict[str, Any]:
    """What one process gives; called outside of pools."""
    return plain(run({name: keys for name, keys in tables.items() if name != "pp"}))


def on_ranks(tables: dict[str, Any]) -> dict[str, Any]:
    """What this rank's part of the run gives, plain data."""
    return plain(run(tables))


def plain(run: TinyRun) -> dict[str, Any]:
    return {
        "losses": run.losses,
        "objectives": run.objectives,
        "norms": run.grad_norms,
        "oks": run.oks,
        "evaluations": run.metric("eval/loss") if run.session.ranks.is_main else [],
        "records": run.records if run.session.ranks.is_main else [],
        "weights": run.weights,
    }


def differences(whole: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Largest relative differences of every rank from one process, and of weights that two ranks have."""
    found = dict.fromkeys(("losses", "objectives", "norms", "weights"), 0.0)
    names: set[str] = set()
    assert whole["losses"][0] != whole["losses"][-1]
    for name, value in ranks[0]["weights"].items():  # of a tied weight every copy is the same
        assert all(torch.equal(rank["weights"].get(name, value), value) for rank in ranks), name
    for rank in ranks:
        for key in ("losses", "objectives", "norms"):
            assert len(rank[key]) == len(whole[key]), key
            pairs = zip(whole[key], rank[key], strict=True)
            found[key] = max(found[key], *(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs))
        assert rank["oks"] == whole["oks"]
        names |= rank["weights"].keys()
        for name, value in rank["weights"].items():
            expected = whole["weights"][name]
            largest = max(float(expected.abs().max()), 1e-12)
            gap = float((value - expected).abs().max()) / largest
            assert math.isfinite(gap), name
            found["weights"] = max(found["weights"], gap)
    assert names == whole["weights"].keys(), names ^ whole["weights"].keys()
    evaluations = ranks[0]["evaluations"]
    assert len(evaluations) == len(whole["evaluations"])
    pairs = zip(whole["evaluations"], evaluations, strict=True)
    found["evaluations"] = max((abs(a - b) / abs(a) for a, b in pairs), default=0.0)
    return found


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Stream:
    """Micro-batches drawn from their number: packed, unevenly masked, some without a target, of two lengths.

    Args:
        kind: words of what is wanted: "packed", "masked", "unsupervised", "lengths", "halves", "late".
        session: whose data ranks share the samples.
    """

    names = ("all",)

    def __init__(self, kind: str, session: Any) -> None:
        self.kinds = kind.split("+")
        ranks = session.ranks
        self.rank, self.size = ranks.data_rank, ranks.data_size
        self.rows = session.config.get("train").batch_size
        self.position = 0

    def take(self, count: int) -> list[dict[str, Any]]:
        found = []
        for number in range(count):
            # one process takes what several ranks share: as many micro-batches, in another order
            sample = self.position + number * self.size + self.rank
            found.append(self.batch(sample))
        self.position += count * self.size
        return found

    def skip(self, count: int) -> None:
        self.position += count * self.size

    def batch(self, number: int) -> dict[str, Any]:
        number += "late" in self.kinds
        generator = torch.Generator().manual_seed(number)
        length = (16, 8, 12)[number % 3] if "lengths" in self.kinds else 16
        length = (8, 4)[number % 2] if "halves" in self.kinds else length
        tokens = torch.randint(64, (self.rows, length + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        batch: dict[str, Any] = {"tokens": tokens[:, :-1].clone(), "targets": targets}
        if "masked" in self.kinds:
            chance = torch.full(targets.shape, 0.2 + 0.2 * (number % 4))
            targets[torch.bernoulli(chance, generator=generator) > 0] = -100
        if "unsupervised" in self.kinds and number % 4 == 1:
            targets[:] = -100
        if "nothing" in self.kinds and number // 4 == 1:  # all micro-batches of the second update
            targets[:] = -100
        if "packed" in self.kinds:
            starts = torch.bernoulli(torch.full(targets.shape, 0.2), generator=generator)
            batch["documents"] = starts.cumsum(1).to(torch.int32)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.position = state["position"]


class Held:
    """An evaluation set of batches with 4, 2 and 1 supervised tokens."""

    name = "held"

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __iter__(self) -> Any:
        for number, kept in enumerate((4, 2, 1)):
            batch = self.stream.batch(1000 + number)
            batch["targets"][:] = -100
            batch["targets"][0, :kept] = batch["tokens"][0, 1 : kept + 1]
            yield batch


class Data:
    """A data pipeline over a `Stream`."""

    tokenizer = None

    def __init__(self, train: Stream, session: Any) -> None:
        self.train = train
        self.evaluation = [Held(self.train)] if session.ranks.data_size == 1 else []

    def __enter__(self) -> Data:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def odd_data(kind: str) -> Any:
    """A plugin whose data is of a `Stream`."""
    return plugin_object(forge_build_data=lambda session: Data(Stream(kind, session), session))


def on_data_ranks(tables: dict[str, Any]) -> dict[str, Any]:
    """Like `on_ranks`, where several data ranks share what `grad_accum_steps` says one process does."""
    return on_ranks(shared(tables))


def shared(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables with the micro-batches of one process divided over data ranks."""
    size = tables["pp"]["size"]
    layout = tables.get("distributed", {})
    ranks = world() // (size * layout.get("tp", 1) * layout.get("cp", 1))
    steps = tables["train"]["grad_accum_steps"] // ranks
    return merged(tables, {"train": {"grad_accum_steps": steps}})


def squares(model: Any, batch: Any, output: Any) -> torch.Tensor:
    """Of the norms' weights, for every sequence: a term of modules alone, on every stage its own."""
    weights = [p for name, p in model.named_parameters() if name.endswith("norm.weight") and "layers" in name]
    total: torch.Tensor = sum((p.square().sum() for p in weights), torch.zeros(()))
    return total * len(batch["tokens"])


def hidden_size(model: Any, batch: Any, output: Any) -> torch.Tensor:
    size: torch.Tensor = output.hidden.square().sum()
    return size


def logit_size(model: Any, batch: Any, output: Any) -> torch.Tensor:
    size: torch.Tensor = output.logits.square().sum()
    return size


def extra_terms() -> Any:
    """A plugin with a term of each kind."""
    return plugin_object(
        forge_extra_losses=lambda: [
            LossTerm(name="squares", weight=0.1, term=squares, needs="module", per="sequences"),
            LossTerm(name="hidden", weight=0.01, term=hidden_size, needs="hidden"),
            LossTerm(name="logits", weight=0.01, term=logit_size, needs="logits"),
        ]
    )


def spoil_term(model: Any, batch: Any, output: Any) -> torch.Tensor:
    """Infinite for one batch of the run."""
    worst: torch.Tensor = output.hidden.sum() * (float("inf") if int(batch["tokens"].sum()) % 7 == 0 else 0.0)
    return worst


def sgd(groups: list[dict[str, Any]], config: Any, options: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.lr)


def plain_descent() -> Any:
    """A plugin with the optimizer `plain/sgd`."""
    return plugin_object(forge_components=[Component(category="optimizer", name="sgd", target="ppkit:sgd")])


def spoiling() -> Any:
    """A plugin whose loss term is infinite now and then."""
    return plugin_object(forge_extra_losses=lambda: [LossTerm(name="spoil", weight=1.0, term=spoil_term)])
