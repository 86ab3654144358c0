"""The optimizers and schedules of the core, as components. Imports no torch.

Category "optimizer": `target(groups, config, options) -> torch.optim.Optimizer`, where `groups` is what
`parameter_groups` returns, `config` the `[optimizer]` table and `options` the component's own table or None.
Every group keeps its `initial_lr`. What an optimizer may offer beyond `torch.optim.Optimizer`:

- `forge_skips_on_device = True`: `step()` honours the attribute `found_inf`, see `forge_core.optim.skip`.
- `train()` and `eval()`: which weights the parameters hold, see `forge_core.optim.mode`.
- `init_state()`: creates the state of every parameter, so that a checkpoint knows it before the first update.

State lives in `optimizer.state` (tensors by parameter) and in numbers of `optimizer.param_groups`, nowhere
else: only that travels with checkpoints. `forge_core.testing.optimizers` has a suite of tests for all this.

Category "schedule": `target(config, options, max_steps) -> schedule`, where `config` is the `[scheduler]`
table and `schedule(n)` is the factor on the base learning rate of update n, from 1, a pure function of n.
"""

from __future__ import annotations

from forge_core.contract import Component

_OPTIONS = "forge_core.optim.options"


def _optimizer(name: str, module: str, options: str | None, help: str) -> Component:
    return Component(
        category="optimizer",
        name=name,
        target=f"forge_core.optim.{module}:build",
        options=options and f"{_OPTIONS}:{options}",
        help=help,
    )


def _schedule(name: str, help: str, options: str | None = None) -> Component:
    return Component(
        category="schedule",
        name=name,
        target=f"forge_core.optim.schedules:{name}",
        options=options and f"{_OPTIONS}:{options}",
        help=help,
    )


OPTIMIZERS = (
    _optimizer("adamw", "adamw", "AdamWOptions", "AdamW, fused where the device has it."),
    _optimizer("muon", "muon", "MuonOptions", "Muon for hidden matrices, AdamW for the rest."),
    _optimizer("lion", "lion", None, "Lion: the sign of an average; half the state of AdamW."),
    _optimizer(
        "schedule_free_adamw",
        "schedule_free",
        "ScheduleFreeOptions",
        "AdamW that averages weights instead of decaying the learning rate.",
    ),
)

SCHEDULES = (
    _schedule("cosine", "Warm-up, then half a cosine."),
    _schedule("linear", "Warm-up, then a straight line."),
    _schedule("wsd", "Warm-up, a plateau, then a decay.", "WsdOptions"),
    _schedule("constant", "Warm-up, then the base learning rate."),
    _schedule("rex", "Warm-up, then a power of what remains.", "RexOptions"),
    _schedule("none", "The base learning rate, without warm-up."),
)

COMPONENTS = OPTIMIZERS + SCHEDULES
