"""`forge explain`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from forge_core.commands.command import Command
from forge_core.commands.loading import config_argument, load


def arguments(parser: argparse.ArgumentParser) -> None:
    config_argument(parser)
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="number of processes to explain; default: the fewest that the mesh can run on",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    config, plugins = load(arguments.config, flags, world_size=arguments.world_size)
    from forge_core.loop.explain import explain

    found = explain(config, plugins, arguments.world_size)
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(page(found)))
    return 0


def page(found: Mapping[str, Any]) -> Iterator[str]:
    """The explanation as lines of text."""
    names = [f"{plugin['name']} {plugin['version']}" for plugin in found["plugins"]]
    yield f"plugins    {', '.join(names)}"
    yield f"processes  {_mesh(found)}"
    yield f"plan       fingerprint {found['fingerprint']}"
    yield from _table([(e["hook"], e["plugin"], e["what"]) for e in grouped(found["plan"])])
    model = found["model"]
    yield f"model      {count(model['parameters'])} parameters, {count(model['trainable'])} of them train"
    yield from _table([(a["name"], count(a["parameters"]), _frozen(a)) for a in model["aliases"]])
    memory = found["memory"]
    yield f"memory     {size(memory['total'])} for the whole model, before activations and sharding"
    parts = ("weights", "gradients", "optimizer", "auxiliary")
    yield from _table([(part, size(memory[part])) for part in parts if memory[part]])
    step = found["step"]
    yield (
        f"step       {step['tokens']:,} tokens: {step['batch_size']} x {step['seq_len']}"
        f" x {many(step['grad_accum_steps'], 'micro-batch', 'es')} x {many(step['data_ranks'], 'data rank')}"
    )
    if step["flops_per_token"]:
        flops = f"{step['flops_per_token']:.3g} FLOPs a token, {step['flops']:.3g} a step"
        yield f"           {flops}, {step['total_flops']:.3g} in {step['max_steps']} steps"
    yield "schedule   learning rate of the first group, by update"
    for name, rates in found["schedule"].items():
        yield from _table([(name, *(f"{n}: {rate:.3g}" for n, rate in rates.items()))])
    yield f"data       {found['data']['summary']}"
    for part in found["more"]:
        for number, line in enumerate(part["lines"]):
            yield f"{part['heading'] if number == 0 else '':<10} {line}"


def grouped(plan: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The plan with what one plugin answers to one hook on one line, and equal parts of layers together.

    `layers 0-3: Mixer`; `embedding, blocks, head`.
    """
    lines: list[dict[str, str]] = []
    layers: list[list[int]] = []
    seen: dict[tuple[str, str, str], int] = {}
    for entry in plan:
        where, _, what = entry["what"].partition(": ")
        number = where.removeprefix("layer ")
        if not (where.startswith("layer ") and number.isdecimal()):
            lines.append(dict(entry))
            layers.append([])
            continue
        key = (entry["hook"], entry["plugin"], what)
        if key not in seen:
            seen[key] = len(lines)
            lines.append({**entry, "what": what})
            layers.append([])
        layers[seen[key]].append(int(number))
    for line, numbers in zip(lines, layers, strict=True):
        if numbers:
            word = "layer" if len(numbers) == 1 else "layers"
            line["what"] = f"{word} {_spans(numbers)}: {line['what']}"
    merged: list[dict[str, str]] = []
    for line in lines:
        last = merged[-1] if merged else {}
        if (last.get("hook"), last.get("plugin")) == (line["hook"], line["plugin"]):
            last["what"] += f", {line['what']}"
        else:
            merged.append(line)
    return merged


def _spans(numbers: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in spans)


def _mesh(found: Mapping[str, Any]) -> str:
    there = [axis for axis in found["mesh"] if axis["size"] > 1]
    axes = " x ".join(f"{a['name']} {a['size']}" for a in there if a["carved_from"] is None)
    parts = [f"{a['name']} {a['size']} of {a['carved_from']}" for a in there if a["carved_from"] is not None]
    text = ", ".join([axes, *parts]) if axes else "no mesh"
    return f"{found['world_size']}{': ' if axes else ', '}{text}"


def _frozen(alias: Mapping[str, Any]) -> str:
    return "frozen at the start" if alias["frozen"] else ""


def many(number: int, word: str, ending: str = "s") -> str:
    """1 rank, 2 ranks."""
    return f"{number} {word}{'' if number == 1 else ending}"


def count(number: float) -> str:
    """1234567 -> "1.235 M"."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.4g} {unit}"
    return f"{number:g}"


def size(number: int) -> str:
    """Bytes in units of 2**10."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:,.4g} TiB"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Rows under a heading, columns aligned."""
    columns = max((len(row) for row in rows), default=0)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    for row in rows:
        yield "           " + "  ".join(f"{cell:<{widths[i]}}" for i, cell in enumerate(row)).rstrip()


COMMAND = Command(
    description="Say what a run would be: plugins, processes, the plan in order (which plugin answers which\n"
    "hook with what), size of the model, memory of weights and optimizer, FLOPs, schedule, data. Nothing is\n"
    "trained, and no weight gets memory, so that a model larger than this machine can be explained here.",
    examples="examples:\n  forge explain quickstart\n  forge explain my.toml --model.n_layers=96 --json",
    run=run,
    arguments=arguments,
    takes_flags=True,
)
