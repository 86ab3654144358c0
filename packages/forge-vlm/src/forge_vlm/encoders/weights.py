"""The tensors of a vision tower in a folder of safetensors: of the tower alone, or inside a larger model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from forge_core.errors import DataError
from forge_core.files import user_path

PREFIXES = (
    "",
    "vision_model.",
    "model.vision_model.",
    "vision_tower.vision_model.",
    "model.vision_tower.vision_model.",
    "model.vision_tower.",
    "vision_tower.",
)
"""What comes before a tower's names, in files of a tower, of both towers, and of models that see."""


class TowerFiles:
    """The tower in a folder.

    Args:
        path: the folder; `model.safetensors`, or what its index lists, or all safetensors.
        wanted: names of the tower's parameters.

    Attributes:
        names: those of the wanted that are there.
        unused: tensors of the tower that nobody wants.

    Raises:
        DataError: no safetensors, or one, or their index, that cannot be read.
    """

    def __init__(self, path: str, wanted: Iterable[str]) -> None:
        self.folder = user_path(path)
        self._files: dict[str, Any] = {}
        places = {name: file for file in self._list() for name in self._open(file).keys()}  # noqa: SIM118
        wanted = set(wanted)
        self._prefix = max(PREFIXES, key=lambda p: sum(f"{p}{name}" in places for name in wanted))
        self._places = places
        self.names = {name for name in wanted if f"{self._prefix}{name}" in places}
        inside = (name.removeprefix(self._prefix) for name in places if name.startswith(self._prefix))
        self.unused = sorted(set(inside) - wanted) if self._prefix else []

    def read(self, name: str) -> Tensor:
        """A tensor by the name that the tower has for it."""
        full = f"{self._prefix}{name}"
        found: Tensor = self._files[self._places[full]].get_tensor(full)
        return found

    def _list(self) -> list[str]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                hint = "it lists the file of each tensor; load the folder again"
                raise DataError(f"cannot read {index}: {type(error).__name__}: {error}", hint) from error
        found = sorted(file.name for file in self.folder.glob("*.safetensors"))
        if not found:
            raise DataError(
                f"{self.folder} has no safetensors", "pickles are not opened; convert them to safetensors"
            )
        return ["model.safetensors"] if "model.safetensors" in found else found

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            try:
                self._files[file] = safe_open(str(self.folder / file), framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                hint = "load the folder again, all of it"
                raise DataError(f"cannot read {self.folder / file}: {error}", hint) from error
        return self._files[file]
