"""Models that see, trained from a folder of Hugging Face and written as one again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from paritykit import SEEING, assert_close, loaded, randomise
from vlmfamilies import (
    FAMILIES,
    IMAGE,
    our_logits,
    sample_for,
    their_logits,
    theirs,
    tokenizer,
)

from forge_core.commands.loading import load
from forge_core.plugins import Plugins
from forge_core.testing import TinyRun, run_tiny

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.packages("ckpt", "vlm"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """Questions in words of the tokenizer, with one picture, two or none."""
    folder = tmp_path / "samples"
    folder.mkdir()
    from vlmkit import mixed_records, write_samples

    records = mixed_records(16)
    for number, record in enumerate(records):
        mark = "<image> w5 <image> " if number % 4 == 2 else ""
        record |= {"prompt": f"{mark}w{number} w1 ", "answer": f"w{number + 20} w3"}
    return write_samples(folder, records)


def run(folder: Path, tables: dict[str, Any], *flags: str) -> TinyRun:
    """A run as somebody would write it, two updates long."""
    file = folder / "mine.toml"
    common: dict[str, Any] = {
        "run": {"name": "mine"},
        "train": {"device": "cpu", "dtype": "fp32", "batch_size": 2, "max_steps": 2},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"mode": "sync"},
        "eval": {"steps": 0, "sample": False},
    }
    for name, table in tables.items():
        common[name] = {**common.get(name, {}), **table} if isinstance(table, dict) else table
    file.write_text(tomli_w.dumps(common), encoding="utf-8")
    plugins = Plugins()
    config, _ = load(str(file), flags, plugins=plugins)
    return run_tiny(config, plugins, folder=folder / "runs")


@pytest.mark.parametrize("family", ["llava", "paligemma", "idefics 3"])
def test_an_imported_folder_trains_and_goes_back(
    family: str, tmp_path: Path, samples: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every weight comes from the folder, all but the frozen tower move, and transformers reads what is
    written as the model that was trained."""
    from forge_ckpt.hf.exporting import export_hf
    from forge_ckpt.hf.importing import import_hf
    from forge_ckpt.hf.opening import open_model
    from forge_ckpt.hf.start import tensors_of

    theirs(family).save_pretrained(tmp_path / "hf")
    tokenizer().save_pretrained(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "theirs")
    tables: dict[str, Any] = {
        "extends": "theirs/model.toml",
        "model": {"init_from": str(tmp_path / "theirs")},
        "vlm": {"max_images": 2},
        "data": {
            "source": "vlm/images",
            "path": str(samples),
            "tokenizer": str(tmp_path / "theirs"),
            "holdout": 0.0,
        },
    }
    caplog.set_level("WARNING")
    done = run(tmp_path, tables)
    start = open_model(tmp_path / "theirs")
    count = len(start.weights.names())
    assert f"{count} parameters filled" in caplog.text
    assert "it was" not in caplog.text
    trained = tensors_of(done.session.model)
    assert set(trained) == set(start.weights.names())
    same = {name for name in trained if torch.equal(trained[name].detach(), start.weights.read(name))}
    assert same == {name for name in trained if name.startswith("encoder.")}
    name = FAMILIES[family][0]
    assert export_hf(open_model(done.folder), tmp_path / "out", model_type=name).model_type == name
    model = loaded(SEEING, tmp_path / "out")
    given = sample_for(model.config)
    assert_close(our_logits(done.session.model.eval(), given), their_logits(model, given))
    assert model.config.image_token_id == IMAGE


BYTES_MODEL: dict[str, Any] = {
    "model": {"dim": 32, "n_layers": 2, "n_heads": 2},
    "vlm": {
        "encoder": {
            "name": "clip",
            "clip": {"image_size": 32, "patch_size": 8, "dim": 32, "n_layers": 2, "n_heads": 2},
        },
        "connector": {"name": "mlp"},
    },
    "train": {"seq_len": 64},
}
"""A LLaVA whose tokens are bytes."""


@pytest.mark.parametrize(
    ("vocabulary", "flags", "token"),
    [(257, [], 255), (257, ["--vlm.image_token_id=192"], 192), (300, [], 257)],
)
def test_a_model_of_bytes_answers_in_transformers(
    vocabulary: int, flags: list[str], token: int, tmp_path: Path, samples: Path, bytes_run: Any
) -> None:
    """Its processor puts the image where it stands, text keeps its bytes, and greedy answers are ours."""
    from PIL import Image

    from forge_ckpt.hf.exporting import export_hf
    from forge_ckpt.hf.opening import open_model
    from forge_ckpt.hf.using import generate, using
    from forge_core.data.tokenizer import load_tokenizer

    folder = bytes_run(vocabulary)
    opened = open_model(folder, flags)
    assert f"{token} is the token <image> (vlm.image_token_id)" in export_hf(opened, tmp_path / "out").notices
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    text, picture = "<image>ÿé? \xff\xfe", samples / "0.png"
    inputs = processor(text=text, images=Image.open(picture), return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == [token] * 16 + list(text[7:].encode())
    answer = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    with using(opened, dtype="fp32") as session:
        prompt = {"prompt": text, "images": [str(picture)]}
        [expected] = generate(session, [prompt], max_new_tokens=6, temperature=0.0)
    kept = [i for i in answer.tolist() if i < 256]
    assert bytes(kept).decode(errors="replace") == expected
    again = load_tokenizer(str(tmp_path / "out"))
    assert (again.eos_id, again.encode("<image>"), again.encode("é")) == (256, [token], [195, 169])
    assert open_model(tmp_path / "out").config.get("vlm").image_token_id == token


@pytest.mark.parametrize(("token", "what"), [(5, "it is byte 5"), (256, "it is the end of a text")])
def test_an_id_that_text_has_is_not_that_of_an_image(
    token: int, what: str, tmp_path: Path, bytes_run: Any
) -> None:
    from forge_ckpt.errors import RequestError
    from forge_ckpt.hf.exporting import export_hf
    from forge_ckpt.hf.opening import open_model

    opened = open_model(bytes_run(257), [f"--vlm.image_token_id={token}"])
    with pytest.raises(RequestError, match=what) as raised:
        export_hf(opened, tmp_path / "out")
    assert "--vlm.image_token_id=255" in raised.value.hint
    assert "192, 193, 245" in raised.value.hint
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def bytes_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of a run of two updates, by the size of its vocabulary."""
    from vlmkit import write_samples

    done: dict[int, Path] = {}

    def folder(vocabulary: int) -> Path:
        if vocabulary not in done:
            place = tmp_path_factory.mktemp("bytes")
            path = write_samples(place, [{"image": "0.png", "prompt": "q ", "answer": "a"}] * 8)
            tables = {
                **BYTES_MODEL,
                "model": {**BYTES_MODEL["model"], "vocab_size": vocabulary},
                "data": {"source": "vlm/images", "path": str(path), "holdout": 0.0},
            }
            done[vocabulary] = run(place, tables).folder
        return done[vocabulary]

    return folder


def test_an_encoder_of_no_family_is_said_first_and_alone(bytes_run: Any) -> None:
    """Nothing of text models, which are as far from it as can be."""
    from forge_ckpt.errors import RequestError
    from forge_ckpt.hf.architectures import choose
    from forge_ckpt.hf.opening import open_model

    opened = open_model(bytes_run(257), ["--vlm.encoder.name=vit", "--vlm.encoder.vit.patch_size=16"])
    with pytest.raises(
        RequestError, match=r"this model: no family has the encoder of vlm\.encoder"
    ) as raised:
        choose(opened.config, [*opened.weights.names(), "encoder.other"])
    assert "vit: clip is of LLaVA (connector mlp)" in raised.value.message
    assert not any(word in raised.value.message for word in ("qwen", "gemma", "has no word"))
    opened = open_model(bytes_run(257), ["--vlm.connector.name=linear"])
    with pytest.raises(RequestError, match=r"llava has two matrices, not .* = linear$"):
        choose(opened.config, opened.weights.names())
    with pytest.raises(RequestError, match="this model: llava has two matrices") as raised:
        choose(opened.config, [*opened.weights.names(), "encoder.other"])
    assert raised.value.message.count("; ") == 1, "no family fits better than another: two are named"


def test_an_export_says_first_what_is_in_the_way_of_the_nearest_family(tmp_path: Path) -> None:
    """A family that has rules for all parameters comes before text models, which have none for a tower."""
    from forge_ckpt.errors import RequestError
    from forge_ckpt.hf.architectures import choose
    from forge_ckpt.hf.opening import open_model

    theirs("llava").save_pretrained(tmp_path)
    opened = open_model(tmp_path, ["--vlm.image_token_id=500"])
    with pytest.raises(RequestError, match=r"is this model: vlm\.image_token_id = 500 is not in") as raised:
        choose(opened.config, opened.weights.names())
    assert "qwen" not in raised.value.message
    assert "--vlm.image_token_id=N" in raised.value.hint


def test_what_a_run_computes_otherwise_than_its_folder_is_told(tmp_path: Path) -> None:
    """Tensors fit all the same, so nothing else would show it."""
    from forge_ckpt.hf.opening import open_model
    from forge_ckpt.hf.start import told_differences

    theirs("llava").save_pretrained(tmp_path)
    flags = ["--vlm.encoder.clip.layer=-1", "--vlm.joint.bidirectional=image"]
    folder, run_config = open_model(tmp_path), open_model(tmp_path, flags).config
    assert told_differences(folder, folder.config) == []
    assert told_differences(folder, run_config) == [
        f"vlm.joint.bidirectional is 'image', in {tmp_path} it was 'none'",
        f"vlm.encoder.clip.layer is -1, in {tmp_path} it was -2",
    ]


def test_decoder_and_tower_start_from_folders_of_their_own(
    tmp_path: Path, samples: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A text model and a tower of SigLIP; the connector alone is new, and text is seen as it was."""
    text, tower = tmp_path / "text", tmp_path / "tower"
    config = transformers.LlamaConfig(**FAMILIES["llava"][1]["text_config"])
    language = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(language, 7)
    language.save_pretrained(text)
    tokenizer().save_pretrained(text)
    vision = FAMILIES["paligemma"][1]["vision_config"]
    transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**vision)).save_pretrained(tower)
    model = {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_hidden_dim": 48,
        "vocab_size": 99,
        "norm_eps": 1e-6,
        "max_seq_len": 64,
        "init_from": str(text),
    }
    data = {"source": "vlm/images", "path": str(samples), "tokenizer": str(text), "holdout": 0.0}
    encoder = {"name": "siglip", "siglip": {"path": str(tower)}}
    tables: dict[str, Any] = {
        "model": model,
        "data": data,
        "vlm": {"max_images": 2, "encoder": encoder},
        "train": {"seq_len": 48},
        "freeze": {"modules": ["encoder", "decoder"]},
    }
    caplog.set_level("INFO")
    done = run(tmp_path, tables)
    assert f"weights of {text}: {len(list(language.parameters()))} parameters filled" in caplog.text
    tokens = torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(0))
    mine: Any = done.session.model.eval()
    assert f"encoder: all {len(list(mine.encoder.parameters()))} weights" in caplog.text
    with torch.no_grad():
        assert_close(mine.logits(mine(tokens)), language(tokens).logits)
