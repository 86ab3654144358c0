"""The options of each optimizer and schedule: `[optimizer.NAME]` and `[scheduler.NAME]`. Imports no torch."""

from __future__ import annotations

from forge_core.config.fields import key, table


@table
class AdamWOptions:
    """Options of AdamW."""

    fused: bool = key(
        True,
        help="One kernel for the whole update, which also skips a bad update without a host sync; "
        "falls back where the device has none.",
    )


@table
class MuonOptions:
    """Options of Muon. Hidden matrices are orthogonalised; all other parameters take AdamW."""

    momentum: float = key(0.95, ge=0, lt=1, help="Decay rate of the average of gradients.")
    nesterov: bool = key(True, help="Look ahead: mix the gradient into the average once more.")
    ns_steps: int = key(5, gt=0, lt=100, help="Newton-Schulz iterations.")
    ns_dtype: str = key(
        "auto",
        choices=("auto", "fp32", "bf16"),
        help="Precision of the iterations. auto: bf16 on an accelerator, fp32 on a CPU; "
        "fp64 matrices stay fp64.",
    )
    scale: str = key(
        "original",
        choices=("original", "match_rms_adamw"),
        help="Size of the update of a (m, n) matrix: sqrt(max(1, m/n)), or 0.2 sqrt(max(m, n)), "
        "with which learning rate and weight decay of AdamW carry over.",
    )
    adam_lr: float | None = key(
        None, gt=0, help="Base learning rate of the parameters that take AdamW.", derived="optimizer.lr"
    )


@table
class ScheduleFreeOptions:
    """Options of schedule-free AdamW. It needs no decay: choose scheduler.name = "constant"."""

    warmup_steps: int = key(
        0,
        ge=0,
        help="Updates of warm-up inside the optimizer. The same as scheduler.warmup_steps with a constant "
        "schedule; both together multiply.",
    )
    r: float = key(0.0, ge=0, help="Weights of the average grow with this power of the update number.")
    weight_lr_power: float = key(
        2.0, ge=0, help="Weights of the average go with this power of the largest learning rate so far."
    )


@table
class WsdOptions:
    """Options of the warm-up, stable, decay schedule."""

    stable_steps: int = key(0, ge=0, help="Updates at the base learning rate between warm-up and decay.")
    decay: str = key("cosine", choices=("cosine", "linear", "sqrt"), help="Shape of the decay.")


@table
class RexOptions:
    """Options of the REX schedule."""

    alpha: float = key(1.0, gt=0, help="Power of what remains; 1 is linear, below 1 stays high for longer.")
