"""The profiler records its window and nothing else, and its summary adds up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from forge_core.config.tables import ProfilingConfig
from forge_core.errors import ForgeError
from forge_core.metrics.profiler import KernelTime, StepProfiler, kind_of, summarize


def work(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(32, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def run(profiler: StepProfiler, steps: range) -> None:
    model = nn.Linear(16, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in steps:
        profiler.step_begin(step)
        work(model, optimizer)
        profiler.step_end(step)


def calls(folder: Path, name: str) -> int:
    events = json.loads((folder / "profile" / "trace.json").read_text())["traceEvents"]
    return sum(event.get("name") == name for event in events)


def test_the_window_and_only_the_window(tmp_path: Path) -> None:
    notices: list[str] = []
    profiler = StepProfiler(
        ProfilingConfig(start_step=3, steps=2), tmp_path, peak_flops=1e15, notice=notices.append
    )
    run(profiler, range(1, 7))
    profiler.close()
    assert calls(tmp_path, "aten::_fused_adamw_") == 2
    text = (tmp_path / "profile" / "summary.md").read_text()
    assert text.startswith("# Profile\n\n2 updates, ")
    assert "of peak" in text
    assert "| aten::mm | matmul | 4 |" in text  # forward and weight gradient, twice
    assert "| optimizer |" in text
    assert notices == [f"{text}trace: {tmp_path / 'profile' / 'trace.json'}"]


def test_a_run_that_ends_inside_the_window_writes_what_there_is(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfilingConfig(start_step=2, steps=10), tmp_path, notice=lambda text: None)
    run(profiler, range(1, 5))
    assert not (tmp_path / "profile").exists()
    profiler.close()
    assert calls(tmp_path, "aten::_fused_adamw_") == 3
    profiler.close()


def test_a_run_that_resumes_inside_or_after_the_window(tmp_path: Path) -> None:
    for name, begin, recorded in (("inside", 4, 2), ("after", 6, None)):
        profiler = StepProfiler(
            ProfilingConfig(start_step=2, steps=4), tmp_path / name, notice=lambda text: None
        )
        run(profiler, range(begin, 9))
        profiler.close()
        if recorded is None:
            assert not (tmp_path / name).exists()
        else:
            assert calls(tmp_path / name, "aten::_fused_adamw_") == recorded


def test_off_does_nothing(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfilingConfig(), tmp_path)
    run(profiler, range(1, 10))
    profiler.close()
    assert profiler.profile is None
    assert list(tmp_path.iterdir()) == []


def test_a_failing_step_leaves_no_empty_profile(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfilingConfig(start_step=1, steps=2), tmp_path)
    profiler.step_begin(1)
    profiler.close()
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("in the way")
    profiler = StepProfiler(ProfilingConfig(start_step=1, steps=1), tmp_path)
    with pytest.raises(ForgeError, match=r"cannot write the profile to .*profile: File exists"):
        run(profiler, range(1, 3))
    profiler.close()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matmul"),
        ("aten::addmm", "matmul"),
        ("aten::bmm", "matmul"),
        ("aten::_grouped_mm", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "matmul"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm>", "matmul"),
        ("pytorch_flash::flash_fwd_kernel", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("triton_tem_fused_flex_attention_1", "attention"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("gloo:all_reduce", "communication"),
        ("c10d::allgather_", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "memory"),
        ("aten::copy_", "memory"),
        ("aten::_to_copy", "memory"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "memory"),
        ("aten::_fused_adamw_", "optimizer"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_poi_fused__to_copy_mul_silu_2", "other"),
        ("aten::gelu", "other"),
        ("aten::broadcast_to", "other"),
        ("aten::sum", "other"),
    ],
)
def test_kinds_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_summary_by_hand() -> None:
    kernels = [
        KernelTime(name="aten::mm", seconds=0.6, calls=4, flops=3e9),
        KernelTime(name="a|b", seconds=0.3),
        KernelTime(name="aten::copy_", seconds=0.1),
        KernelTime(name="aten::silent", seconds=0.0),
    ]
    text = summarize(kernels, steps=4, seconds=2.0, peak_flops=3e10)
    assert "4 updates, 500.0 ms each under the profiler; busy 1.000 s of 2.000 s; 1.5 GFLOP/s" in text
    assert "5.0% of peak" in text
    assert "| matmul | 0.600 | 60.0% |" in text
    assert "| memory | 0.100 | 10.0% |" in text
    assert "| other | 0.300 | 30.0% |" in text
    assert "| attention | 0.000 | 0.0% |" in text
    assert "| a\\|b | other | 1 | 0.300 | 30.0% |" in text
    assert "silent" not in text
    assert "| matmul | 0.000 | 0.0% |" in summarize([], steps=1, seconds=0.0)


def test_making_one_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from forge_core.config.tables import ProfilingConfig\n"
        "from forge_core.metrics.profiler import StepProfiler\n"
        "p = StepProfiler(ProfilingConfig(start_step=5), Path('x'))\n"
        "p.step_begin(1); p.step_end(1); p.close()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60, cwd=tmp_path)
