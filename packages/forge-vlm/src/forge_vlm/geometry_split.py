"""How a picture is cut into pieces of the size that an encoder takes (Idefics 3; Laurençon et al. 2024,
"Building and better understanding vision-language models", section 3.2).

Known from its size in pixels alone. Imports no torch.
"""

from __future__ import annotations

from typing import Any

import attrs

LARGEST = 4096
"""Pixels of the longer side, at most."""
_UNKNOWN = 4


def with_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """Height and width with the longer of them at `longest` pixels, the other even."""
    ratio = width / height
    if width >= height:
        other = int(longest / ratio)
        return max(1, other + other % 2), longest
    other = int(longest * ratio)
    return longest, max(1, other + other % 2)


def in_pieces(height: int, width: int, size: int) -> tuple[int, int]:
    """Height and width in whole pieces of `size` pixels that a picture is brought to: the longer side first,
    and the other after what that made of it."""
    ratio = width / height
    if width >= height:
        width = _whole(width, size)
        return _whole(int(width / ratio), size), width
    height = _whole(height, size)
    return height, _whole(int(height * ratio), size)


def arrangement(geometry: Any, height: int, width: int) -> tuple[int, int]:
    """Pieces along height and width of a picture of these pixels, beside which it is seen as a whole, too;
    (0, 0) where it is seen as a whole alone.

    Args:
        geometry: an `ImageGeometry`.
    """
    if not geometry.split:
        return 0, 0
    if geometry.longest is not None:
        height, width = with_longest(height, width, geometry.longest)
    rows, columns = (side // geometry.size for side in in_pieces(height, width, geometry.size))
    return (0, 0) if rows == columns == 1 else (rows, columns)


def most_pieces(geometry: Any) -> int:
    """Images that a picture becomes at most, itself as a whole included; one whose longer side keeps its
    length is taken to be four pieces long."""
    if not geometry.split:
        return 1
    along = _UNKNOWN if geometry.longest is None else _whole(geometry.longest, geometry.size) // geometry.size
    return int(along**2) + 1 if along > 1 else 1


def unsplit(geometry: Any) -> Any:
    """The same without pieces, as frames of videos are seen."""
    return attrs.evolve(geometry, split=False) if getattr(geometry, "split", False) else geometry


def _whole(side: int, size: int) -> int:
    return max(1, -(-side // size)) * size
