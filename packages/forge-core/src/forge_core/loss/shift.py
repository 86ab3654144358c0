"""The one place where labels are shifted. Everything downstream gets targets: what each position predicts.

No torch is imported here: data workers shift numpy arrays, and tensors bring their own methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100
"""Label of a position that is not supervised."""


@overload
def next_token_targets(
    labels: NDArray[Any], documents: NDArray[Any] | None = None, following: NDArray[Any] | int | None = None
) -> NDArray[np.int64]: ...
@overload
def next_token_targets(
    labels: Tensor, documents: Tensor | None = None, following: Tensor | int | None = None
) -> Tensor: ...
def next_token_targets(labels: Any, documents: Any = None, following: Any = None) -> Any:
    """What each position predicts: `targets[s] = labels[s + 1]` where both are of one document, else -100.

    A document's last token, its end-of-text token, belongs to it: the token before predicts it, and it
    predicts nothing. Labels that are -100 (a prompt) stay so.

    Args:
        labels: (..., S) integers, the token at each position or -100 where it must not be learnt.
        documents: (..., S) integers, equal for tokens of one document; None for one document a row. With
            `following` it may be (..., S + 1), its last entry the document of the label after the window.
        following: (...) or a number, the label after the window, which the last position predicts; None
            leaves the last position without a target.

    Returns:
        (..., S) int64 of the kind and on the device of `labels`.

    Raises:
        ValueError: shapes that do not go together.
    """
    length = labels.shape[-1]
    longest = length if following is None else length + 1
    if documents is not None and documents.shape[-1] not in (length, longest):
        raise ValueError(f"documents {tuple(documents.shape)} do not go with labels {tuple(labels.shape)}")
    if isinstance(labels, np.ndarray):
        targets: Any = np.empty(labels.shape, dtype=np.int64)
    else:
        targets = labels.long().new_empty(labels.shape)
    targets[..., :-1] = labels[..., 1:]
    if length:
        targets[..., -1] = IGNORE if following is None else following
    if documents is not None:
        _blank(targets, documents[..., 1:] != documents[..., :-1])
    return targets


def _blank(targets: Any, crosses: Any) -> None:
    """Put -100 where position s and its successor are of different documents; `crosses` (..., S - 1 or S)."""
    inside = targets[..., : crosses.shape[-1]]
    if isinstance(targets, np.ndarray):
        np.copyto(inside, IGNORE, where=crosses)
    else:
        inside.masked_fill_(crosses, IGNORE)
