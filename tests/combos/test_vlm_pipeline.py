"""Models that see, cut into stages: the same run as in one process, whatever the fusion and the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.testing import WorkerPool

pytestmark = pytest.mark.packages("pp", "vlm")

TOLERANCE = 1e-10
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)
FUSIONS: dict[str, dict[str, Any]] = {
    "joint decoder": {"fusion": "joint", "bidirectional": "image"},
    "cross attention": {"fusion": "cross_attention", "every": 2},
    "frozen encoder": {"fusion": "cross_attention", "every": 1, "frozen": True},
    "mixture of transformers": {"fusion": "mot"},
    "gated cross attention": {"fusion": "gated_cross_attention", "layers": [1, 2], "marked": False},
    "somebody else's": {"fusion": "pictures/doubled"},
}
_wholes: dict[str, dict[str, Any]] = {}
_table: dict[str, dict[str, float]] = {}


def of(name: str, **more: dict[str, Any]) -> dict[str, Any]:
    """Tables of a run: ten updates of four micro-batches, see `seekit.Pictures`."""
    from ppkit import BASE, merged
    from seekit import seeing

    return merged(BASE, seeing(**FUSIONS[name]), more)


def compare(pool: WorkerPool, tables: dict[str, Any]) -> dict[str, float]:
    from ppkit import alone, differences, on_data_ranks

    one = {name: keys for name, keys in tables.items() if name not in ("pp", "distributed")}
    if repr(one) not in _wholes:
        _wholes[repr(one)] = whole = alone(one)
        # what writes to the residual starts at 0, and moves only if images are seen
        seen = [v for n, v in whole["weights"].items() if "_after" in n and n.endswith("o_proj.weight")]
        assert all(bool(value.any()) for value in seen)
    return differences(_wholes[repr(one)], pool.run(on_data_ranks, tables))


def cells() -> Iterator[Any]:
    """Every schedule with every fusion; a fifth of them, with all of each, runs always."""
    for row, schedule in enumerate(SCHEDULES):
        for column, fusion in enumerate(FUSIONS):
            always = (row + column) % 5 == 0
            yield pytest.param(schedule, fusion, marks=() if always else pytest.mark.slow)


@pytest.mark.parametrize(("schedule", "fusion"), list(cells()))
def test_two_ranks_equal_one_process(schedule: str, fusion: str, pool2: WorkerPool) -> None:
    found = compare(pool2, of(fusion, pp={"size": 2, "schedule": schedule}))
    _table.setdefault(schedule, {})[fusion] = max(found.values())
    assert max(found.values()) < TOLERANCE, found


def test_table() -> None:
    """Prints the largest relative difference of every cell (`pytest -s`)."""
    width = max(map(len, SCHEDULES))
    print("\n" + " " * width, *(f"| {fusion}" for fusion in FUSIONS))
    for schedule, row in _table.items():
        print(f"{schedule:<{width}}", *(f"| {row.get(f, float('nan')):<{len(f)}.1e}" for f in FUSIONS))


@pytest.mark.parametrize("fusion", ["joint decoder", pytest.param("cross attention", marks=pytest.mark.slow)])
def test_four_ranks_equal_one_process(fusion: str, pool4: WorkerPool) -> None:
    found = compare(pool4, of(fusion, pp={"size": 4, "schedule": "1f1b"}, model={"tie_embeddings": True}))
    assert max(found.values()) < TOLERANCE, found


LAYOUTS: dict[str, dict[str, Any]] = {
    "data ranks": {"dp_shard": 2},
    "tensor ranks": {"tp": 2, "dp_shard": 1},
    "context ranks": {"cp": 2, "dp_shard": 1},
    "a ring": {"cp": 2, "dp_shard": 1, "cp_attention": "ring"},
}
INSIDE_ALWAYS = (("cross attention", "a ring"),)


def inside() -> Iterator[Any]:
    for fusion in FUSIONS:
        for name, layout in LAYOUTS.items():
            marks = () if (fusion, name) in INSIDE_ALWAYS else pytest.mark.slow
            yield pytest.param(fusion, layout, marks=marks, id=f"{fusion}-{name}")


@pytest.mark.parametrize(("fusion", "layout"), list(inside()))
def test_ranks_inside_stages(fusion: str, layout: dict[str, Any], pool4: WorkerPool) -> None:
    train = {"grad_accum_steps": 8}
    never = {"interval": 0, "at_end": False}  # the sets of these data are those of one data rank
    tables = of(fusion, pp={"size": 2, "schedule": "1f1b"}, distributed=layout, train=train, eval=never)
    tables["model"] = {**tables["model"], "n_kv_heads": 2}
    found = compare(pool4, tables)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.packages("ckpt", "moe", "pp", "vlm")
@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULES[2:])]
)
def test_experts_of_each_modality(schedule: str, pool2: WorkerPool) -> None:
    from ppkit import BASE, merged
    from seekit import MOE, seeing

    tables = merged(BASE, seeing("moma"), {"moe": MOE, "pp": {"size": 2, "schedule": schedule}})
    found = compare(pool2, tables)
    assert max(found.values()) < TOLERANCE, found


BLOCKS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "mot, biases": (
        "mot",
        {"model": {"attention_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": True}},
    ),
    "mot, latent": ("mot", {"moe": {"layers": [1, 3], "mla": {"kv_rank": 8, "nope_dim": 4, "v_dim": 8}}}),
    "mot, windows": ("mot", {"model": {"sliding_window": 6, "layer_types": ["sliding", "full"]}}),
    "moma, latent": ("moma", {"moe": {"mla": {"kv_rank": 8, "nope_dim": 4, "v_dim": 8}}}),
    "mot, counted apart": ("mot", {"vlm": {"mot": {"positions": "modality"}}}),
}
"""Fusions around blocks of other kinds, and positions of each modality."""


@pytest.mark.slow
@pytest.mark.packages("ckpt", "moe", "pp", "vlm")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("name", BLOCKS)
def test_stages_of_other_blocks(name: str, schedule: str, pool2: WorkerPool) -> None:
    from ppkit import BASE, merged
    from seekit import MOE, seeing

    fusion, more = BLOCKS[name]
    if "moe" in more:
        more = {**more, "moe": {**MOE, **more["moe"]}}
    tables = merged(BASE, seeing(fusion), more, {"pp": {"size": 2, "schedule": schedule}})
    found = compare(pool2, tables)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.slow
@pytest.mark.packages("ckpt", "moe", "pp", "vlm")
@pytest.mark.parametrize("name", ["context ranks", "a ring"])
@pytest.mark.parametrize("fusion", ["moma", "mot"])
def test_experts_beside_context_ranks_inside_stages(fusion: str, name: str, pool4: WorkerPool) -> None:
    from ppkit import BASE, merged
    from seekit import MOE, seeing

    tables = merged(BASE, seeing(fusion), {"moe": MOE, "pp": {"size": 2, "schedule": "1f1b"}})
    found = compare(pool4, {**tables, "distributed": LAYOUTS[name]})
    assert max(found.values()) < TOLERANCE, found


LATER = {"stages": [{"start_step": 4, "modules": []}]}


@pytest.mark.parametrize(
    ("schedule", "freeze"),
    [
        ("1f1b", {"modules": ["connector"]}),
        ("zbv", {"modules": ["connector"]}),
        ("interleaved_zero_bubble", LATER),
        pytest.param("1f1b", LATER, marks=pytest.mark.slow),
        pytest.param("zbv", {"modules": ["connector", "decoder.embed"]}, marks=pytest.mark.slow),
    ],
)
def test_what_travels_need_not_train(schedule: str, freeze: dict[str, Any], pool2: WorkerPool) -> None:
    """Visual tokens without a gradient beside hidden states that have one; an encoder that trains later."""
    found = compare(pool2, of("frozen encoder", pp={"size": 2, "schedule": schedule}, freeze=freeze))
    assert max(found.values()) < TOLERANCE, found


def remembered(tables: dict[str, Any]) -> dict[str, str]:
    """What a checkpoint of this rank would say of what trains."""
    from ppkit import run

    from forge_vlm.extras import aliases_at

    return aliases_at(run(tables).session, 1)


def test_all_stages_remember_alike_what_trained(pool2: WorkerPool) -> None:
    """A stage that has no block that is frozen does not say that all are trained."""
    freeze = {"modules": ["encoder", "decoder.layers.0"]}
    tables = of("joint decoder", freeze=freeze, train={"max_steps": 1}, eval={"at_end": False})
    whole = remembered(tables)
    assert whole == {"encoder": "frozen", "connector": "trained", "decoder": "part frozen"}
    assert pool2.run(remembered, {**tables, "pp": {"size": 2}}) == [whole, whole]


def kept(folder: str, tables: dict[str, Any], steps: int) -> dict[str, Any]:
    """Losses and weights of a run up to an update, in a folder that it goes on from."""
    from ppkit import merged, run

    checkpoint = {"interval": 2, "mode": "sync", "keep_last": 0}
    named = {"run": {"name": "a"}, "checkpoint": checkpoint, "scheduler": {"name": "constant"}}
    done = run(merged(tables, named, {"train": {"max_steps": steps}}), folder)
    return {"losses": done.losses, "weights": done.weights}


@pytest.mark.packages("ckpt", "moe", "pp", "vlm")
@pytest.mark.parametrize("fusion", ["cross attention", pytest.param("joint decoder", marks=pytest.mark.slow)])
def test_saved_by_stages_and_gone_on_with(fusion: str, pool2: WorkerPool, tmp_path: Path) -> None:
    tables = of(fusion, freeze={"modules": ["encoder", "decoder.layers.0"]})
    layouts = {"one": {}, "two": {"pp": {"size": 2, "schedule": "zbv"}}}
    straight = kept(str(tmp_path), tables, 6)
    for name, layout in layouts.items():
        folder = tmp_path / name
        folder.mkdir()
        pool2.run(kept, str(folder), {**tables, "pp": {"size": 2, "schedule": "1f1b"}}, 4)
        both = {**tables, **layout}
        ranks = pool2.run(kept, str(folder), both, 6) if layout else [kept(str(folder), both, 6)]
        for rank in ranks:
            assert rank["losses"] == pytest.approx(straight["losses"][4:], rel=TOLERANCE)
            for key, value in rank["weights"].items():
                torch.testing.assert_close(value, straight["weights"][key], rtol=TOLERANCE, atol=TOLERANCE)


def samples(folder: Path, **more: dict[str, Any]) -> dict[str, Any]:
    """Tables of a run on pictures in a folder, whose held-out questions are answered, too."""
    from vlmkit import tables
    from vlmsizes import write_sizes

    if not folder.exists():
        folder.mkdir()
        write_sizes(folder)
    train = {"grad_accum_steps": 4, "max_steps": 4, "batch_size": 1, "seq_len": 48}
    found = tables(folder, train=train, **more)
    found["data"]["holdout"] = 0.3
    found["model"]["n_layers"] = 4
    found["vlm"]["answer_tokens"] = 3
    found["eval"] = {"steps": 2, "interval": 2, "batch_size": 2}
    return found


def answered(tables: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a run, answers to held-out questions among them."""
    from ppkit import plain

    from forge_core.plugins import Plugins
    from forge_core.testing import run_tiny, tiny_config

    plugins = Plugins()
    run = run_tiny(tiny_config(plugins=plugins, **tables), plugins)
    position = run.session.stream.position
    return {**plain(run), "match": run.metric("eval/exact_match"), "position": position}


@pytest.mark.parametrize("kind", ["joint", "cross_attention", "patches", "tiles"])
def test_pictures_of_a_folder(kind: str, pool2: WorkerPool, tmp_path: Path) -> None:
    """From files to losses, evaluation and answers; images of one size, of many, and in tiles."""
    from vlmsizes import PACKED, TILED

    more = {"patches": PACKED, "tiles": TILED}.get(kind, {"vlm": {"fusion": kind}})
    tables = samples(tmp_path / "pictures", **more)
    whole = answered(tables)
    assert whole["match"]
    for rank in pool2.run(answered, {**tables, "pp": {"size": 2, "schedule": "interleaved_1f1b"}}):
        assert rank["losses"] == pytest.approx(whole["losses"], rel=TOLERANCE)
        assert rank["norms"] == pytest.approx(whole["norms"], rel=TOLERANCE)
        assert rank["position"] == whole["position"]
        if rank["evaluations"]:
            assert rank["evaluations"] == pytest.approx(whole["evaluations"], rel=TOLERANCE)
            assert rank["match"] == whole["match"]


def continued(tables: dict[str, Any]) -> list[list[int]]:
    """What a trained model greedily says after two rows with images, one of them longer."""
    from ppkit import run
    from seekit import Pictures

    from forge_vlm.generate import Prompts, generate
    from forge_vlm.model import IMAGE_KEYS

    session = run(tables).session
    batch = Pictures(session).batch(1004)
    images = {name: batch[name] for name in IMAGE_KEYS if name in batch}
    prompts = Prompts(tokens=batch["tokens"], lengths=[14, 16], images=images)
    return generate(session.model, prompts, max_new_tokens=6, temperature=0.0)


@pytest.mark.parametrize("fusion", ["joint decoder", "cross attention"])
def test_generation(fusion: str, pool2: WorkerPool) -> None:
    tables = of(fusion, model={"max_seq_len": 32})
    whole = continued(tables)
    for rank in pool2.run(continued, {**tables, "pp": {"size": 2, "schedule": "zbv"}}):
        assert rank == whole


def pictured(tables: dict[str, Any]) -> dict[str, Any]:
    """Losses, and whether each part of this rank got the contents of pictures."""
    import forge_pp.plugin
    import forge_vlm.plugin
    from forge_core.contract import Observer
    from forge_core.testing import isolated_plugins, plugin_object, run_tiny, tiny_config

    got: set[bool] = set()

    class Looks(Observer):
        def train_begin(self, session: Any) -> None:
            forward = getattr(session.forward, "inner", session.forward)
            part = forward.part

            def noted(model: Any, batch: Any, *rest: Any, **named: Any) -> Any:
                got.add(not batch["pixels"].is_meta)
                return part(model, batch, *rest, **named)

            forward.part = noted

    known = {
        "pp": forge_pp.plugin,
        "vlm": forge_vlm.plugin,
        "looks": plugin_object(forge_observers=lambda: [Looks()]),
    }
    plugins = isolated_plugins({name: plugin for name, plugin in known.items() if name in tables})
    run = run_tiny(tiny_config(plugins=plugins, **tables), plugins)
    return {"losses": run.losses, "got": sorted(got), "position": run.session.stream.position}


def test_pictures_stay_on_the_first_stage(pool2: WorkerPool, tmp_path: Path) -> None:
    tables = {**samples(tmp_path / "pictures"), "looks": {}}
    tables["eval"] = {"at_end": False}
    whole = pictured(tables)
    first, second = pool2.run(pictured, {**tables, "pp": {"size": 2, "schedule": "gpipe"}})
    assert (whole["got"], first["got"], second["got"]) == ([True], [True], [False])
    for rank in (first, second):
        assert rank["losses"] == pytest.approx(whole["losses"], rel=TOLERANCE)
        assert rank["position"] == whole["position"]


def test_weights_of_a_text_model_go_into_the_decoder_of_each_stage() -> None:
    from ppkit import plugins_of

    from forge_core.loop.naming import named_parameters
    from forge_core.testing import tiny_config, tiny_session
    from forge_pp.parts import Cut, staged

    tables = of("mixture of transformers")
    plugins = plugins_of(tables)
    with tiny_session(tiny_config(plugins=plugins, **tables), plugins) as session:
        model: Any = session.model
        cut = Cut((0, 2), ("0", "1", "2", "3"))
        first, last = (named_parameters(staged(model, cut, [stage]).text_part) for stage in (0, 1))
        assert first.keys().isdisjoint(last)
        assert first.keys() | last.keys() == named_parameters(model.decoder).keys()


def test_stages_share_the_work_of_seeing() -> None:
    """An encoder counts with the tokens that it sees, and layers make room for it on the first stage."""
    from ppkit import plugins_of

    from forge_core.testing import tiny_config, tiny_session
    from forge_pp.costs import find_cut, work

    begins = []
    for dim in (16, 128):
        tables = of("joint decoder", pp={"size": 2}, model={"n_layers": 8})
        tables["vlm"]["encoder"]["vit"] |= {"dim": dim, "n_layers": 2}
        config = tiny_config(plugins=plugins_of(tables), world_size=2, **tables)
        one = {name: keys for name, keys in tables.items() if name != "pp"}
        plugins = plugins_of(one)
        with tiny_session(tiny_config(plugins=plugins, **one), plugins) as session:
            encoder: Any = session.model.encoder
            layers = [m for m in encoder.modules() if isinstance(m, torch.nn.Linear)]
            # two images of four tokens in a sequence of 16 positions
            share = 2 * 4 / 16
            assert work(encoder) >= 2 * share * sum(layer.weight.numel() for layer in layers)
            session.config = config
            begins.append(find_cut(session, session.model).begins[1])
    assert begins[1] < begins[0]
