"""A Hugging Face folder as one of ours: a table and weights under our names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from textwrap import wrap

import tomli_w

from forge_ckpt.hf.architectures import read_foreign
from forge_ckpt.hf.exporting import Written
from forge_ckpt.hf.folders import MODEL_TOML, dtype_named
from forge_ckpt.hf.opening import Opened, open_model, tied_heads
from forge_ckpt.hf.start import Coverage, compare
from forge_ckpt.hf.tokenizers import copy_files
from forge_ckpt.hf.writing import new_folder, parse_size, write_weights

HEAD = """\
# The model of a Hugging Face folder ({model_type}), as `forge import` read it. A configuration builds on it
# with extends = "{name}/{file}" and starts from its weights with model.init_from.

"""


def import_hf(
    source: Path,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    table_only: bool = False,
    told: Callable[[str], None] | None = None,
) -> Written:
    """Read a Hugging Face folder and write ours, which appears as a whole.

    Args:
        source: folder with config.json and safetensors.
        out: folder that does not exist yet.
        dtype, max_shard_size, told: see `export_hf`.
        table_only: write the table alone; training can start from `source` itself.

    Raises:
        CheckpointError: see `read_foreign`; tensors that the model lacks or that nothing here has a name for.
    """
    most, cast = parse_size(max_shard_size), None if dtype is None else dtype_named(dtype)
    foreign = read_foreign(source)
    text = HEAD.format(model_type=foreign.model_type, name=out.name, file=MODEL_TOML)
    tables, notices = foreign.architecture.for_training(foreign.tables)
    text += "".join(f"# {line}\n" for notice in notices for line in wrap(notice, 108))
    text += ("\n" if notices else "") + tomli_w.dumps(tables)
    with new_folder(out) as folder:
        (folder / MODEL_TOML).write_text(text, encoding="utf-8")
        files = copy_files(source, folder, foreign.architecture.beside)
        tensors = size = 0
        if not table_only:
            opened = open_model(source)
            check_complete(opened)
            copies = tied_heads(opened)
            names = [name for name in opened.weights.names() if name not in copies]
            size = write_weights(opened.weights, names, folder, dtype=cast, max_shard_size=most, told=told)
            tensors = len(names)
    return Written(foreign.model_type, tensors, size, tuple(files), tuple(notices))


def check_complete(opened: Opened) -> Coverage:
    """Whether a folder has every tensor of its model, in its shape, and no other. Nothing is read.

    Raises:
        CheckpointError: lists what does not fit.
    """
    from forge_core.loop.build import new_session
    from forge_core.loop.inference import build_for_inference, for_one_process

    with ExitStack() as stack:
        session = new_session(for_one_process(opened.config), opened.plugins, stack)
        build_for_inference(session, memory=False)
        _, coverage = compare(session.model, opened.weights, opened.where, unknown=opened.unknown)
    return coverage
