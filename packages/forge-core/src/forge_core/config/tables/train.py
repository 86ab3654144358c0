"""`[train]`: batch, length, precision and the other settings of the loop."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.config.fields import key, table
from forge_core.errors import Problem


@table
class TrainConfig:
    """The loop: batch, length, clipping, seed, precision."""

    batch_size: int = key(8, gt=0, unit="sequences", help="Sequences in a micro-batch of one rank.")
    seq_len: int = key(512, gt=0, unit="tokens", help="Tokens of a sequence.")
    max_steps: int = key(1000, gt=0, help="Updates to train for.")
    grad_accum_steps: int | None = key(
        None, gt=0, help="Micro-batches of an update.", derived="from global_batch_size, else 1"
    )
    global_batch_size: int | None = key(
        None,
        gt=0,
        unit="sequences",
        help="Sequences of an update over all ranks; derives grad_accum_steps.",
        derived="batch_size * grad_accum_steps * data ranks",
    )
    grad_clip_norm: float = key(1.0, ge=0, help="Limit of the global gradient norm; 0 turns clipping off.")
    seed: int = key(42, ge=0, help="Seed of weights, dropout and (unless data.seed) the order of samples.")
    dtype: str = key(
        "auto",
        choices=("auto", "fp32", "bf16", "fp16", "fp64"),
        help="Precision of compute; weights and optimizer state stay fp32 (fp64 under fp64). "
        "auto: bf16 on an accelerator, fp32 on a CPU. fp16 scales the loss.",
    )
    device: str = key(
        "auto", help="Device of the run, e.g. cpu or cuda; auto takes an accelerator if there is one."
    )
    compile: bool = key(False, help="torch.compile each block.")
    compile_backend: str = key("inductor", help="Backend of torch.compile.")
    float8: bool = key(
        False, help="Matrix products of blocks in float8 (torchao; needs a GPU of compute capability 8.9)."
    )
    activation_checkpointing: str = key(
        "none",
        choices=("none", "full", "selective"),
        help="Compute activations again in the backward instead of keeping them: full, whole blocks; "
        "selective, all but the operators of recompute_keep.",
    )
    recompute_every: int = key(1, gt=0, help="Activation checkpointing of every n-th block only.")
    recompute_keep: list[str] = key(
        factory=lambda: ["attention", "matmul"],
        choices=("attention", "matmul", "communication"),
        help="With selective activation checkpointing, the operators whose results are kept.",
    )

    def problems(self) -> Iterator[Problem]:
        if self.global_batch_size is not None and self.global_batch_size % self.batch_size:
            yield Problem(
                "global_batch_size",
                f"{self.global_batch_size} is not a multiple of batch_size = {self.batch_size}",
            )
