"""Qwen2-VL and Qwen2.5-VL against transformers where videos are seen: patches, positions, logits, text."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vlmclips
from paritykit import SEEING, assert_close, exported, loaded, random_model, randomise, session_of
from torch import Tensor
from vlmclips import ROWS, Item, Moving, inputs_of, row_of
from vlmfolders import logits_of, logits_of_theirs
from vlmfolders import stacked as batch_of
from vlmqwen import FAMILIES, TEXT

pytest.importorskip("transformers")
pytestmark = pytest.mark.packages("ckpt", "vlm")

VIDEO = {
    "size": vlmclips.VIDEO_LIMITS,
    "patch_size": vlmclips.PATCH,
    "merge_size": vlmclips.SIDE,
    "temporal_patch_size": 2,
    "cap_pixels_per_frame": True,
    "max_video_tokens": vlmclips.TOKENS,
    "fps": 3.0,
    "min_frames": 2,
    "max_frames": 8,
}
IMAGES = {"min_pixels": 64, "max_pixels": 1024, "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
each_family = pytest.mark.parametrize("family", FAMILIES)


def theirs(family: str) -> Any:
    vision = {**FAMILIES[family], **({"tokens_per_second": 3} if family == "qwen2_5_vl" else {})}
    return random_model(
        SEEING,
        family,
        text_config=TEXT,
        vision_config=vision,
        image_token_id=vlmclips.IMAGE_TOKEN,
        video_token_id=vlmclips.VIDEO_TOKEN,
        tie_word_embeddings=False,
    )


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    for name, content in (("preprocessor", IMAGES), ("video_preprocessor", VIDEO)):
        (folder / f"{name}_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def opened(folder: Path, *flags: str) -> Any:
    from forge_ckpt.hf.opening import open_model

    more = ("--vlm.max_images=3", "--vlm.max_patches=320", f"--train.seq_len={vlmclips.LENGTH}")
    return open_model(folder, [*more, *flags])


def test_patches_are_those_of_their_processor(tmp_path: Path) -> None:
    """Values of frames from their image processor, in the order of their video processor."""
    session = session_of(opened(saved(theirs("qwen2_vl"), tmp_path / "hf")))
    mean, std = (getattr(session.model, f"pixel_{name}").view(3, 1) for name in ("mean", "std"))
    for item in (item for row in ROWS for item in row if not isinstance(item, list)):
        expected, grid = vlmclips.pixels_of(item)
        row = row_of(session, [item])
        assert row["grids"][0].tolist() == grid
        found = row["patches"][: len(expected)].view(-1, 3, 2 * vlmclips.PATCH**2)
        torch.testing.assert_close(((found / 255 - mean) / std).flatten(1), expected, rtol=0, atol=1e-6)
        assert not row["patches"][len(expected) :].any()


def their_video_processor() -> Any:
    """Those methods of transformers' video processor that need no torchvision, which the others do."""
    spec = importlib.util.find_spec("transformers.models.qwen2_vl.video_processing_qwen2_vl")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    (kind,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Qwen2VLVideoProcessor"
    )
    kind.bases, kind.decorator_list = [], []
    kind.body = [
        node
        for node in kind.body
        if isinstance(node, ast.FunctionDef) and node.name in ("sample_frames", "patchify")
    ]
    names: dict[str, Any] = {"torch": torch, "math": math, "VideoMetadata": object}
    exec(compile(ast.Module([kind], []), spec.origin, "exec"), names)
    return names["Qwen2VLVideoProcessor"]()


def test_frames_are_picked_and_cut_as_their_video_processor_does() -> None:
    from forge_vlm.data.frames import Clip, stretches
    from forge_vlm.data.options import StretchesOptions
    from forge_vlm.data.patches import patches_of
    from forge_vlm.options_packed import PatchesOptions

    processor = their_video_processor()
    processor.num_frames = None
    for total, rate in itertools.product((2, 3, 17, 40, 250, 3001), (10.0, 25.0, 29.97)):
        for fps, least, most in ((0.5, 4, 768), (2.0, 2, 6), (3.3, 4, 7), (1.0, 4, 16)):
            about = SimpleNamespace(total_num_frames=total, fps=rate)
            expected = processor.sample_frames(
                about, temporal_patch_size=2, min_frames=least, max_frames=most, fps=fps
            )
            options = StretchesOptions(fps=fps, min_frames=least, max_frames=most)
            times = stretches(options)(Clip(seconds=total / rate, rate=rate))
            assert [round(time * rate) for time in times] == expected.tolist()
    geometry, _ = PatchesOptions(patch_size=4).geometry().behind(type("", (), {"side": 2}))
    for count in (1, 4, 5):
        frames = torch.randint(0, 256, (count, 3, 16, 24), dtype=torch.uint8)
        cut, *grid = processor.patchify(frames[None], 4, 2, 2)
        assert torch.equal(torch.from_numpy(patches_of(frames.numpy(), geometry)), cut[0])
        assert grid == [(count + 1) // 2, 4, 6]


def test_sizes_of_frames_follow_their_rule() -> None:
    """Of many sizes and lengths, as their video processor computes them."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    from forge_vlm.options_packed import PatchesOptions

    for tokens in (None, 800, 128_000):
        options = PatchesOptions(
            video_min_pixels=128 * 28 * 28, video_max_pixels=768 * 28 * 28, video_tokens=tokens
        )
        geometry, _ = options.geometry().behind(type("", (), {"side": 2}))
        for frames, height, width in ((1, 40, 90), (5, 360, 640), (16, 1080, 1920), (700, 720, 1280)):
            least, most = options.video_pixels
            if tokens is not None:
                share = int(tokens * 28 * 28 * 0.9) * 2 // frames
                most = max(min(most, share), int(least * 1.05))
            tall, wide = smart_resize(height, width, 28, min_pixels=least, max_pixels=most)
            found = geometry.clip_grid_of(frames, height, width)
            assert found == (math.ceil(frames / 2), tall // 14, wide // 14)
            assert math.prod(found) <= geometry.clip_patches(frames) or tall * wide < most


@each_family
def test_positions_are_theirs(family: str, tmp_path: Path) -> None:
    from forge_vlm.axes import axis_positions

    model = theirs(family)
    session = session_of(opened(saved(model, tmp_path / "hf")))
    batch = batch_of([row_of(session, row) for row in ROWS])
    given = inputs_of(ROWS, seconds=family == "qwen2_5_vl")
    wanted = {n: v for n, v in given.items() if not n.startswith("pixel")}
    expected, _ = model.model.get_rope_index(**wanted)
    grids = session.model.sight.grids(batch)
    found, _ = axis_positions(batch["positions"], batch["documents"], batch, grids)
    valid = batch["valid"]
    assert torch.equal(found.transpose(0, 1)[:, valid], expected[:, valid])
    steps = {"qwen2_vl": [1.0, 1.0, 1.0], "qwen2_5_vl": [2.25, 1.0, 1.0]}
    assert batch["steps"][0].tolist() == pytest.approx(steps[family])


@each_family
def test_text_may_go_on_behind_the_time_of_a_clip(family: str, tmp_path: Path) -> None:
    """The rule of the paper, worked out position by position."""
    from forge_vlm.axes import axis_positions

    session = session_of(opened(saved(theirs(family), tmp_path / "hf"), "--vlm.video.text_behind=time"))
    assert session.model.past_time
    row: list[Item] = [[5, 6], Moving(6, 0.9, (9, 9)), [7, 8]]
    batch = batch_of([row_of(session, row)])
    rate = 3 * 1.8 if family == "qwen2_5_vl" else 1
    grid = batch["grids"][0, 0].tolist()
    assert grid[0] == 3
    times = [2 + math.floor(step * rate) for step in range(3)]
    last = max(times[-1], 2 + max(grid[1], grid[2]) // 2 - 1)
    expected = [0, 1, *(t for t in times for _ in range(grid[1] * grid[2] // 4)), last + 1, last + 2]
    grids = session.model.sight.grids(batch)
    for past, end in ((True, last + 1), (False, 2 + max(grid[1], grid[2]) // 2)):
        found, behind = axis_positions(batch["positions"], batch["documents"], batch, grids, past_time=past)
        count = len(expected)
        assert found[0, 0, : count - 2].tolist() == expected[:-2]
        assert found[0, :, count - 2].tolist() == [end] * 3
        assert int(behind) == count - 2 - end


@each_family
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Clips alone, between text, beside images, of odd numbers of frames; rows with padding."""
    model = theirs(family)
    session = session_of(opened(saved(model, tmp_path / "hf")))
    batch = batch_of([row_of(session, row) for row in ROWS])
    valid = batch["valid"]
    expected = logits_of_theirs(model, inputs_of(ROWS, seconds=family == "qwen2_5_vl"))
    found = logits_of(session, batch)
    assert_close(found[valid], expected[valid])
    other = {**batch, "patches": 255 - batch["patches"]}
    assert float((logits_of(session, other) - found)[valid].abs().max()) > 1e-2


@each_family
def test_each_row_alone_and_packed_gives_the_same(family: str, tmp_path: Path) -> None:
    session = session_of(opened(saved(theirs(family), tmp_path / "hf")))
    session.model.double()
    alone = [batch_of([row_of(session, row)]) for row in ROWS]
    expected = [logits_of(session, batch)[batch["valid"]] for batch in alone]
    packed = batch_of([row_of(session, ROWS[3], ROWS[0]), row_of(session, ROWS[2], ROWS[1])])
    found = logits_of(session, packed)[packed["valid"]]
    order = [expected[number] for number in (3, 0, 2, 1)]
    torch.testing.assert_close(found, torch.cat(order), rtol=0, atol=1e-12)
    # what lies behind the patches of a row is nobody's
    count = packed["grids"].prod(-1).sum(-1, keepdim=True)
    room = torch.arange(packed["patches"].shape[1])[None] >= count
    noisy = {**packed, "patches": torch.where(room[..., None], 77, packed["patches"]).to(torch.uint8)}
    assert torch.equal(logits_of(session, noisy)[packed["valid"]], found)


def prompts_of(batch: dict[str, Tensor]) -> Any:
    from forge_vlm.generate import Prompts
    from forge_vlm.model import IMAGE_KEYS

    images = {name: batch[name] for name in IMAGE_KEYS if name in batch}
    return Prompts(tokens=batch["tokens"], lengths=batch["valid"].sum(1).tolist(), images=images)


@each_family
def test_kept_keys_and_values_give_the_text_without_them(family: str, tmp_path: Path) -> None:
    """And the text of transformers, whose positions go on from the largest one, where that is of text."""
    from forge_vlm.generate import generate

    model = theirs(family)
    session = session_of(opened(saved(model, tmp_path / "hf")))
    batch = batch_of([row_of(session, row) for row in ROWS])
    found = generate(session.model, prompts_of(batch), max_new_tokens=6, temperature=0.0)
    for row, new in zip(ROWS, found, strict=True):
        again: list[int] = []
        for _ in range(6):
            one = batch_of([row_of(session, [*row, again] if again else row)])
            end = int(one["valid"].sum()) - 1
            again.append(int(logits_of(session, one)[0, end].argmax()))
        assert new == again
    inputs = inputs_of(ROWS[1:2], seconds=family == "qwen2_5_vl")
    count = int(inputs["attention_mask"].sum())
    cut = {name: inputs[name][:, :count] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    tokens = model.generate(**{**inputs, **cut}, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert found[1] == tokens[0, count:].tolist()


@each_family
def test_an_export_keeps_everything(family: str, tmp_path: Path) -> None:
    """Our model with other random weights: written, loaded by `from_pretrained`, read again bit by bit."""
    from forge_ckpt.hf.start import tensors_of

    found = opened(saved(theirs(family), tmp_path / "hf"))
    session = session_of(found)
    randomise(session.model, 3)
    exported(found, session.model, tmp_path / "out")
    model = loaded(SEEING, tmp_path / "out")
    assert model.config.video_token_id == vlmclips.VIDEO_TOKEN
    assert getattr(model.config.vision_config, "tokens_per_second", 3) == 3
    batch = batch_of([row_of(session, row) for row in ROWS])
    valid = batch["valid"]
    expected = logits_of_theirs(model, inputs_of(ROWS, seconds=family == "qwen2_5_vl"))
    assert_close(logits_of(session, batch)[valid], expected[valid])
    again = opened(tmp_path / "out")
    assert again.config.tables == found.config.tables
    weights = tensors_of(session.model)
    assert set(again.weights.names()) == set(weights)
    assert all(torch.equal(again.weights.read(name), weights[name]) for name in weights)
    file = json.loads((tmp_path / "out" / "video_preprocessor_config.json").read_bytes())
    assert {name: file[name] for name in VIDEO} == VIDEO
    inside = json.loads((tmp_path / "out" / "processor_config.json").read_bytes())["video_processor"]
    assert inside == file


def write_clips(folder: Path) -> Path:
    """Samples with a clip, with a clip and an image, and without, in turn."""
    from vlmdatakit import write_clip
    from vlmkit import write_samples

    records: list[dict[str, Any]] = []
    for number in range(18):
        record: dict[str, Any] = {"prompt": f"w{number} ", "answer": f"w{number}"}
        clip = f"{number % 2}.mp4"
        if number % 3 == 0:
            record |= {"video": clip}
        elif number % 3 == 1:
            record |= {"video": clip, "image": "0.png", "prompt": "<image> w1 <video> w2"}
        records.append(record)
    write_samples(folder, records)
    for number in range(2):
        write_clip(folder / f"{number}.mp4", 13 + 8 * number)
    return folder


def write_webvid(folder: Path) -> Path:
    from test_vlm_video import webvid

    return webvid(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "source", "write"),
    [("qwen2_5_vl", "vlm/images", write_clips), ("qwen2_vl", "vlm/webvid", write_webvid)],
)
def test_an_imported_folder_trains_on_clips_and_goes_back(
    family: str, source: str, write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Import, training, `forge eval` and `forge generate` with a video, and export."""
    from vlmtrained import trained_and_back

    from forge_core.commands.main import main

    pytest.importorskip("av")
    saved(theirs(family), tmp_path / "hf")
    run = trained_and_back(
        tmp_path,
        family,
        write,
        vlm={"max_images": 3, "answer_tokens": 3},
        data={"source": source, "holdout": 0.3},
    )
    out = tmp_path / "out" / "video_preprocessor_config.json"
    assert json.loads(out.read_bytes())["max_frames"] == VIDEO["max_frames"]
    capsys.readouterr()
    assert main(["eval", str(run), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert math.isfinite(measured["eval/loss"])
    (video, *_) = sorted((tmp_path / "samples").rglob("*.mp4"))
    said = ["--prompt=w1 <video> w2", "--temperature=0", "--max-new-tokens=4", "--json"]
    assert main(["generate", str(run), f"--video={video}", *said]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "w1 <video> w2"
