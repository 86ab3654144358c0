"""An encoder and a connector around any decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.config.tables import ModelConfig, TrainConfig
from forge_core.contract import SplitSpec
from forge_vlm.axes import placed
from forge_vlm.connectors import ConnectorSpec
from forge_vlm.geometry import ImageShape, shape_of
from forge_vlm.sight import sight_of
from forge_vlm.table import VlmConfig

if TYPE_CHECKING:
    from forge_core import TrainingSession
    from forge_vlm.fusions.base import Fusion

Images = dict[str, Tensor]
"""What a batch has of images, M slots a row: `pixels` (B, M, 3, H, W) uint8, or `patches`
(B, P, 3 * frames * p * p) uint8 with `grids` (B, M, 3) int64 and `steps` (B, M) float32, or `tiles`
(B, M, T, 3, H, W) uint8 with `grids` (B, M, 2) int64 (`forge_vlm.data.patches`), `present` (B, M) bool,
`image_index` (B, S) int64, which of the visual tokens of its row stands at a position or -1,
`image_places` (B, M) int64, the position at which an image stands, `image_documents` (B, M) int32, the
document that it is of, and `prompt` (B, S) bool, True before the first supervised token of each document."""

PICTURES = ("pixels", "patches", "tiles")
IMAGE_KEYS = (
    *PICTURES,
    "grids",
    "steps",
    "present",
    "image_index",
    "image_places",
    "image_documents",
    "prompt",
)
"""All that a batch can have of them; by the encoder it has one of `PICTURES`."""


class VisionLanguageModel(nn.Module):
    """`encoder`, `connector` and `decoder`, and the fusion that brings them together.

    Args:
        encoder: (N, 3, H, W) normalised pixels -> (N, T, D_in); one on patches: (B, P, 3 * frames * p * p)
            and their `PatchLayout` -> (B, P, D_in).
        connector: (N, T, D_in) -> (N, T', D).
        decoder: any that takes `embeds` and `extras`.
        fusion: see `Fusion`.
        shape: how images enter sequences.

    Attributes:
        first, last: of the parts of a model that was cut; both, where it is whole.
    """

    first: bool = True
    last: bool = True

    def __init__(
        self,
        encoder: nn.Module,
        connector: nn.Module,
        decoder: nn.Module,
        fusion: Fusion,
        shape: ImageShape,
    ) -> None:
        super().__init__()
        self.encoder, self.connector, self.decoder = encoder, connector, decoder
        self.fusion, self.geometry, self.tokens = fusion, shape.geometry, shape.tokens
        self.sight, self.apart, self.past_time = sight_of(shape), not shape.places, shape.past_time
        self.axes = bool(getattr(getattr(decoder, "config", None), "rope_sections", ()))
        self.pixel_mean: Tensor
        self.pixel_std: Tensor
        for name in ("pixel_mean", "pixel_std"):
            self.register_buffer(name, torch.empty(3, 1, 1), persistent=False)

    def forge_reset(self, generator: Any) -> None:
        """The statistics of the encoder's pixels."""
        self.pixel_mean.copy_(torch.tensor(self.geometry.mean, device="cpu").view(3, 1, 1))
        self.pixel_std.copy_(torch.tensor(self.geometry.std, device="cpu").view(3, 1, 1))

    def forward(
        self,
        tokens: Tensor,
        *,
        images: Images | None = None,
        seen: dict[str, Any] | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        valid: Tensor | None = None,
        cache: Any = None,
        apart: bool = False,
        carried: Sequence[Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Hidden states (B, S, D) of tokens (B, S), as the decoder gives them; of a part that is not the
        last, the tuple of what travels on.

        Args:
            images: what of the batch is about images; None: text alone.
            seen: keeps what was seen from one step of a generation to the next.
            positions, documents, valid, cache, apart: see `Decoder.forward`.
            carried: what travelled here, in a part that is not the first.
        """
        inputs = {"positions": positions, "documents": documents, "valid": valid, "cache": cache}
        if apart:
            inputs["apart"] = apart
        memory: dict[str, Any] = {} if seen is None else seen
        if carried is not None:
            inputs["embeds"] = carried[0]
        if images is not None:
            memory["features"] = self._features(images, carried)
            memory["marks"] = self._marks(images, None if cache is None else cache.capacity)
        if self.axes:
            grids = None if images is None else self.sight.grids(images)
            inputs["positions"] = placed(tokens, images, grids, memory, inputs, past_time=self.past_time)
        else:
            inputs["positions"] = self.fusion.positions(tokens, images, memory, inputs)
        index = None if images is None or self.apart else images["image_index"]
        marks = {**memory.get("marks", {}), "features": memory.get("features")}
        hidden: Tensor = self.fusion.run(self.decoder, tokens, index, marks, inputs)
        if self.last:
            return hidden
        # a copy, since FSDP2 warns of outputs that are views
        return (hidden, marks["features"].clone()) if self.travelling(images) else (hidden,)

    def travelling(self, images: Images | None = None, **_: Any) -> tuple[Tensor, ...]:
        """What travels behind hidden states, on the meta device: visual tokens (B, N, D), if blocks look at
        them."""
        if images is None or not self.fusion.features_travel:
            return ()
        shape = (len(images["present"]), self.sight.count(images), self.config.dim)
        return (torch.empty(shape, dtype=self.pixel_mean.dtype, device="meta"),)

    def _features(self, images: Images, carried: Sequence[Tensor] | None) -> Tensor | None:
        if carried is None:
            seen = self.sight.features(self, images)
            return seen if self.last else seen.to(self.pixel_mean.dtype)
        return carried[1] if len(carried) > 1 else None

    def _marks(self, images: Images, capacity: int | None) -> dict[str, Tensor]:
        """What modules of a fusion may ask of the tokens: all of `Images` but the pictures, and
        `image_blocks` (B, S), which image of its row a visual token is of, -1 for text. With a cache S is its
        capacity. Where images take no place in the sequence there are `image_owners` and `image_rooms`
        (B, N), see `Sight`."""
        marks = {name: value for name, value in images.items() if name not in PICTURES}
        marks["image_blocks"] = self.sight.blocks(images)
        if self.apart:
            marks["image_owners"] = self.sight.owners(images)
            marks["image_rooms"] = self.sight.rooms(images)
        if capacity is not None:
            for name, value in marks.items():
                if name in ("image_index", "image_blocks", "prompt"):
                    empty = False if value.dtype is torch.bool else -1
                    more = value.new_full((value.shape[0], capacity - value.shape[1]), empty)
                    marks[name] = torch.cat((value, more), 1)
        return marks

    def split(self) -> SplitSpec | None:
        """As the decoder divides, with what sees before its first block; None where it does not say."""
        split = getattr(self.decoder, "split", None)
        inner = split() if callable(split) else None
        if inner is None:
            return None
        entry, leaving = (tuple(f"decoder.{name}" for name in names) for names in (inner.entry, inner.exit))
        return SplitSpec(
            entry=("encoder", "connector", *entry),
            blocks=f"decoder.{inner.blocks}",
            exit=leaving,
            tied=tuple(tuple(f"decoder.{name}" for name in group) for group in inner.tied),
        )

    @property
    def text_part(self) -> nn.Module:
        """Where weights of a text model go (`model.init_from`)."""
        return self.decoder

    @property
    def head(self) -> Any:
        """The decoder's, for the loss."""
        return self.decoder.head

    @property
    def part(self) -> Any:
        """How ranks divide the sequence, see `Decoder`."""
        return getattr(self.decoder, "part", None)

    @part.setter
    def part(self, part: Any) -> None:
        self.decoder.part = part

    @property
    def config(self) -> ModelConfig:
        """The decoder's table."""
        found: ModelConfig = self.decoder.config  # type: ignore[assignment]
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, V)."""
        logits: Tensor = self.decoder.logits(hidden)  # type: ignore[operator]
        return logits

    def new_cache(self, batch: int, length: int, device: Any = None, dtype: Any = None) -> Any:
        """See `Decoder.new_cache`."""
        return self.decoder.new_cache(batch, length, device, dtype)  # type: ignore[operator]


def build_model(session: TrainingSession, decoder: nn.Module) -> VisionLanguageModel:
    """What `[vlm]` describes, around `decoder`, on the current default device.

    Raises:
        ForgeError: encoder or connector give another number or width of tokens than they say.
    """
    vlm, model = session.config[VlmConfig], session.config[ModelConfig]
    shape = shape_of(session.config)
    geometry = shape.geometry
    encoder = session.component("vlm_encoder", vlm.encoder.name)(
        session.options("vlm.encoder", vlm.encoder.name)
    )
    grid = getattr(geometry, "grid", 0)
    spec = ConnectorSpec(in_dim=geometry.dim, out_dim=model.dim, grid=grid)
    connector = session.component("vlm_connector", vlm.connector.name)(
        spec, session.options("vlm.connector", vlm.connector.name)
    )
    names = (vlm.encoder.name, vlm.connector.name)
    sight_of(shape).check(names, encoder, connector, model.dim)
    for module in (encoder, connector):  # they see the tokens of images, whatever the length of the text
        seen = shape.patches or shape.most * geometry.patches
        module.active_share = seen / session.config[TrainConfig].seq_len
    from forge_vlm.fusions.base import fusion_of

    return VisionLanguageModel(encoder, connector, decoder, fusion_of(session), shape)


def encoder_of(model: nn.Module) -> Any:
    """Its encoder; of a model that was cut, the one of this rank's parts, None where they have none."""
    found = (getattr(part, "encoder", None) for part in getattr(model, "parts", (model,)))
    return next((encoder for encoder in found if encoder is not None), None)


def load_encoder(model: nn.Module) -> nn.Module:
    """Weights of the encoder from where its options say, for encoders that have `load_pretrained()`."""
    load = getattr(encoder_of(model), "load_pretrained", None)
    if load is not None:
        load()
    return model
