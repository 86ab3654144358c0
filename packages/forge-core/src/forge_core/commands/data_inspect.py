"""`forge data inspect PATH|CONFIG`: reads the data as training would, and shows it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.errors import ConfigError, UsageError
from forge_core.files import user_path

if TYPE_CHECKING:
    from forge_core.data.source import SourceSpec

BAR = 40
SHOWN = 400
"""Characters of a run of text that are shown."""
PATH_FLAGS = ("tokenizer", "field", "dtype", "chat_template")


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    kept = user_path(arguments.source) / "config.toml"
    if kept.is_file():  # a run's folder
        arguments.source = str(kept)
    if _is_config(arguments.source):
        given = [f"--{name.replace('_', '-')}" for name in PATH_FLAGS if getattr(arguments, name)]
        if given:
            raise UsageError(f"{given[0]} is for data, not for a configuration", "use --data.key=value")
        found = _of_config(arguments.source, flags, arguments.seq_len)
    else:
        if flags:
            raise UsageError(f"{flags[0]}: {arguments.source} is no configuration")
        found = [(*_of_path(arguments), {})]
    told = [_look(source, spec, arguments.samples) | more for source, spec, more in found]
    if arguments.json:
        print(json.dumps({"sources": told}))
    else:
        print("\n\n".join(_page(each) for each in told))
    return 0


def _is_config(source: str) -> bool:
    from forge_core.config.recipes import recipe_names

    path = user_path(source)
    return path.suffix == ".toml" or (not path.exists() and source in recipe_names())


def _of_config(
    source: str, flags: Sequence[str], seq_len: int | None
) -> list[tuple[Any, SourceSpec, dict[str, Any]]]:
    """The training sources of a configuration, what they were built from, and their part in a mixture."""
    from forge_core.commands.loading import load
    from forge_core.config.tables import DataConfig, ModelConfig, TrainConfig
    from forge_core.data.choices import mixture_shares, training_choices
    from forge_core.data.source import SourceSpec
    from forge_core.data.tokenizer import load_tokenizer
    from forge_core.plugins import PluginCatalog

    config, plugins = load(source, flags)
    data, train = config[DataConfig], config[TrainConfig]
    tokenizer = load_tokenizer(data.tokenizer, data.eos_token)
    catalog = PluginCatalog(plugins)

    def component(kind: str, name: str) -> Any:
        return catalog.load(kind, name)

    found = []
    choices = training_choices(config, component)
    for choice in choices:
        spec = SourceSpec(
            name=choice.name,
            path=choice.path,
            split="train",
            seq_len=seq_len or train.seq_len,
            tokenizer=tokenizer,
            vocab_size=config[ModelConfig].vocab_size or tokenizer.vocab_size,
            pack=data.pack,
            holdout=data.holdout,
            seed=train.seed if data.seed is None else data.seed,
            packing="best_fit" if data.packing == "best_fit" else "concatenate",
            cache_dir=data.cache_dir,
            config=config,
            component=component,
        )
        found.append((choice.build(spec, choice.options), spec))
    if not data.mix:
        return [(source, spec, {}) for source, spec in found]
    sources = [source for source, _ in found]
    phases = mixture_shares(choices, sources, data, seq_len=seq_len or train.seq_len)
    return [
        (*each, {"weight": choice.weight, "shares": {step: shares[n] for step, shares in phases}})
        for n, (each, choice) in enumerate(zip(found, choices, strict=True))
    ]


def _of_path(arguments: argparse.Namespace) -> tuple[Any, SourceSpec]:
    """The data at a path, all of it."""
    from forge_core.data import options as tables
    from forge_core.data.source import SourceSpec
    from forge_core.data.tokenizer import BYTES, load_tokenizer

    path = arguments.source
    kind, named = _kind(path, bool(arguments.chat_template))
    try:
        tokenizer = load_tokenizer(arguments.tokenizer or named or BYTES)
    except ConfigError as error:
        if arguments.tokenizer:
            raise
        message = f"{path} was prepared with the tokenizer {named}, which cannot be loaded from here"
        raise UsageError(message, "say where it is: --tokenizer PATH") from error
    known = bool(arguments.tokenizer or named)
    spec = SourceSpec(
        name=kind,
        path=None if path == "stdlib" else path,
        split="all",
        seq_len=arguments.seq_len or 256,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size if known or kind != "tokens" else 1 << 62,
        pack=True,
        holdout=0.0,
        seed=0,
    )
    field = {"field": arguments.field} if arguments.field else {}
    if kind == "chat":
        options: Any = tables.ChatOptions(template=arguments.chat_template, **field)
    elif kind == "tokens":
        options = tables.TokensOptions(dtype=arguments.dtype, check_tokenizer=False)
    else:
        options = {
            "jsonl": tables.JsonlOptions,
            "parquet": tables.ParquetOptions,
            "hf": tables.HfOptions,
            "text": tables.TextOptions,
        }[kind](**field)
    return _build(kind, spec, options), spec


def _kind(path: str, chat: bool) -> tuple[str, str | None]:
    """The source that reads a path, and the tokenizer that its manifest names."""
    from forge_core.data.manifest import NAME, read_manifest
    from forge_core.data.prepare.readers import kind_of
    from forge_core.data.token_corpus import SUFFIXES

    root = user_path(path)
    if path == "stdlib":
        return "text", None
    if (root / NAME).is_file():
        manifest = read_manifest(root)
        return "tokens", manifest.plan["tokenizer"] if manifest else None
    if root.suffix in SUFFIXES or (root.is_dir() and any(f.suffix in SUFFIXES for f in root.iterdir())):
        return "tokens", None
    return "chat" if chat else kind_of(path), None


def _build(kind: str, spec: SourceSpec, options: Any) -> Any:
    from forge_core.data.components import COMPONENTS
    from forge_core.plugins.catalog import load_object

    target = next(part.target for part in COMPONENTS if part.name == kind)
    return load_object(target)(spec, options)


def _look(source: Any, spec: SourceSpec, samples: int) -> dict[str, Any]:
    """All that is shown of a source, as plain values."""
    from forge_core.data.inspection import (
        contents_of,
        coverage,
        decode_sample,
        document_lengths,
        lengths_of,
        padding_of,
        row_of,
        some_samples,
        stretches_of,
    )

    def decode(sample: Any, number: int) -> Any:
        return decode_sample(sample, spec.tokenizer, stretches_of(source, sample, number))

    row = row_of(source)
    told: dict[str, Any] = {
        "name": spec.name,
        "path": spec.path,
        "split": spec.split,
        "tokenizer": spec.tokenizer.name,
        "seq_len": spec.seq_len,
        "samples": len(source) if hasattr(source, "__len__") else None,
        "padding": padding_of(source),
    }
    if row is not None:
        size = spec.vocab_size if spec.vocab_size < 1 << 62 else row.max_token + 1
        told |= {
            "tokens": len(row),
            "dtype": row.dtype.name,
            "shards": len(row.shards),
            "lengths": attrs.asdict(document_lengths(row)),
            "vocabulary": attrs.asdict(coverage(row, size)),
        }
    elif (contents := contents_of(source)) is not None:
        told |= {
            "padding": contents.padding,
            "counts": dict(contents.counts),
            "lengths": attrs.asdict(lengths_of(contents.lengths)),
        }
    told["shown"] = [
        {"sample": number, "runs": [attrs.asdict(run) for run in decode(sample, number)]}
        for number, sample in some_samples(source, samples, spec.name, spec.seed)
        if "tokens" in sample and "targets" in sample
    ]
    return told


def _page(told: dict[str, Any]) -> str:
    from forge_core.data.wording import counted

    lines = [f"{told['name']} ({told['path'] or 'no path'}), split {told['split']}"]
    if told.get("shares"):
        lines.append(f"  {_shares(told['shares'], told['weight'])}")
    if "tokens" in told:
        lines.append(
            f"  {counted(told['tokens'], 'token')} of {counted(told['lengths']['documents'], 'document')}, "
            f"{counted(told['shards'], 'shard')} of {told['dtype']}"
        )
    elif "lengths" in told:
        counts = "".join(f", {what}: {number:,}" for what, number in told["counts"].items())
        lines.append(f"  {counted(told['lengths']['documents'], 'document')}{counts}")
    if told["samples"] is not None:
        padding = "" if told["padding"] is None else f", {told['padding']:.2%} left over"
        lines.append(f"  {counted(told['samples'], 'sequence')} of {told['seq_len']} tokens{padding}")
    if "lengths" in told:
        lines += ["", *_lengths(told["lengths"])]
    if "vocabulary" in told:
        lines += ["", *_vocabulary(told["vocabulary"], told["tokenizer"])]
    for shown in told["shown"]:
        lines += ["", f"  sample {shown['sample']}", *_runs(shown["runs"])]
    return "\n".join(lines)


def _shares(shares: dict[int, float], weight: float | None) -> str:
    told = [
        f"{share:.1%} of the samples" + (f" from update {step} on" if len(shares) > 1 else "")
        for step, share in shares.items()
    ]
    return ", ".join([*([] if weight is None else [f"weight {weight:g}"]), *told])


def _lengths(found: dict[str, Any]) -> list[str]:
    told = ", ".join(f"{p} %: {tokens:,}" for p, tokens in found["percentiles"].items())
    lines = [f"  tokens a document: mean {found['mean']:,.0f}, {told}, largest {found['largest']:,}"]
    most = max(count for _, _, count in found["histogram"])
    for low, below, count in found["histogram"]:
        bar = "#" * -(-BAR * count // most)
        lines.append(f"  {low:>11,} to {below - 1:>11,}  {count:>11,}  {bar}")
    return lines


def _vocabulary(found: dict[str, Any], tokenizer: str) -> list[str]:
    lines = [
        f"  vocabulary of {tokenizer}: {found['distinct']:,} of {found['vocab_size']:,} ids occur "
        f"in {found['counted']:,} tokens, the largest is {found['largest']:,}"
    ]
    if found["supervised"] < 1:
        lines.append(f"  {found['supervised']:.1%} of the tokens are learnt")
    return lines


def _runs(runs: list[dict[str, Any]]) -> list[str]:
    lines = []
    document = None
    for each in runs:
        if each["document"] is None:
            lines.append(f"    padding    {each['tokens']:>5}")
            continue
        if each["document"] != document:
            document = each["document"]
            lines.append(f"    document {document}")
        mark = "learnt" if each["learnt"] else "  --  "
        text = json.dumps(each["text"], ensure_ascii=False)[1:-1].replace('\\"', '"')
        shown = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
        lines.append(f"      {mark} {each['tokens']:>5}  {shown}")
    return lines
