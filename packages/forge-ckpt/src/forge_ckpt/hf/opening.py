"""Folders with a model: a run, one of its checkpoints, an imported folder, a Hugging Face folder."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import tomli_w

from forge_ckpt.errors import CheckpointError, RequestError
from forge_ckpt.hf.architectures import Foreign, read_foreign
from forge_ckpt.hf.folders import CONFIG_JSON, MODEL_TOML
from forge_core.commands.loading import load
from forge_core.config.config import Config
from forge_core.config.files import DERIVED_KEYS
from forge_core.config.tables import ModelConfig
from forge_core.data.tokenizer import BYTES
from forge_core.data.wording import counted
from forge_core.files import user_path
from forge_core.plugins import Plugins

if TYPE_CHECKING:
    from forge_ckpt.hf.weights import Weights

TOKENIZER_JSON = "tokenizer.json"
_HEAD, _EMBEDDING = "head.weight", "embed.weight"
_SEQ_LEN = 512
_SAMPLE = 64


@attrs.frozen(kw_only=True)
class Opened:
    """A folder with a model.

    Attributes:
        where: the folder, in words for people.
        kind: "checkpoint", "imported" or "hugging face".
        config: resolved. plugins: those of the configuration, loaded.
        weights: by our global names.
        unknown: names of the folder's tensors that have no counterpart here.
        tokenizer: folder with the tokenizer's files, None where there is none.
        tokenizer_file: the tokenizer where it is a file of another name than tokenizer.json.
    """

    where: str
    kind: str
    config: Config
    plugins: Plugins
    weights: Weights
    unknown: tuple[str, ...] = ()
    tokenizer: Path | None = None
    tokenizer_file: Path | None = None


def kind_of(place: str | Path) -> str:
    """What lies at a path.

    Raises:
        CheckpointError: nothing with a model; says what was looked for.
    """
    path = user_path(place)
    if "://" in str(place):
        return "checkpoint"
    if (path / MODEL_TOML).is_file():
        return "imported"
    if (path / CONFIG_JSON).is_file():
        return "hugging face"
    if not path.exists():
        raise RequestError(f"there is no folder {path}")
    if path.is_dir() and (any(path.glob("step_*")) or path.name.startswith("step_") or path.is_symlink()):
        return "checkpoint"
    if (path / "checkpoints").is_dir() or (path / "config.toml").is_file():
        return "checkpoint"
    raise RequestError(
        f"{path} holds no model: no checkpoints/, no {MODEL_TOML} and no {CONFIG_JSON}",
        "give a run folder, a checkpoint, an imported folder or one of Hugging Face",
    )


def open_model(place: str | Path, flags: Sequence[str] = (), plugins: Plugins | None = None) -> Opened:
    """Open a folder with a model. Tensors are read when they are asked for.

    Args:
        place: path of the folder; a checkpoint may be a URL.
        flags: `--table.key=value`, laid over its configuration.
        plugins: the installed ones; None finds them.

    Raises:
        CheckpointError, ConfigError: it cannot be understood.
    """
    kind = kind_of(place)
    if kind == "checkpoint":
        return _open_checkpoint(place, flags, plugins)
    path = user_path(place)
    tokenizer = path if (path / TOKENIZER_JSON).is_file() else None
    if kind == "imported":
        config, loaded = load(str(path / MODEL_TOML), [*_fitting(path, {}), *flags], plugins=plugins)
        return _opened(path, kind, config, loaded, _tensors(path), (), tokenizer)
    foreign = read_foreign(path, plugins)
    config, loaded = load_tables(foreign.tables, [*_fitting(path, foreign.tables), *flags], plugins)
    weights = foreign_weights(path, foreign, config)
    return _opened(path, kind, config, loaded, weights, weights.unknown, tokenizer)


def _opened(
    path: Path,
    kind: str,
    config: Config,
    plugins: Plugins,
    weights: Weights,
    unknown: Sequence[str],
    tokenizer: Path | None,
) -> Opened:
    return Opened(
        where=str(path),
        kind=kind,
        config=config,
        plugins=plugins,
        weights=weights,
        unknown=tuple(unknown),
        tokenizer=tokenizer,
    )


def tied_heads(opened: Opened) -> set[str]:
    """Names of the heads of a model that share the weight of an embedding, which some files hold twice."""
    if not opened.config[ModelConfig].tie_embeddings:
        return set()
    names = set(opened.weights.names())
    heads = {name: name.removesuffix(_HEAD) for name in names if name.endswith(_HEAD)}
    return {name for name, part in heads.items() if f"{part}{_EMBEDDING}" in names}


def _tensors(path: Path) -> Any:
    from forge_ckpt.hf.folders import TensorFolder

    return TensorFolder(path)


def foreign_weights(path: Path, foreign: Foreign, config: Config) -> Any:
    """The tensors of a Hugging Face folder under our names.

    Raises:
        CheckpointError: some that a rule needs are missing.
    """
    from forge_ckpt.hf.folders import TensorFolder
    from forge_ckpt.hf.weights import Converted

    architecture = foreign.architecture
    rules = architecture.rules(config)
    weights = Converted(TensorFolder(path), rules, theirs=True, ignored=architecture.ignored)
    if missing := weights.missing():
        raise CheckpointError(f"{path} lacks {counted(len(missing), 'tensor')}: {', '.join(missing[:8])}")
    return weights


def load_tables(
    tables: Mapping[str, Mapping[str, Any]], flags: Sequence[str] = (), plugins: Plugins | None = None
) -> tuple[Config, Plugins]:
    """A configuration from tables as TOML has them."""
    with tempfile.TemporaryDirectory(prefix="forge-model-") as folder:
        path = Path(folder) / MODEL_TOML
        path.write_text(tomli_w.dumps(tables), encoding="utf-8")
        return load(str(path), flags, plugins=plugins)


def _fitting(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Flags that make the rest of a configuration fit a model: its tokenizer, and lengths within its own."""
    import tomli

    if not tables:
        tables = tomli.loads((path / MODEL_TOML).read_text(encoding="utf-8"))
    longest = tables.get("model", {}).get("max_seq_len", _SEQ_LEN)
    needed = max(_SEQ_LEN, tables.get("train", {}).get("seq_len", _SEQ_LEN))
    flags = [f"--train.seq_len={min(needed, longest)}", f"--eval.sample_tokens={min(_SAMPLE, longest - 1)}"]
    if (path / TOKENIZER_JSON).is_file():
        flags.append(f"--data.tokenizer={path / TOKENIZER_JSON}")
    return flags


def _settled(text: str) -> str:
    """A run's configuration with the model's derived sizes as they were, not to be derived again.

    They follow from files (a tokenizer) that need not be where the run was.
    """
    import tomli

    values = tomli.loads(text)
    derived = [path for path in values.get(DERIVED_KEYS, []) if not path.startswith("model.")]
    return tomli_w.dumps({**values, DERIVED_KEYS: derived})


def _open_checkpoint(place: str | Path, flags: Sequence[str], plugins: Plugins | None) -> Opened:
    from forge_ckpt.hf.saved import SavedWeights
    from forge_ckpt.reading import open_checkpoint

    saved = open_checkpoint(place)
    with tempfile.TemporaryDirectory(prefix="forge-model-") as folder:
        path = Path(folder) / "config.toml"
        path.write_text(_settled(saved.config_text), encoding="utf-8")
        # a run of many ranks is looked at by one
        config, loaded = load(str(path), flags, world_size=None, plugins=plugins)
    name = config.get("data").tokenizer
    path = user_path(name)
    file = path / TOKENIZER_JSON if path.is_dir() else path
    there = name != BYTES and file.is_file()
    return Opened(
        where=str(saved.where),
        kind="checkpoint",
        config=config,
        plugins=loaded,
        weights=SavedWeights(saved),
        tokenizer=file.parent if there and file.name == TOKENIZER_JSON else None,
        # what lies beside it may be of another
        tokenizer_file=file if there and file.name != TOKENIZER_JSON else None,
    )
