"""Models that see whose tokens are bytes, trained here and exported: what processors and models of
transformers make of a prompt and a picture is what ours make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from paritykit import SEEING, assert_close, loaded, randomise
from vlmfolders import photograph

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.packages("ckpt", "vlm"),
    pytest.mark.filterwarnings("ignore"),
]

TOWER = {"image_size": 16, "patch_size": 4, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
GEMMA = {
    "norm_unit_offset": True,
    "embedding_scale": 32**0.5,
    "activation": "gelu_tanh",
    "gated_mlp": True,
    "tie_embeddings": True,
    "norm_eps": 1e-6,
}
SIGLIP = {"name": "siglip", "siglip": TOWER}
PALIGEMMA = {
    "model": GEMMA,
    "vlm": {
        "joint": {"bidirectional": "prefix"},
        "encoder": SIGLIP,
        "connector": {"name": "linear"},
    },
}
FAKE, WHOLE = "<fake_token_around_image>", "<global-img>"
IDEFICS = {
    "vlm": {
        "before_image": FAKE + WHOLE,
        "after_image": FAKE,
        "encoder": {"name": "idefics3", "idefics3": TOWER},
        "connector": {"name": "pixel_shuffle"},
    },
}
PIECES = {
    "max_images": 7,
    "pieces": {"before": FAKE + "<row_{row}_col_{column}>", "after_row": "\n", "after_all": "\n"},
    "encoder": {"idefics3": {"longest_edge": 48, "split": True}},
}
QWEN = {"model": {"attention_bias": True, "rope_sections": [4, 2, 2]}}
WINDOWED = {"norm": "rmsnorm", "gated_mlp": True, "activation": "silu", "tokens_per_second": 2.0}
PLAIN = {"window": 0, "full_layers": [], "hidden_dim": 32}
QWEN_MARKED = {
    "before_image": "<|vision_start|>",
    "after_image": "<|vision_end|>",
    "encoder": {"patches": WINDOWED},
    "connector": {"patch_merger": {"norm": "rmsnorm"}},
}
MLLAMA = {
    "model": {"vocab_size": 257},
    "vlm": {
        "image_token_id": 257,
        "fusion": "gated_cross_attention",
        "gated_cross_attention": {"layers": [1], "extra_tokens": 8},
        "connector": {"name": "linear"},
    },
}
LLAVA = {"vlm": {"encoder": {"name": "clip", "clip": TOWER}, "connector": {"name": "mlp"}}}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llava": ("llava", LLAVA, {}),
    "paligemma": ("paligemma", PALIGEMMA, {}),
    "paligemma, marked": ("paligemma", PALIGEMMA, {"after_image": "<bos>"}),
    "idefics3": ("idefics3", IDEFICS, {}),
    "idefics3, in pieces": ("idefics3", IDEFICS, PIECES),
    "smolvlm": ("smolvlm", IDEFICS, {}),
    "qwen2_vl": ("qwen2_vl", QWEN, {"encoder": {"patches": PLAIN}}),
    "qwen2_5_vl, marked": ("qwen2_5_vl", QWEN, QWEN_MARKED),
    "mllama": ("mllama", MLLAMA, {}),
    "mllama, marked": ("mllama", MLLAMA, {"after_image": "<|begin_of_text|>"}),
}
"""`model_type`, tables of a run, and what is laid over its `[vlm]`."""
QUICK = ("paligemma, marked", "idefics3, in pieces", "qwen2_5_vl, marked", "mllama, marked")
IMAGES = {"mllama": "<|image|>", "qwen2_vl": "<|image_pad|>", "qwen2_5_vl": "<|image_pad|>"}


def tables_of(family: str) -> dict[str, Any]:
    """With the encoders of the kit, which is there where the package is."""
    from vlmkit import merged
    from vlmsizes import ENCODER, PACKED

    _, tables, vlm = FAMILIES[family]
    below: dict[str, Any] = PACKED if tables is QWEN else {}
    if tables is MLLAMA:
        below = {"vlm": {"encoder": {"name": "tiles", "tiles": ENCODER}}}
    return merged(merged(below, tables), {"vlm": vlm})


def trained(place: Path, tables: dict[str, Any]) -> Path:
    """Folder of a run of two updates on a photograph."""
    from vlmkit import config_of, merged

    from forge_core.plugins import Plugins
    from forge_core.testing import run_tiny

    record = {"image": "china.png", "prompt": "What is this? ", "answer": "A roof."}
    (place / "data.jsonl").write_text((json.dumps(record) + "\n") * 8, encoding="utf-8")
    photograph(place / "china.png")
    whole = merged(
        {
            "model": {"dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 257, "max_seq_len": 512},
            "vlm": {"max_images": 1, "encoder": {"frozen": False}},
            "train": {"dtype": "fp32", "seq_len": 400, "batch_size": 2, "max_steps": 2},
            "optimizer": {"lr": 0.01},
            "checkpoint": {"mode": "sync"},
        },
        tables,
    )
    plugins = Plugins()
    return run_tiny(config_of(place, plugins, **whole), plugins, folder=place / "runs").folder


def processor_of(folder: Path, name: str) -> Any:
    """The processor; of those that want torchvision for videos, the parts of it that pictures need."""
    if name in ("smolvlm", "qwen2_vl", "qwen2_5_vl"):
        auto = (transformers.AutoImageProcessor, transformers.AutoTokenizer)
        parts = [each.from_pretrained(folder) for each in auto]
        content = json.loads((folder / "processor_config.json").read_text(encoding="utf-8"))
        chat = json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))
        if name == "smolvlm":
            more = {"image_seq_len": content["image_seq_len"], **chat}
            return transformers.Idefics3Processor(*parts, **more)
        return WithoutVideos(*parts, **chat)
    return transformers.AutoProcessor.from_pretrained(folder)


class WithoutVideos(transformers.Qwen2VLProcessor):  # type: ignore[misc,name-defined]  # of a package without types
    """Qwen's processor as it is for pictures; videos want torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = (
            tokenizer.convert_tokens_to_ids(text) for text in (self.image_token, self.video_token)
        )
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


@pytest.mark.parametrize(
    "family",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES],
)
def test_prompts_and_answers_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    from PIL import Image

    from forge_ckpt.hf.exporting import export_hf
    from forge_ckpt.hf.opening import open_model
    from forge_ckpt.hf.start import tensors_of
    from forge_ckpt.hf.using import using
    from forge_ckpt.hf.weights import InMemory
    from forge_vlm.generate import Reading

    name = FAMILIES[family][0]
    opened = open_model(trained(tmp_path, tables_of(family)))
    with using(opened, dtype="fp32") as session:
        randomise(session.model, 3)
        weights = {name: tensor.clone() for name, tensor in tensors_of(session.model).items()}
    opened = attrs.evolve(opened, weights=InMemory(weights))
    assert export_hf(opened, tmp_path / "out", model_type=name).model_type == name
    processor = processor_of(tmp_path / "out", name)
    model = loaded(SEEING, tmp_path / "out")
    picture = tmp_path / "china.png"
    vlm = opened.config.get("vlm")
    around = name in ("llava", "qwen2_vl", "qwen2_5_vl") or (name == "mllama" and not vlm.after_image)
    image = IMAGES.get(name, "<image>")
    text = f"{vlm.before_image}{image}{vlm.after_image}" if around else image
    inputs = processor(text=f"{text}Wäs? ", images=Image.open(picture), return_tensors="pt")
    inputs.pop("labels", None)
    ids = inputs["input_ids"]
    answer = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    prompt = "Wäs? \n" if name == "paligemma" else "Wäs? "
    with using(opened, dtype="fp32") as session:
        asked = [{"prompt": prompt, "images": [str(picture)]}]
        batch = session.generator._batch(session, asked, 8)
        assert ids_of(batch, model.config.image_token_id) == ids[0].tolist()
        with torch.no_grad():
            assert_close(Reading(session.model, batch, 8).logits, model(**inputs).logits[:, -1])
        [expected] = session.generator.generate(session, asked, max_new_tokens=8, temperature=0.0)
        end = session.data.tokenizer.eos_id
        found = answer[: answer.index(end)] if end in answer else answer
        assert session.data.tokenizer.decode(found) == expected
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Wäs? "}]}]
    assert processor.apply_chat_template(chat, tokenize=False) == f"{text}Wäs? "


def ids_of(batch: Any, image: int) -> list[int]:
    """Ids of a prompt, as our generator reads it, with `image` where one stands."""
    row = batch.tokens[0, : batch.lengths[0]]
    index = batch.images["image_index"][0, : batch.lengths[0]]
    found: list[int] = torch.where(index >= 0, image, row).tolist()
    return found


def test_marks_that_a_processor_puts_and_the_model_never_saw_are_refused(tmp_path: Path) -> None:
    from vlmkit import merged

    from forge_ckpt.errors import RequestError
    from forge_ckpt.hf.exporting import export_hf
    from forge_ckpt.hf.opening import open_model

    place = trained(tmp_path, merged(IDEFICS, {"vlm": {"before_image": "", "after_image": ""}}))
    other = r"other text around pictures than vlm\.before_image = ''"
    with pytest.raises(RequestError, match=other) as raised:
        export_hf(open_model(place), tmp_path / "out", model_type="idefics3")
    assert f"--vlm.before_image='{FAKE}{WHOLE}' --vlm.after_image='{FAKE}'" in raised.value.hint
    assert not (tmp_path / "out").exists()
    # somebody who knows it may have the folder
    flags = [f"--vlm.before_image={FAKE}{WHOLE}", f"--vlm.after_image={FAKE}"]
    written = export_hf(open_model(place, flags), tmp_path / "out", model_type="idefics3")
    assert f"192 is the token {FAKE} (vlm.before_image)" in written.notices
    taken = open_model(place, [*flags, "--vlm.image_token_id=192"])
    with pytest.raises(RequestError, match=rf"{FAKE} .* and <image> .* have the same id 192"):
        export_hf(taken, tmp_path / "again", model_type="idefics3")


def test_marks_that_a_processor_cannot_take_are_refused(tmp_path: Path) -> None:
    from vlmkit import config_of, merged

    from forge_core.contract import UnsuitedError
    from forge_core.plugins import Plugins
    from forge_vlm.architectures import ARCHITECTURES

    tables = merged(PALIGEMMA, {"vlm": {"before_image": "See: "}})
    model = merged({"dim": 32, "n_layers": 2, "n_heads": 2}, tables["model"])
    config = config_of(tmp_path, Plugins(), **{**tables, "model": model, "train": {"seq_len": 64}})
    with pytest.raises(UnsuitedError, match=r"vlm\.before_image = 'See: '"):
        ARCHITECTURES["paligemma"].write(config)
