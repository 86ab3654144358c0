"""Text around pictures: what ours has, and what a processor of theirs puts there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from forge_core.config import Config
from forge_core.config.tables import DataConfig
from forge_core.contract import UnsuitedError
from forge_core.contract.architecture import InputToken
from forge_core.data.tokenizer import BYTES
from forge_core.model.architectures import special_id
from forge_vlm.marks import BYTE_MARKS
from forge_vlm.table import VlmConfig

TEMPLATE = "chat_template.json"
"""The file with the chat template of a processor, in the form that it can be read in here."""
BEFORE, AFTER = "vlm.before_image", "vlm.after_image"


def takes_bytes(config: Config) -> bool:
    """Whether bytes are tokens, so that an export writes the tokenizer."""
    return config[DataConfig].tokenizer == BYTES


def mark_id(config: Config, name: str) -> int | None:
    """Id of a special token around images, None: the tokenizer has none."""
    return BYTE_MARKS.get(name) if takes_bytes(config) else special_id(config, name)


def check_marks(config: Config, expected: Mapping[str, Any]) -> None:
    """Whether the text around pictures is what the processor of a family puts there, whatever anybody says.

    Args:
        expected: of `before_image`, `after_image` and, where pictures are cut, `pieces` the texts.

    Raises:
        UnsuitedError: it is not; says what to train with.
    """
    vlm = config[VlmConfig]
    pieces = expected.get("pieces", {})
    ours = {f"vlm.{name}": getattr(vlm, name) for name in expected if name != "pieces"}
    ours |= {f"vlm.pieces.{name}": getattr(vlm.pieces, name) for name in pieces}
    theirs = {f"vlm.{name}": text for name, text in expected.items() if name != "pieces"}
    theirs |= {f"vlm.pieces.{name}": text for name, text in pieces.items()}
    wrong = [name for name, text in theirs.items() if ours[name] != text]
    if not wrong:
        return
    said = ", ".join(f"{name} = {ours[name]!r}" for name in wrong)
    flags = " ".join(f"--{name}={theirs[name]!r}" for name in wrong)
    raise UnsuitedError(
        f"its processor puts other text around pictures than {said}",
        f"train with {flags}; given to this command alone, they make a folder whose inputs have tokens there "
        "that were not trained",
    )


def marked(*names: str, always: Sequence[str] = ()) -> Callable[[Config], Sequence[InputToken]]:
    """`Architecture.marks` of a family.

    Args:
        names: special tokens that count where the text around pictures has them.
        always: those that its processor asks for anyway.
    """

    def found(config: Config) -> Iterable[InputToken]:
        vlm = config[VlmConfig]
        for name in (*names, *always):
            key = BEFORE if name in vlm.before_image else AFTER
            if name in always or name in vlm.before_image + vlm.after_image:
                # a tokenizer that lacks it is told of by the export
                token = mark_id(config, name)
                yield InputToken(name, -1 if token is None else token, key)

    return lambda config: tuple(found(config))


def starting(name: str) -> Callable[[Config], Sequence[InputToken]]:
    """`Architecture.marks` of a family whose processor puts the token that starts a text behind pictures:
    `name`, where the text around pictures has it, and otherwise none."""

    def found(config: Config) -> Sequence[InputToken]:
        if not takes_bytes(config):
            return ()
        has = config[VlmConfig].after_image == name
        return (InputToken(name if has else "", BYTE_MARKS[name] if has else -1, AFTER, role="bos_token"),)

    return found


def plain_template(config: Config, image: str, around: bool = True) -> dict[str, dict[str, Any]]:
    """`TEMPLATE` for a model that reads its messages one after another as they are, as of data without a
    template; none where a tokenizer is copied, which has its own.

    Args:
        image: the token that stands for an image. around: the processor puts no text around it.
    """
    if not takes_bytes(config):
        return {}
    vlm = config[VlmConfig]
    shown = f"{vlm.before_image}{image}{vlm.after_image}" if around else image
    quoted = shown.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    content = (
        "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
        "{%- for part in message['content'] -%}"
        f"{{%- if part['type'] == 'image' -%}}{{{{ '{quoted}' }}}}"
        "{%- elif part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}"
    )
    end = "{%- if message['role'] == 'assistant' -%}{{ eos_token }}{%- endif -%}"
    return {
        TEMPLATE: {
            "chat_template": f"{{%- for message in messages -%}}{content}{end}{{%- endfor -%}}",
        }
    }
