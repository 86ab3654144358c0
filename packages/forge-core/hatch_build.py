"""Puts the template of `forge new` into what is built: it lives beside the packages, not in one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class TemplateHook(BuildHookInterface):  # type: ignore[type-arg]
    """An installed package finds the template in itself, an editable one in the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        inside, beside = Path(self.root) / "_template", Path(self.root).parent / "_template"
        source = inside if inside.is_dir() else beside  # a source distribution has it inside
        if self.target_name == "sdist":
            build_data["force_include"][str(source)] = "_template"
        elif version != "editable":
            build_data["force_include"][str(source)] = "forge_core/_template"
