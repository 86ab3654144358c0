"""From the pictures of a batch to visual tokens, by how the encoder takes pictures."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from forge_core.errors import ForgeError
from forge_vlm.encoders import packed
from forge_vlm.encoders.packed import layout_of
from forge_vlm.geometry import ImageGeometry, ImageShape, PackedGeometry, TiledGeometry

if TYPE_CHECKING:
    from forge_vlm.model import Images, VisionLanguageModel


class Sight(Protocol):
    """What a model does with the pictures of a batch."""

    def count(self, images: Images) -> int:
        """Visual tokens of a row, those that stand for nothing included."""
        ...

    def features(self, model: VisionLanguageModel, images: Images) -> Tensor:
        """Visual tokens (B, `count`, D). The encoder always runs, if need be on something blank: on every
        rank the same modules take part."""
        ...

    def blocks(self, images: Images) -> Tensor:
        """(B, S), which image of its row a visual token is of, -1 for text."""
        ...

    def grids(self, images: Images) -> Tensor | None:
        """(B, M, 3), visual tokens along time, height and width of each image, 0 where there is none; None
        where images take no place in the sequence."""
        ...

    def owners(self, images: Images) -> Tensor:
        """(B, `count`), which image of its row a visual token is of, -1 for one that stands for nothing."""
        ...

    def rooms(self, images: Images) -> Tensor:
        """(B, `count`), as `owners`, but an image also owns tokens for parts that it does not have."""
        ...

    def check(self, names: tuple[str, str], encoder: nn.Module, connector: nn.Module, dim: int) -> None:
        """Refuse parts whose output differs from what their options say.

        Raises:
            ForgeError: it does.
        """
        ...


class SquareSight:
    """Pictures of one size: `pixels` (B, M, 3, size, size)."""

    def __init__(self, shape: ImageShape) -> None:
        self.shape = shape

    def count(self, images: Images) -> int:
        return images["present"].shape[1] * self.shape.tokens

    def features(self, model: VisionLanguageModel, images: Images) -> Tensor:
        pixels, present = images["pixels"].flatten(0, 1), images["present"]
        kept = held(present)
        if kept is not None:
            pixels = pixels[kept]
        x = seen(model, (pixels.to(model.pixel_mean.dtype) / 255.0 - model.pixel_mean) / model.pixel_std)
        return spread(x, kept, present)

    def blocks(self, images: Images) -> Tensor:
        index = images["image_index"]
        return torch.where(index >= 0, index // self.shape.tokens, -1)

    def grids(self, images: Images) -> Tensor | None:
        if not self.shape.places:
            return None
        count, side = self.shape.tokens, math.isqrt(self.shape.tokens)
        # tokens that are no square have no places in the image, and stand in a row
        rows, columns = (side, side) if side**2 == count else (1, count)
        present = images["present"].long()
        return torch.stack((present, present * rows, present * columns), -1)

    def owners(self, images: Images) -> Tensor:
        return numbered(images["present"]).repeat_interleave(self.shape.tokens, 1)

    rooms = owners

    def check(self, names: tuple[str, str], encoder: nn.Module, connector: nn.Module, dim: int) -> None:
        g: ImageGeometry = self.shape.geometry  # type: ignore[assignment]
        checked("encoder", names[0], encoder, (torch.empty(1, 3, g.size, g.size),), (g.patches, g.dim))
        tokens = (self.shape.tokens, dim)
        checked("connector", names[1], connector, (torch.empty(1, g.patches, g.dim),), tokens)


class PackedSight:
    """Pictures and clips in sizes of their own: `patches` (B, P, 3 * frames * p * p), `grids` (B, M, 3)."""

    def __init__(self, shape: ImageShape) -> None:
        self.shape = shape
        geometry: PackedGeometry = shape.geometry  # type: ignore[assignment]
        self.side, self.joined = geometry.side, geometry.side**2

    def count(self, images: Images) -> int:
        return self.shape.visual

    def features(self, model: VisionLanguageModel, images: Images) -> Tensor:
        patches, layout = images["patches"], layout_of(images["grids"], self.shape.patches, self.side)
        rows, room = patches.shape[:2]
        kept = None
        if packed.on_host(patches):
            kept = (layout.images >= 0).flatten().nonzero().squeeze(1)
            kept = kept if len(kept) else torch.arange(self.joined)
            patches, layout = patches.flatten(0, 1)[kept][None], layout.chosen(kept)
        x = patches.view(*patches.shape[:2], 3, -1).to(model.pixel_mean.dtype) / 255.0
        x = ((x - model.pixel_mean.view(3, 1)) / model.pixel_std.view(3, 1)).flatten(2)
        x = seen(model, x, layout)
        if kept is not None:
            places = kept[:: self.joined] // self.joined
            whole = x.new_zeros(rows * room // self.joined, x.shape[-1])
            x = whole.index_copy(0, places, x[0]).view(rows, -1, x.shape[-1])
        return x

    def blocks(self, images: Images) -> Tensor:
        index, ends = images["image_index"], images["grids"].prod(-1).cumsum(-1) // self.joined
        image = (index[..., None] >= ends[:, None]).sum(-1)
        return torch.where(index >= 0, image, -1)

    def grids(self, images: Images) -> Tensor | None:
        if not self.shape.places:
            return None
        grids = images["grids"]
        return torch.cat((grids[..., :1], grids[..., 1:] // self.side), -1)

    def owners(self, images: Images) -> Tensor:
        ends = images["grids"].prod(-1).cumsum(-1) // self.joined
        at = torch.arange(self.shape.visual, device=ends.device)[None, :, None]
        image = (at >= ends[:, None]).sum(-1)
        return torch.where(image < ends.shape[1], image, -1)

    rooms = owners

    def check(self, names: tuple[str, str], encoder: nn.Module, connector: nn.Module, dim: int) -> None:
        g: PackedGeometry = self.shape.geometry  # type: ignore[assignment]
        # two squares above one another
        layout = layout_of(torch.tensor([[[1, 2 * self.side, self.side]]]), 2 * self.joined, self.side)
        given = (torch.empty(1, 2 * self.joined, g.width), layout)
        checked("encoder", names[0], encoder, given, (2 * self.joined, g.dim))
        checked("connector", names[1], connector, (torch.empty(1, 2 * self.joined, g.dim),), (2, dim))


class TiledSight:
    """Pictures as arrangements of tiles: `tiles` (B, M, T, 3, size, size) and `grids` (B, M, 2)."""

    def __init__(self, shape: ImageShape) -> None:
        self.shape = shape
        self.geometry: TiledGeometry = shape.geometry  # type: ignore[assignment]

    def count(self, images: Images) -> int:
        return images["present"].shape[1] * self.shape.tokens

    def features(self, model: VisionLanguageModel, images: Images) -> Tensor:
        tiles, grids = images["tiles"].flatten(0, 1), images["grids"].flatten(0, 1)
        kept = held(images["present"])
        if kept is not None:
            tiles, grids = tiles[kept], grids[kept]
        x = (tiles.to(model.pixel_mean.dtype) / 255.0 - model.pixel_mean) / model.pixel_std
        x = x * self.there(grids)[..., None, None, None]
        return spread(seen(model, x, grids), kept, images["present"])

    def there(self, grids: Tensor) -> Tensor:
        """Which of the most tiles an image has, (..., T) bool, by how many it has along its sides."""
        return torch.arange(self.geometry.tiles, device=grids.device) < grids.prod(-1, keepdim=True)

    def blocks(self, images: Images) -> Tensor:
        index = images["image_index"]
        return torch.where(index >= 0, index // self.shape.tokens, -1)

    def grids(self, images: Images) -> Tensor | None:
        return None

    def owners(self, images: Images) -> Tensor:
        tiles = self.there(images["grids"])
        owners = torch.where(tiles, numbered(images["present"])[..., None], -1)
        return owners.flatten(1).repeat_interleave(self.geometry.each, 1)

    def rooms(self, images: Images) -> Tensor:
        return numbered(images["present"]).repeat_interleave(self.shape.tokens, 1)

    def check(self, names: tuple[str, str], encoder: nn.Module, connector: nn.Module, dim: int) -> None:
        g = self.geometry
        given = (torch.empty(1, g.tiles, 3, g.size, g.size), torch.tensor([[1, 1]]))
        checked("encoder", names[0], encoder, given, (g.patches, g.dim))
        checked("connector", names[1], connector, (torch.empty(1, g.patches, g.dim),), (g.patches, dim))


def seen(model: VisionLanguageModel, x: Tensor, *more: Any) -> Tensor:
    """What connector and encoder make of pictures; an encoder that does not train leaves no graph."""
    trains = any(p.requires_grad for p in model.encoder.parameters())
    with nullcontext() if trains else torch.no_grad():
        x = model.encoder(x, *more)
    features: Tensor = model.connector(x)
    return features


def held(present: Tensor) -> Tensor | None:
    """(K,) numbers of the slots (B, M) that hold an image, or of the first where none does; None where the
    host would wait for the device to know, and all run."""
    if not packed.on_host(present):
        return None
    kept = present.flatten().nonzero().squeeze(1)
    return kept if len(kept) else kept.new_zeros(1)


def spread(x: Tensor, kept: Tensor | None, present: Tensor) -> Tensor:
    """Tokens (K, T, D) of the slots `kept` -> (B, M * T, D), 0 in the others."""
    rows, slots = present.shape
    if kept is not None and len(kept) < rows * slots:
        x = x.new_zeros(rows * slots, *x.shape[1:]).index_copy(0, kept, x)
    return x.view(rows, slots * x.shape[1], -1)


def numbered(present: Tensor) -> Tensor:
    """(B, M), the number of a slot in its row, -1 where it holds no image."""
    return torch.where(present, torch.arange(present.shape[1], device=present.device), -1)


def checked(
    kind: str, name: str, module: nn.Module, given: tuple[Any, ...], expected: tuple[int, int]
) -> None:
    """Refuse a part whose output for one row is no tensor of (tokens, width) as expected.

    Raises:
        ForgeError: it is not; says both.
    """
    with torch.no_grad():
        given_back = module.eval()(*given)
    module.train()
    if not isinstance(given_back, Tensor):
        message = f"the {kind} {name} gives a {type(given_back).__name__}, and a tensor is expected"
        raise ForgeError(message, "let its forward return the tokens (N, T, D) alone")
    found = tuple(given_back.shape[1:])
    if found != expected:
        message = f"the {kind} {name} gives {found} for an image, and {expected} is expected"
        raise ForgeError(message, "what its options say of tokens and width has to fit what it does")


def sight_of(shape: ImageShape) -> Sight:
    """By the kind of the encoder's geometry."""
    kinds: dict[str, type[Sight]] = {"square": SquareSight, "packed": PackedSight, "tiled": TiledSight}
    return kinds[shape.geometry.kind](shape)  # type: ignore[call-arg]


__all__ = ["PackedSight", "Sight", "SquareSight", "TiledSight", "checked", "numbered", "sight_of"]
