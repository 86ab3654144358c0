"""`[optimizer]`, `[scheduler]` and `[loss]`."""

from __future__ import annotations

from forge_core.config.fields import key, table


@table
class GroupConfig:
    """An exception to the optimizer's settings for the parameters whose name matches."""

    modules: str = key(help="Pattern of global parameter names (fnmatch), or an alias of a module.")
    lr_scale: float = key(1.0, ge=0, help="Multiplies the learning rate.")
    weight_decay: float | None = key(
        None, ge=0, help="Replaces the weight decay.", derived="optimizer.weight_decay"
    )


@table
class OptimizerConfig:
    """The optimizer and its parameter groups."""

    name: str = key("adamw", component="optimizer", help="Which optimizer.")
    lr: float = key(3e-4, gt=0, help="Base learning rate.")
    weight_decay: float = key(0.1, ge=0, help="Decoupled weight decay of matrices.")
    betas: tuple[float, float] = key((0.9, 0.95), ge=0, lt=1, help="Decay rates of the moments.")
    eps: float = key(1e-8, gt=0, help="Added to the denominator.")
    no_decay: list[str] = key(
        factory=lambda: ["norm", "bias", "embedding"],
        choices=("norm", "bias", "embedding", "head", "matrix", "other"),
        help="Roles of parameters without weight decay.",
    )
    groups: list[GroupConfig] = key(factory=list, help="Exceptions by parameter name; the last match wins.")


@table
class SchedulerConfig:
    """The learning-rate schedule, a pure function of the update number."""

    name: str = key("cosine", component="schedule", help="Shape of the decay.")
    warmup_steps: int = key(0, ge=0, help="Updates of linear warm-up.")
    warmup_from_zero: bool = key(False, help="Let the first update run at learning rate 0.")
    min_lr_ratio: float = key(0.1, ge=0, le=1, help="Learning rate at the end, as a share of the base.")
    decay_steps: int | None = key(None, ge=0, help="Updates of the decay.", derived="all that remain")


@table
class LossConfig:
    """The training loss."""

    name: str = key("cross_entropy", component="loss", help="Which loss.")
    z_loss_weight: float = key(0.0, ge=0, help="Weight of the squared log-normaliser of the logits (PaLM).")
    chunk_size: int = key(
        0, ge=0, unit="tokens", help="Tokens whose logits exist at a time; 0 chooses by vocabulary."
    )
