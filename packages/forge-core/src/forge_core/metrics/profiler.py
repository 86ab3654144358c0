"""A window of updates under torch.profiler: a trace for chrome://tracing or Perfetto, and a summary to read.

Nothing is imported and nothing runs when profiling is off.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.errors import ForgeError

if TYPE_CHECKING:
    from forge_core.config.tables import ProfilingConfig

KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("other", r"triton_(poi|red|per)_"),  # fused pointwise work, whatever the operators in its name
        (
            "communication",
            r"nccl|rccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast_(?!to)",
        ),
        ("attention", r"flash|fmha|attention|sdpa|flex_attn"),
        ("matmul", r"gemm|gemv|matmul|cutlass|cublas|nvjet|xmma|triton_mm|einsum|linear|::\w*mm(\b|_)"),
        ("optimizer", r"optimizer|adam|multi_tensor|foreach|lion|muon|schedulefree"),
        (
            "memory",
            r"mem(cpy|set)|copy|clone|contiguous|::cat\b|catarray|fill|zero|::empty|resize|to_copy|index_select",
        ),
    )
)
"""What a kernel or operator counts as, by its name; the first that matches. Anything else is "other"."""

ORDER = ("matmul", "attention", "communication", "memory", "optimizer", "other")


@attrs.frozen(kw_only=True)
class KernelTime:
    """Time of one kernel (or CPU operator, without what it calls) over the window."""

    name: str
    seconds: float
    calls: int = 1
    flops: float = 0.0


def kind_of(name: str) -> str:
    """The kind of work that a kernel or operator of this name does, one of `ORDER`."""
    return next((kind for kind, pattern in KINDS if pattern.search(name)), "other")


class StepProfiler:
    """Records updates `start_step` to `start_step + steps - 1` as trace.json and summary.md in RUN/profile.

    A run that begins inside the window records what is left of it, one that begins after it nothing. Without
    a call for the last step, `close()` writes what there is. Make it on rank 0 only.

    Args:
        config: the `[profiling]` table; without a start_step nothing is ever recorded.
        run: the run folder.
        peak_flops: peak FLOP/s of the device, to compare with, or None.
        notice: gets the summary as text.
    """

    def __init__(
        self,
        config: ProfilingConfig,
        run: Path,
        *,
        peak_flops: float | None = None,
        notice: Callable[[str], None] = print,
    ) -> None:
        self.first = math.inf if config.start_step is None else config.start_step
        self.last = self.first + config.steps - 1
        self.folder = run / "profile"
        self.peak_flops = peak_flops
        self.notice = notice
        self.profile: Any = None
        self.began = 0.0
        self.recorded = 0

    def step_begin(self, step: int) -> None:
        """Before update `step`."""
        if self.profile is None and self.first <= step <= self.last:
            self.profile = _new_profile()
            self.profile.start()
            self.began = time.perf_counter()

    def step_end(self, step: int) -> None:
        """After update `step`."""
        if self.profile is None:
            return
        self.recorded += 1
        if step >= self.last:
            self.close()

    def close(self) -> None:
        """End the window and write what was recorded. A second call does nothing."""
        if self.profile is None:
            return
        _drain()
        seconds = time.perf_counter() - self.began
        profile, self.profile = self.profile, None
        profile.stop()
        if self.recorded == 0:
            return
        text = summarize(kernel_times(profile), self.recorded, seconds, self.peak_flops)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self.folder / "trace.json"))
            (self.folder / "summary.md").write_text(text, encoding="utf-8")
        except OSError as error:
            raise ForgeError(
                f"cannot write the profile to {self.folder}: {error.strerror or error}"
            ) from error
        self.notice(f"{text}trace: {self.folder / 'trace.json'}")


def kernel_times(profile: Any) -> list[KernelTime]:
    """Times by name: kernels of the device if any ran, else operators without what they call.

    FLOPs are those of the operators, which torch knows for matrix products and convolutions.
    """
    # A span around kernels is no kernel: those inside it are counted themselves.
    events = [e for e in profile.key_averages() if not (e.is_user_annotation and e.device_type.name != "CPU")]
    device = [e for e in events if e.device_type.name != "CPU"]
    timed = {id(e) for e in device or events}
    return [
        KernelTime(
            name=event.key,
            seconds=(event.self_device_time_total if device else event.self_cpu_time_total) / 1e6,
            calls=event.count,
            flops=float(event.flops),
        )
        if id(event) in timed
        else KernelTime(name=event.key, seconds=0.0, calls=0, flops=float(event.flops))
        for event in events
    ]


def summarize(
    kernels: Iterable[KernelTime], steps: int, seconds: float, peak_flops: float | None = None
) -> str:
    """The summary as Markdown.

    Args:
        kernels: times of the window.
        steps: updates in it.
        seconds: its wall time.
        peak_flops: of the device, or None.
    """
    kernels = list(kernels)
    total = sum(kernel.seconds for kernel in kernels)
    rate = sum(kernel.flops for kernel in kernels) / seconds if seconds > 0 else 0.0
    share = f", {rate / peak_flops:.1%} of peak" if peak_flops else ""
    lines = [
        "# Profile",
        "",
        f"{steps} update{'' if steps == 1 else 's'}, {1000 * seconds / max(1, steps):.1f} ms each under the "
        f"profiler; busy {total:.3f} s of {seconds:.3f} s; "
        f"{rate / 1e9:,.1f} GFLOP/s in matrix products{share}.",
        "",
        "| kind | time s | share |",
        "|---|---:|---:|",
    ]
    for kind in ORDER:
        busy = sum(kernel.seconds for kernel in kernels if kind_of(kernel.name) == kind)
        lines.append(f"| {kind} | {busy:.3f} | {busy / total if total else 0:.1%} |")
    return "\n".join([*lines, "", *_longest(kernels, total), ""])


def _longest(kernels: Sequence[KernelTime], total: float, count: int = 15) -> list[str]:
    lines = ["| longest | kind | calls | time s | share |", "|---|---|---:|---:|---:|"]
    for kernel in sorted(kernels, key=lambda k: -k.seconds)[:count]:
        if kernel.seconds > 0:
            name = kernel.name.replace("|", "\\|")
            name = name if len(name) <= 80 else name[:77] + "..."
            lines.append(
                f"| {name} | {kind_of(kernel.name)} | {kernel.calls} | {kernel.seconds:.3f} | "
                f"{kernel.seconds / total:.1%} |"
            )
    return lines


def _new_profile() -> Any:
    from torch.profiler import profile, supported_activities

    activities = supported_activities()  # type: ignore[no-untyped-call]
    return profile(activities=activities, record_shapes=True, with_flops=True, acc_events=True)


def _drain() -> None:
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
