"""The plugin `pp`: a table `[pp]` cuts the model into stages, each on ranks of its own.

`forge check` imports this module, so it must not import torch; the functions below do it when called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from forge_core import hookimpl
from forge_core.config import Config, Problem
from forge_core.contract import MeshAxis, Transform
from forge_pp.table import PpConfig

if TYPE_CHECKING:
    from forge_core import TrainingSession
    from forge_core.contract import StepFn

forge_api = 1


@hookimpl
def forge_tables() -> type:
    return PpConfig


@hookimpl
def forge_problems(config: Config, world_size: int) -> Iterator[Problem]:
    from forge_pp.problems import all_problems

    yield from all_problems(config, world_size)


@hookimpl
def forge_mesh_axes(config: Config) -> list[MeshAxis]:
    """Outermost: what stages say to each other is least."""
    size = config[PpConfig].size
    return [MeshAxis(name="pp", size=size, place=10, loss_differs=True, params_differ=True)]


@hookimpl
def forge_model_transforms(session: TrainingSession) -> Iterator[Transform]:
    if session.mesh.size("pp") > 1:
        from forge_pp.build import cut_model

        yield Transform(phase="split", name="stages", apply=lambda model: cut_model(session, model))


@hookimpl
def forge_build_step_fn(session: TrainingSession) -> StepFn | None:
    if session.mesh.size("pp") == 1:
        return None
    from forge_pp.build import build_step

    return build_step(session)


@hookimpl
def forge_explanations(session: TrainingSession) -> Mapping[str, Sequence[str]]:
    if session.mesh.size("pp") == 1:
        return {}
    from forge_pp.explain import lines

    return {"stages": list(lines(session))}
