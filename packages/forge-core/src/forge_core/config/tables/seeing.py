"""`[metrics]`, `[profiling]` and `[distributed]`."""

from __future__ import annotations

from forge_core.config.fields import key, table


@table
class MetricsConfig:
    """What is measured and where it goes. metrics.jsonl is always written."""

    log_interval: int = key(10, gt=0, unit="steps", help="Updates between log lines (the first always logs).")
    writers: list[str] = key(
        factory=list, component="writer", help="Further places for metrics, several at once."
    )
    progress: str = key(
        "auto",
        choices=("auto", "bar", "plain", "off"),
        help="Progress on the terminal; auto: a bar on a terminal, else lines.",
    )
    peak_tflops: float | None = key(
        None,
        gt=0,
        unit="TFLOP/s",
        help="Peak of one device, for MFU.",
        derived="known for common accelerators",
    )


@table
class ProfilingConfig:
    """A window of steps recorded with torch.profiler."""

    start_step: int | None = key(None, gt=0, help="First update that is recorded.", derived="no profile")
    steps: int = key(3, gt=0, help="Updates that are recorded.")


@table
class DistributedConfig:
    """How ranks share the work."""

    dp_replicate: int = key(1, ge=1, help="Replicas of the model.")
    dp_shard: int = key(
        -1, ge=-1, help="Ranks that share one replica's weights (FSDP2); -1 takes what is left."
    )
    tp: int = key(1, ge=1, help="Tensor parallel ranks.")
    cp: int = key(1, ge=1, help="Context parallel ranks.")
    cp_attention: str = key(
        "auto",
        choices=("auto", "gather", "ring"),
        help="How context ranks see each other's keys and values: gather all on every rank, or send them "
        "round a ring; auto: the ring in half precision on a device with torch's flash kernel, in layers "
        "without windows, caps and masks of plugins, else gather.",
    )
    sequence_parallel: bool = key(
        True, help="Tensor ranks also divide the tokens between mixers: norms, residuals, dropout."
    )
    reshard_after_forward: bool = key(
        True,
        help="Let go of a block's whole weights after its forward and gather them again for the backward; "
        "false keeps them, for less communication and more memory.",
    )
    cpu_offload: bool = key(False, help="Keep sharded weights, gradients and optimizer state in host memory.")
    start_timeout: float = key(
        600.0,
        gt=0,
        unit="s",
        help="How long processes wait for each other until the first update is done (start, compilation).",
    )
    timeout: float = key(
        300.0,
        gt=0,
        unit="s",
        help="How long processes wait for each other from then on, before they give up.",
    )
