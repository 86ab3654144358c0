"""`forge generate`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from forge_core.commands.command import Command
from forge_core.errors import UsageError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", metavar="RUN", help="run, checkpoint, imported or Hugging Face folder")
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="may be given several times"
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="a prompt a line; .jsonl: objects with the key prompt, and images or video where the model sees",
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="a picture for each --prompt, for a model that sees; may be given several times",
    )
    parser.add_argument("--video", metavar="FILE", help="a video for each --prompt, for a model that sees")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 is greedy; default: 0.8"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens that reach P")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling; default: 0")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts at once; default: 8")
    parser.add_argument("--dtype", metavar="TYPE", help="of the weights: bf16, fp16 or fp32")
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt")


def prompts_of(arguments: argparse.Namespace) -> list[Any]:
    """All prompts, texts or see `Generator`; one empty one, which starts a document, where none is given.

    Raises:
        UsageError: the file cannot be read or is not what it should be.
    """
    seen = {"images": arguments.image} if arguments.image else {}
    seen |= {"video": arguments.video} if arguments.video else {}
    given = arguments.prompt or ([""] if seen else [])
    prompts: list[Any] = [{"prompt": text, **seen} if seen else text for text in given]
    if arguments.prompts is not None:
        path = Path(arguments.prompts)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            as_json = path.suffix == ".jsonl"
            prompts += [_prompt(line) if as_json else line for line in lines if line.strip()]
        except OSError as error:
            raise UsageError(f"cannot read prompts from {path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"cannot read prompts from {path}: {error}") from error
    return prompts or [""]


def _prompt(line: str) -> Any:
    found: Any = json.loads(line)
    prompt = found.get("prompt") if isinstance(found, dict) else None
    if not isinstance(prompt, str):
        raise ValueError('a line is not an object with a text under "prompt"')
    more = {name: found[name] for name in ("images", "video", "videos") if name in found}
    return {"prompt": prompt, **more} if more else prompt


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    prompts = prompts_of(arguments)
    if arguments.batch_size < 1:
        raise UsageError("--batch-size must be at least 1")
    from forge_ckpt.hf.opening import open_model
    from forge_ckpt.hf.using import generate, using

    sampling = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p", "seed")}
    with using(open_model(arguments.place, flags), dtype=arguments.dtype) as session:
        texts = generate(
            session,
            prompts,
            max_new_tokens=arguments.max_new_tokens,
            batch_size=arguments.batch_size,
            **sampling,
        )
        for given, text in zip(prompts, texts, strict=True):
            prompt = given if isinstance(given, str) else given["prompt"]
            whole = json.dumps({"prompt": prompt, "text": text}) if arguments.json else f"{prompt}{text}"
            print(whole, flush=True)
    return 0


COMMAND = Command(
    description="Continue prompts with the model of a run, a checkpoint, or an imported or Hugging Face\n"
    "folder.",
    examples="examples:\n"
    '  forge generate runs/mine --prompt "def " --temperature 0\n'
    "  forge generate smol --prompts prompts.jsonl --top-p 0.9 --json\n"
    '  forge generate runs/seeing --image cat.png --prompt "What is this? "\n'
    "  forge generate runs/mine --train.device=cpu",
    run=run,
    arguments=arguments,
    takes_flags=True,
)
