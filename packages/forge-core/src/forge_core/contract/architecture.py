"""How a model family of Hugging Face corresponds to ours: configuration both ways, and rules for tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.errors import ForgeError

if TYPE_CHECKING:
    from forge_core.config.config import Config

KINDS = ("rename", "split", "stack", "permute")


class UnsuitedError(ForgeError):
    """A model cannot be written as an architecture; says what that has no word for."""


@attrs.frozen(kw_only=True)
class TensorRule:
    """How tensors of their files and parameters of ours correspond, both ways; the functions below make one.

    In names, `{layer}` or any other word in braces stands for a number that is the same on both sides.

    Attributes:
        kind: one of `KINDS`.
        theirs, ours: names; one of each, except that "split" has several of ours.
        dim: "split": dimension that is cut.
        sizes: "split": of each of ours along `dim`.
        over, count: "stack": the word in braces that numbers the parts of one of ours, and how many there
            are.
        shape, order: "permute": theirs is seen in this shape, and its dimensions are put into this order.
        theirs_shape, ours_shape: "permute": what theirs and ours really look like; empty: as seen.
    """

    kind: str
    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    dim: int = 0
    sizes: tuple[int, ...] = ()
    over: str = ""
    count: int = 0
    shape: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    theirs_shape: tuple[int, ...] = ()
    ours_shape: tuple[int, ...] = ()


def rename(theirs: str, ours: str) -> TensorRule:
    """One tensor, unchanged, under another name."""
    return TensorRule(kind="rename", theirs=(theirs,), ours=(ours,))


def split(theirs: str, ours: Sequence[str], sizes: Sequence[int], dim: int = 0) -> TensorRule:
    """One of theirs holds several of ours, one after another along `dim` (a fused projection)."""
    return TensorRule(kind="split", theirs=(theirs,), ours=tuple(ours), sizes=tuple(sizes), dim=dim)


def stack(theirs: str, ours: str, count: int) -> TensorRule:
    """`count` of theirs are one of ours with a new first dimension.

    Theirs are numbered from 0 by the one word in braces that the name of ours does not have.

    Raises:
        ValueError: there is not exactly one such word.
    """
    words = [word for word in re.findall(r"\{(\w+)\}", theirs) if f"{{{word}}}" not in ours]
    if len(words) != 1:
        raise ValueError(f"{theirs} needs one word in braces that {ours} does not have")
    return TensorRule(kind="stack", theirs=(theirs,), ours=(ours,), over=words[0], count=count)


def permute(
    theirs: str,
    ours: str,
    order: Sequence[int],
    *,
    shape: Sequence[int] = (),
    theirs_shape: Sequence[int] = (),
    ours_shape: Sequence[int] = (),
) -> TensorRule:
    """One tensor whose dimensions are in another order: `theirs.view(shape).permute(order).view(ours_shape)`.

    A transpose is `order=(1, 0)`. Where a view is taken (`shape`), the real shapes are given, too.
    """
    return TensorRule(
        kind="permute",
        theirs=(theirs,),
        ours=(ours,),
        order=tuple(order),
        shape=tuple(shape),
        theirs_shape=tuple(theirs_shape),
        ours_shape=tuple(ours_shape),
    )


def inside(rule: TensorRule, *, theirs: Mapping[str, str], ours: str) -> TensorRule:
    """A rule of a model that is part of a larger one.

    Args:
        theirs: by how a name of theirs begins, what stands there in the larger one.
        ours: what stands before the names of ours.

    Raises:
        ValueError: a name begins otherwise.
    """

    def moved(name: str) -> str:
        for begins, instead in theirs.items():
            if name.startswith(begins):
                return instead + name[len(begins) :]
        raise ValueError(f"{name} begins with none of {', '.join(theirs)}")

    return attrs.evolve(
        rule, theirs=tuple(map(moved, rule.theirs)), ours=tuple(ours + name for name in rule.ours)
    )


@attrs.frozen
class InputToken:
    """A special token that inputs of theirs need.

    Attributes:
        text: of the token; empty: that none has the `role`, so that nothing stands where it would be put.
        id: -1 where it is not known. key: of ours, which says it.
        role: name under which a tokenizer knows it, such as bos_token; empty: none.
    """

    text: str
    id: int
    key: str
    role: str = ""


def _no_tokens(keys: Mapping[str, Any]) -> Sequence[InputToken]:
    return ()


def _no_marks(config: Config) -> Sequence[InputToken]:
    return ()


def _as_they_are(
    tables: Mapping[str, Mapping[str, Any]],
) -> tuple[Mapping[str, Mapping[str, Any]], Sequence[str]]:
    return tables, ()


@attrs.frozen(kw_only=True)
class Architecture:
    """A model family of Hugging Face (an answer to `forge_architectures`, by its `model_type`).

    Attributes:
        class_name: of the model with its head, as `architectures` in config.json has it.
        read: config.json -> our tables as they would be written in TOML, `{"model": {"dim": 64, ...}}`. Reads
            what releases 4 and 5 of transformers write. Raises ForgeError for what has no counterpart here.
        write: resolved configuration -> keys of a config.json that both releases read, without `model_type`,
            `architectures`, dtype and token ids. Raises `UnsuitedError` for a model of another family.
        rules: resolved configuration -> all rules of its tensors.
        ignored: names of theirs, with words in braces, that carry nothing (buffers in old files).
        beside: names of further JSON files of theirs, about inputs. `read` finds what those that are there
            hold under these names, and what `write` gives under them is written as files.
        tokens: what `write` gave -> special tokens that inputs need. An export puts them into a tokenizer
            that it writes itself, and says where a tokenizer that it copies lacks them.
        marks: resolved configuration -> further ones, which text around inputs has.
        text: a model of text alone, which a family that sees or hears can have as its text part: tensors of
            theirs are "model.*" and "lm_head.*", those of ours a decoder's.
        defaults: of its configuration class, for keys that `read` needs and that a configuration inside
            another leaves out where it says what they are anyway.
        for_training: what `read` gave -> tables that an import writes for runs, and lines about what is
            otherwise in them; by default all stays.
    """

    class_name: str
    read: Callable[[Mapping[str, Any]], dict[str, dict[str, Any]]]
    write: Callable[[Config], dict[str, Any]]
    rules: Callable[[Config], Sequence[TensorRule]]
    ignored: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    tokens: Callable[[Mapping[str, Any]], Sequence[InputToken]] = _no_tokens
    marks: Callable[[Config], Sequence[InputToken]] = _no_marks
    text: bool = False
    defaults: Mapping[str, Any] = attrs.Factory(dict)
    for_training: Callable[
        [Mapping[str, Mapping[str, Any]]], tuple[Mapping[str, Mapping[str, Any]], Sequence[str]]
    ] = _as_they_are
