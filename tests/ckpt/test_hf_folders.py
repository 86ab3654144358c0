"""From a run to a Hugging Face folder and back, and everything that is refused on the way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import ckptkit
import pytest
import tomli
import torch
from torch import Tensor, nn

from forge_ckpt.errors import CheckpointError, DamagedError
from forge_ckpt.hf import weights as weights_module
from forge_ckpt.hf.exporting import export_hf
from forge_ckpt.hf.folders import TensorFolder
from forge_ckpt.hf.importing import import_hf
from forge_ckpt.hf.opening import kind_of, open_model
from forge_ckpt.hf.weights import Info, InMemory
from forge_ckpt.hf.writing import new_folder, parse_size, plan_shards, write_weights
from forge_core.config.tables import ModelConfig
from forge_core.contract import Transform
from forge_core.errors import ConfigError, ForgeError
from forge_core.plugins import Candidate, Plugins
from forge_core.testing import TinyRun, plugin_object, run_tiny, tiny_config, tiny_session

MODEL = {"dim": 16, "n_layers": 2, "n_heads": 2, "ffn_hidden_dim": 32, "vocab_size": 64}


def only_checkpoint() -> Plugins:
    return ckptkit.plugins_for()


def trained(folder: Path, **tables: Any) -> TinyRun:
    """A run of two updates with checkpoints in `folder`."""
    return ckptkit.run(folder, steps=2, **tables)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return trained(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def exported(ran: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hf") / "out"
    export_hf(open_model(ran.folder, plugins=only_checkpoint()), out)
    return out


@pytest.fixture
def hf(exported: Path, tmp_path: Path) -> Path:
    """A Hugging Face folder that a test may damage."""
    return Path(shutil.copytree(exported, tmp_path / "hf"))


def edit(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def tensors(folder: Path) -> dict[str, Tensor]:
    found = TensorFolder(folder)
    return {name: found.read(name).clone() for name in found.names()}


def put(folder: Path, weights: dict[str, Tensor]) -> None:
    """Replace the weights of a folder."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    write_weights(InMemory(weights), list(weights), folder)


def starting(place: Path, model: dict[str, Any] | None = None, **tables: Any) -> dict[str, Tensor]:
    """Weights of a run before its first update, started from a folder."""
    plugins = only_checkpoint()
    tables = {"checkpoint": {}, **tables}
    keys = {**MODEL, "init_from": str(place), **(model or {})}
    config = tiny_config(plugins=plugins, model=keys, **tables)
    with tiny_session(config, plugins) as session:
        return {name: p.detach().clone() for name, p in session.model.named_parameters()}


# There and back
# ---------------------------------------------------------------------------------------------------------


def test_names_and_values_of_an_export(ran: TinyRun, exported: Path) -> None:
    found = tensors(exported)
    assert torch.equal(found["model.embed_tokens.weight"], ran.weights["embed.weight"])
    name = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(found[name], ran.weights["layers.1.attn.o_proj.weight"])
    norm = found["model.layers.0.post_attention_layernorm.weight"]
    assert torch.equal(norm, ran.weights["layers.0.mlp_norm.weight"])
    assert len(found) == len(ran.weights)
    config = json.loads((exported / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert config["dtype"] == config["torch_dtype"] == "float32"


@pytest.mark.parametrize("source", ["hugging face", "imported", "checkpoint"])
def test_a_run_starts_from_any_folder_with_its_weights(
    source: str, ran: TinyRun, hf: Path, tmp_path: Path
) -> None:
    place = {"hugging face": hf, "imported": tmp_path / "ours", "checkpoint": ran.folder}[source]
    if source == "imported":
        import_hf(hf, place)
    assert kind_of(place) == source
    found = starting(place)
    assert found.keys() == ran.weights.keys()
    assert all(torch.equal(found[name], ran.weights[name]) for name in found)


def test_what_is_imported_is_a_table_to_build_on(hf: Path, tmp_path: Path) -> None:
    written = import_hf(hf, tmp_path / "ours", max_shard_size="3KB")
    table = tomli.loads((tmp_path / "ours/model.toml").read_text())
    assert table["model"]["dim"] == 16
    assert table["model"]["n_heads"] == 2
    assert (tmp_path / "ours/model.safetensors.index.json").is_file()
    assert written.tensors == 21
    only = import_hf(hf, tmp_path / "table", table_only=True)
    assert only.tensors == 0
    assert not list((tmp_path / "table").glob("*.safetensors"))
    assert (tmp_path / "table/model.toml").read_text().replace("table", "ours") == (
        tmp_path / "ours/model.toml"
    ).read_text()


def test_an_export_of_an_import_is_the_folder_it_came_from(hf: Path, tmp_path: Path) -> None:
    import_hf(hf, tmp_path / "ours")
    export_hf(open_model(tmp_path / "ours", plugins=only_checkpoint()), tmp_path / "back")
    one, other = tensors(hf), tensors(tmp_path / "back")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    first, second = (json.loads((path / "config.json").read_text()) for path in (hf, tmp_path / "back"))
    assert first == second


def test_a_tied_head_is_neither_written_nor_asked_for(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", model={"tie_embeddings": True})
    export_hf(open_model(run.folder, plugins=only_checkpoint()), tmp_path / "hf")
    found = tensors(tmp_path / "hf")
    assert "lm_head.weight" not in found
    tied = {"tie_embeddings": True}
    assert torch.equal(starting(tmp_path / "hf", tied)["embed.weight"], run.weights["embed.weight"])
    put(tmp_path / "hf", {**found, "lm_head.weight": found["model.embed_tokens.weight"]})
    assert torch.equal(starting(tmp_path / "hf", tied)["embed.weight"], run.weights["embed.weight"])
    import_hf(tmp_path / "hf", tmp_path / "ours")
    assert "head.weight" not in tensors(tmp_path / "ours")


def test_dtype_is_stated_and_kept(ran: TinyRun, tmp_path: Path) -> None:
    opened = open_model(ran.folder, plugins=only_checkpoint())
    export_hf(opened, tmp_path / "bf16", dtype="bf16")
    config = json.loads((tmp_path / "bf16/config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    found = tensors(tmp_path / "bf16")
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    expected = ran.weights["head.weight"].bfloat16()
    assert torch.equal(found["lm_head.weight"], expected)
    assert torch.equal(starting(tmp_path / "bf16")["head.weight"], expected.float())
    with pytest.raises(CheckpointError, match="'int4' is no floating-point type"):
        export_hf(opened, tmp_path / "no", dtype="int4")


def test_schedule_free_gives_its_average(tmp_path: Path) -> None:
    run = trained(
        tmp_path, optimizer={"name": "schedule_free_adamw", "lr": 0.1}, scheduler={"name": "constant"}
    )
    optimizer: Any = run.session.optimizers["main"].optimizer
    weights = open_model(run.folder, plugins=only_checkpoint()).weights
    trained_at = {n: p.detach().clone() for n, p in run.session.model.named_parameters()}
    optimizer.eval()
    average = {n: p.detach().clone() for n, p in run.session.model.named_parameters()}
    assert not torch.equal(average["head.weight"], trained_at["head.weight"])
    for name, expected in average.items():
        torch.testing.assert_close(weights.read(name), expected, rtol=1e-6, atol=1e-7)


def test_the_byte_tokenizer_gives_the_same_ids(exported: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from forge_core.data.tokenizer import ByteTokenizer, HFTokenizer

    ours, theirs = ByteTokenizer(), HFTokenizer(exported)
    assert (theirs.vocab_size, theirs.eos_id) == (257, 256)
    text = "def f(x):\n\treturn  x  # größer, 数学, \x00\x7f \U0001f600"
    assert theirs.encode(text) == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    backend = tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json"))
    assert [backend.encode(chr(i)).ids for i in range(128)] == [[i] for i in range(128)]
    assert json.loads((exported / "config.json").read_text())["eos_token_id"] is None, "64 rows have no 256"


# One tensor at a time, whole or not at all
# ---------------------------------------------------------------------------------------------------------


class Counting(InMemory):
    """Makes each tensor when it is read, and notes how many bytes of them are alive at once."""

    alive = 0
    most = 0

    def read(self, name: str) -> Tensor:
        import weakref

        tensor = super().read(name).clone()
        cls = type(self)
        size = tensor.numel() * tensor.element_size()
        cls.alive += size
        cls.most = max(cls.most, cls.alive)
        weakref.finalize(tensor, lambda: setattr(cls, "alive", cls.alive - size))
        return tensor


def test_few_tensors_are_in_memory_at_a_time(ran: TinyRun, tmp_path: Path) -> None:
    opened = open_model(ran.folder, plugins=only_checkpoint())
    weights = Counting(dict(ran.weights))
    export_hf(attrs.evolve(opened, weights=weights), tmp_path / "hf")
    largest = max(t.numel() * t.element_size() for t in ran.weights.values())
    total = sum(t.numel() * t.element_size() for t in ran.weights.values())
    assert Counting.most <= 2 * largest < total / 2


def test_shards_keep_to_their_size_and_nothing_is_lost(ran: TinyRun, tmp_path: Path) -> None:
    opened = open_model(ran.folder, plugins=only_checkpoint())
    export_hf(opened, tmp_path / "hf", max_shard_size="5000")
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    found = tensors(tmp_path / "hf")
    sizes = [sum(found[n].numel() * 4 for n, f in index["weight_map"].items() if f == file) for file in files]
    assert max(sizes) <= 5000
    assert sum(sizes) == index["metadata"]["total_size"]
    assert torch.equal(found["lm_head.weight"], ran.weights["head.weight"])


def test_files_are_those_of_the_safetensors_package(exported: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    theirs = safetensors.load_file(exported / "model.safetensors")
    ours = tensors(exported)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_plan_of_shards() -> None:
    infos = {name: Info(torch.float32, (n,)) for name, n in {"a": 2, "b": 3, "c": 9, "d": 1, "e": 1}.items()}
    shards = plan_shards(infos, 20)
    assert [list(shard.infos) for shard in shards] == [["a", "b"], ["c"], ["d", "e"]]
    assert [shard.file for shard in plan_shards(infos, 1000)] == ["model.safetensors"]
    assert (parse_size("5GB"), parse_size("1 MiB"), parse_size("300")) == (5 * 10**9, 1 << 20, 300)
    for wrong in ("5 apples", "GB", "0", "inf"):
        with pytest.raises(CheckpointError):
            parse_size(wrong)


def test_an_error_in_the_middle_leaves_nothing(
    ran: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_model(ran.folder, plugins=only_checkpoint())

    class Broken(InMemory):
        def read(self, name: str) -> Tensor:
            if name == "head.weight":
                raise OSError(28, "No space left on device")
            return super().read(name)

    broken = attrs.evolve(opened, weights=Broken(dict(ran.weights)))
    with pytest.raises(CheckpointError, match="No space left"):
        export_hf(broken, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("mine")
    with pytest.raises(CheckpointError, match="taken is there already"):
        export_hf(opened, tmp_path / "taken")
    assert (tmp_path / "taken/file").read_text() == "mine"
    monkeypatch.chdir(tmp_path)
    for nameless in (".", "new/.."):
        with pytest.raises(CheckpointError, match="is no name for a new folder"):
            export_hf(opened, Path(nameless))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("link", "link is there already"),
        ("dangling", "dangling is there already"),
        ("disk", "disk is where a file system is mounted"),
        ("n" * 300, "cannot write .*File name too long"),
    ],
)
def test_a_place_that_cannot_be_had_is_told_before_anything_is_written(
    place: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    (tmp_path / "dangling").symlink_to("nowhere")
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "disk")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=words), new_folder(tmp_path / place):
        pytest.fail("it was not told")
    assert sorted(tmp_path.iterdir()) == before


# Refusals
# ---------------------------------------------------------------------------------------------------------


class Trap:
    """Would leave a file behind if a pickle with it were ever loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_pickles_are_refused_and_not_opened(
    hf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import pickle

    monkeypatch.chdir(tmp_path)
    (hf / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "training_args.bin"):
        (hf / name).write_bytes(pickle.dumps(Trap()))
    for act in (lambda: import_hf(hf, tmp_path / "ours"), lambda: starting(hf), lambda: open_model(hf)):
        with pytest.raises(CheckpointError, match=r"pytorch_model.bin.*can run any code") as caught:
            act()
        assert "save_pretrained" in caught.value.hint
        assert caught.value.exit_status == 2
    (hf / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DamagedError, match="not a whole safetensors file"):
        open_model(hf)
    assert not (tmp_path / "executed").exists()


def test_code_of_a_folder_is_never_run(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (hf / "modeling_mine.py").write_text("import os; os.mkdir('executed')")
    edit(hf / "config.json", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    with pytest.raises(CheckpointError, match="auto_map") as caught:
        import_hf(hf, tmp_path / "ours")
    assert "remove auto_map" in caught.value.hint
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_type": "lama"}, "of type 'lama', which nothing here knows"),
        ({"model_type": None}, "of type None"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_act": "xielu"}, "activation 'xielu'"),
    ],
)
def test_what_cannot_be_read_is_named(keys: dict[str, Any], words: str, hf: Path, tmp_path: Path) -> None:
    edit(hf / "config.json", **keys)
    with pytest.raises(CheckpointError, match=words):
        import_hf(hf, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda found: found.__delitem__(name)


def extra(found: dict[str, Tensor]) -> None:
    found["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
    found["model.vision.weight"] = torch.zeros(2)


def reshaped(found: dict[str, Tensor]) -> None:
    found["model.norm.weight"] = torch.zeros(17)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("model.norm.weight"), r"lacks 1: norm.weight"),
        (extra, r"has 2 that the model does not: model.vision.weight, layers.0.attn.q_proj.bias"),
        (reshaped, r"norm.weight is 17 in the folder, 16 in the model"),
    ],
)
def test_tensors_that_do_not_fit_are_listed(
    damage: Callable[[dict[str, Tensor]], None], words: str, hf: Path, tmp_path: Path
) -> None:
    found = tensors(hf)
    damage(found)
    put(hf, found)
    for act in (lambda: starting(hf), lambda: import_hf(hf, tmp_path / "ours")):
        with pytest.raises(CheckpointError, match=words):
            act()


def test_a_part_can_be_taken_on_request(hf: Path, ran: TinyRun) -> None:
    found = tensors(hf)
    without("model.norm.weight")(found)
    extra(found)
    put(hf, found)
    weights = starting(hf, checkpoint={"init_partial": True})
    assert torch.equal(weights["norm.weight"], torch.ones(16))
    assert torch.equal(weights["head.weight"], ran.weights["head.weight"])


class Beside(nn.Module):
    """A matrix and a thin one beside it."""

    def __init__(self, base: nn.Module, name: str = "base") -> None:
        super().__init__()
        self.add_module(name, base)
        self.thin = nn.Linear(16, 1, bias=False)


def start_with(transform: Callable[[nn.Module], None], place: Path) -> dict[str, Tensor]:
    """Weights that a run starts with where a plugin changes modules of its model."""

    def apply(model: nn.Module) -> nn.Module:
        transform(model)
        return model

    mine = plugin_object(forge_model_transforms=[Transform(phase="modify", name="mine", apply=apply)])
    both = [*only_checkpoint().installed, Candidate(name="mine", source="test", version="0", loaded=mine)]
    plugins = Plugins(installed=both)
    tables: dict[str, Any] = {"checkpoint": {}, "mine": {}, "model": {**MODEL, "init_from": str(place)}}
    with tiny_session(tiny_config(plugins=plugins, **tables), plugins) as session:
        return {name: p.detach().clone() for name, p in session.model.named_parameters()}


def test_what_a_plugin_adds_need_not_be_there(
    hf: Path, ran: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    def beside(model: Any) -> None:
        model.layers["0"].attn.o_proj = Beside(model.layers["0"].attn.o_proj)

    with caplog.at_level("WARNING", logger="forge"):
        weights = start_with(beside, hf)
    old = ran.weights["layers.0.attn.o_proj.weight"]
    assert torch.equal(weights["layers.0.attn.o_proj.base.weight"], old)
    assert (
        "21 parameters filled, 1 as they were initialised (layers.0.attn.o_proj.thin.weight)" in caplog.text
    )


def test_what_a_plugin_puts_in_place_of_a_parameter_must_be_there(hf: Path) -> None:
    def instead(model: Any) -> None:
        model.layers["0"].attn.o_proj = Beside(nn.Linear(16, 16, bias=False))

    with pytest.raises(CheckpointError, match=r"(?s)lacks 2: layers.0.attn.o_proj.base.weight.*init_partial"):
        start_with(instead, hf)


def test_what_is_missing_of_the_model_itself_is_missed_beside_what_a_plugin_adds(hf: Path) -> None:
    def beside(model: Any) -> None:
        model.layers["0"].attn.o_proj = Beside(model.layers["0"].attn.o_proj)

    found = tensors(hf)
    without("model.norm.weight")(found)
    put(hf, found)
    with pytest.raises(CheckpointError, match=r"lacks 1: norm.weight"):
        start_with(beside, hf)


def test_another_model_is_named_key_by_key(hf: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        starting(hf, {"dim": 32, "qk_norm": True})
    assert "model.dim: 32, but the model in" in str(caught.value)
    assert "attention_scale" not in str(caught.value)
    assert "model.qk_norm: True" in str(caught.value)


def test_what_fits_all_the_same_is_told(hf: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="forge"):
        starting(hf, {"rope_theta": 5e5})
    assert "model.rope_theta is 500000.0" in caplog.text
    assert "21 parameters filled" in caplog.text


def test_a_model_without_an_architecture_says_what_is_lacking(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", model={"norm_type": "layernorm"})
    opened = open_model(run.folder, plugins=only_checkpoint())
    with pytest.raises(CheckpointError, match=r"has no word for model\.norm_type = layernorm"):
        export_hf(opened, tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"qwen2 .*model\.attention_bias = False"):
        export_hf(open_model(run.folder, plugins=only_checkpoint()), tmp_path / "hf", model_type="qwen2")
    with pytest.raises(CheckpointError, match="no architecture is called 'mistrall'") as caught:
        export_hf(opened, tmp_path / "hf", model_type="mistrall")
    assert "mistral" in caught.value.hint


def test_a_plugin_s_family_is_found_by_the_parameters_it_adds(ran: TinyRun, tmp_path: Path) -> None:
    """The dense families have words for the table of this model, and no rule for what it has besides."""
    from forge_core.contract import Architecture
    from forge_core.contract.architecture import rename
    from forge_core.model.architectures import ARCHITECTURES, decoder_rules
    from forge_core.testing import plugin_object

    def rules(config: Any) -> list[Any]:
        return [*decoder_rules(config[ModelConfig]), rename("model.gate", "layers.0.gate")]

    llama = ARCHITECTURES["llama"]
    gated = Architecture(class_name="Gated", read=llama.read, write=llama.write, rules=rules)
    family = plugin_object(forge_architectures={"gated": gated})
    weights = InMemory({**ran.weights, "layers.0.gate": torch.ones(3)})
    opened = attrs.evolve(open_model(ran.folder, plugins=only_checkpoint()), weights=weights)
    with pytest.raises(CheckpointError, match=r"llama has no rule for layers\.0\.gate"):
        export_hf(opened, tmp_path / "no", plugins=only_checkpoint())
    export_hf(opened, tmp_path / "hf", plugins=ckptkit.plugins_for(gated=family))
    assert json.loads((tmp_path / "hf/config.json").read_text())["architectures"] == ["Gated"]
    assert torch.equal(tensors(tmp_path / "hf")["model.gate"], torch.ones(3))


def test_damaged_folders(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=f"{place.name}"):
            open_model(place)
    whole = (hf / "model.safetensors").read_bytes()
    (hf / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(DamagedError, match="not a whole safetensors file"):
        open_model(hf)
    (hf / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "../other/model.safetensors"}}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedError, match="outside of its folder"):
        open_model(hf)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedError, match=r"00001-of-00002\.safetensors is missing"):
        open_model(hf)
    (hf / "config.json").write_text("{")
    with pytest.raises(DamagedError, match="is not JSON"):
        open_model(hf)


def test_init_from_needs_the_table() -> None:
    with pytest.raises(ConfigError, match="no plugin of this run reads weights"):
        tiny_config(model={"init_from": "x"})


def test_a_resume_beats_init_from(hf: Path, tmp_path: Path, ran: TinyRun) -> None:
    first = trained(tmp_path, model={"init_from": str(hf)})
    again = trained(tmp_path, model={"init_from": str(hf)})
    assert len(again.losses) == 0
    assert all(torch.equal(again.weights[name], first.weights[name]) for name in first.weights)
    assert not torch.equal(first.weights["head.weight"], ran.weights["head.weight"])


def test_training_on_goes_from_the_imported_loss(hf: Path, ran: TinyRun, tmp_path: Path) -> None:
    """The first loss of a run that starts from a folder is that of a run that trains on from there."""
    plugins = only_checkpoint()
    tables = {"model": {**MODEL, "init_from": str(hf)}, "checkpoint": {}}
    started = run_tiny(tiny_config(plugins=plugins, **tables), plugins)
    fresh = run_tiny()
    assert started.losses[0] < fresh.losses[0]


def test_a_fused_tensor_is_split_and_experts_are_stacked() -> None:
    """A family with every kind of rule, both ways."""
    from forge_core.contract.architecture import permute, rename, split, stack

    rules = [
        rename("t.{layer}.norm", "layers.{layer}.norm"),
        split("t.{layer}.qkv", [f"layers.{{layer}}.{x}" for x in "qkv"], (4, 2, 2)),
        stack("t.{layer}.experts.{expert}.w", "layers.{layer}.w", 3),
        permute("t.{layer}.out", "layers.{layer}.out", (1, 0)),
        permute(
            "t.{layer}.rows",
            "layers.{layer}.rows",
            (0, 2, 1, 3),
            shape=(2, 3, 2, 5),
            theirs_shape=(12, 5),
            ours_shape=(12, 5),
        ),
    ]
    random = torch.Generator().manual_seed(0)
    shapes = {"norm": (3,), "qkv": (8, 5), "out": (2, 7), "rows": (12, 5)}
    shapes |= {f"experts.{e}.w": (4, 5) for e in range(3)}
    theirs = {
        f"t.{i}.{name}": torch.randn(shape, generator=random)
        for i in range(2)
        for name, shape in shapes.items()
    }
    ours = weights_module.Converted(InMemory(theirs), rules, theirs=True)
    found = {name: ours.read(name) for name in ours.names()}
    assert torch.equal(found["layers.1.k"], theirs["t.1.qkv"][4:6])
    assert torch.equal(found["layers.0.w"][2], theirs["t.0.experts.2.w"])
    assert torch.equal(found["layers.0.out"], theirs["t.0.out"].T)
    # row (head, pair, half) of theirs is row (head, half, pair) of ours: head 1, pair 2, half 0
    assert torch.equal(found["layers.0.rows"][1 * 6 + 0 * 3 + 2], theirs["t.0.rows"][1 * 6 + 2 * 2 + 0])
    assert all(ours.info(name) == Info(t.dtype, tuple(t.shape)) for name, t in found.items())
    back = weights_module.Converted(InMemory(found), rules, theirs=False)
    assert set(back.names()) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(back.read(name), tensor), name
        assert back.info(name).shape == tuple(tensor.shape)
    del theirs["t.1.experts.1.w"]
    assert weights_module.Converted(InMemory(theirs), rules, theirs=True).missing() == ["t.1.experts.1.w"]
    with pytest.raises(ForgeError, match="does not split"):
        weights_module.Converted(InMemory({"t.0.qkv": torch.zeros(9, 5)}), rules, theirs=True).info(
            "layers.0.q"
        )


def test_the_model_is_the_folder_s(exported: Path) -> None:
    opened = open_model(exported, plugins=only_checkpoint())
    assert opened.config[ModelConfig].dim == 16
    assert opened.tokenizer == exported


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
