"""Speed, MFU, memory and time left against hand counts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from forge_core.metrics.numbers import duration, scientific, short
from forge_core.metrics.peaks import peak_flops
from forge_core.metrics.throughput import Meter, peak_memory_gb


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    return Clock()


def meter(clock: Clock, **options: object) -> Meter:
    return Meter(max_steps=100, clock=clock, **options)  # type: ignore[arg-type]


def test_step_time_and_tokens(clock: Clock) -> None:
    speed = meter(clock)
    speed.start(0)
    for _ in range(4):
        clock.now += 0.5
        speed.count(1000)
    assert speed.measure(4) == {"train/step_time_sec": 0.5, "train/tokens_per_sec": 2000.0}
    clock.now += 3.0
    speed.count(600)
    assert speed.measure(5) == {"train/step_time_sec": 3.0, "train/tokens_per_sec": 200.0}
    assert speed.measure(5) == {}


def test_mfu_by_hand(clock: Clock) -> None:
    # width 4, vocabulary 16, 2 layers, 2 query heads, 1 key/value head, MLP of 8, length 8: 2112 + 384
    speed = meter(clock, flops_per_token=2496.0, peak_flops=1e12)
    speed.start(10)
    clock.now += 2.0
    speed.count(2_000_000)
    found = speed.measure(12)
    assert found["train/tokens_per_sec"] == 1e6
    assert found["train/mfu"] == pytest.approx(0.002496, rel=1e-12)


def test_mfu_counts_every_device_and_needs_a_peak(clock: Clock) -> None:
    shared = meter(clock, flops_per_token=2496.0, peak_flops=1e12, devices=4)
    unknown = meter(clock, flops_per_token=2496.0)
    uncounted = meter(clock, peak_flops=1e12)
    clock.now += 1.0
    for speed in (shared, unknown, uncounted):
        speed.count(1_000_000)
    assert shared.measure(1)["train/mfu"] == pytest.approx(0.002496 / 4, rel=1e-12)
    assert "train/mfu" not in unknown.measure(1)
    assert "train/mfu" not in uncounted.measure(1)


def test_pauses_are_no_training_time_but_take_time(clock: Clock) -> None:
    waits: list[float] = []

    def drain() -> None:
        clock.now += 1.0  # training that the device has still to do belongs to training
        waits.append(clock.now)

    speed = meter(clock, synchronize=drain)
    speed.start(0)
    clock.now += 3.0
    speed.count(400)
    with suppress(KeyError), speed.paused():
        clock.now += 6.0
        raise KeyError
    assert waits == [104.0]
    assert speed.measure(4) == {"train/step_time_sec": 1.0, "train/tokens_per_sec": 100.0}
    assert speed.eta_sec == 96 * 2.5


def test_time_left_forgets_the_first_interval_and_is_smooth(clock: Clock) -> None:
    speed = meter(clock)
    assert speed.eta_sec is None
    clock.now += 60.0
    speed.measure(1)
    assert speed.eta_sec == 99 * 60.0
    clock.now += 9.0
    speed.measure(10)
    assert speed.eta_sec == 90 * 1.0
    clock.now += 20.0
    speed.measure(20)
    assert speed.eta_sec == pytest.approx(80 * 1.2)
    clock.now += 80.0
    speed.measure(100)
    assert speed.eta_sec == 0.0


def test_peak_memory_of_a_cpu_process_grows() -> None:
    before = peak_memory_gb()
    assert before is not None
    assert 0.01 < before < 100
    block = bytearray(300_000_000)
    block[::4096] = b"x" * len(block[::4096])
    after = peak_memory_gb()
    del block
    assert after is not None
    assert after >= before
    assert after > 0.3
    assert peak_memory_gb() == pytest.approx(after, abs=0.05)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla V100-PCIE-16GB", 112.0),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI250X", 191.5),
    ],
)
def test_peaks_by_device_name(name: str, tflops: float) -> None:
    assert peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize("name", ["", "cpu", "Intel Xeon", "NVIDIA A1000", "NVIDIA T400"])
def test_no_peak_for_the_rest(name: str) -> None:
    assert peak_flops(name) is None


def test_numbers_for_people() -> None:
    values = [
        0,
        1,
        12,
        999,
        1000,
        12345,
        999_999,
        1.5e6,
        7e9,
        2e12,
        0.5,
        3.14159,
        0.00012,
        -2500,
        float("nan"),
    ]
    texts = ["0", "1", "12", "999", "1.00k", "12.3k", "1.00M", "1.50M", "7.00B", "2.00T", "0.500", "3.14"]
    assert [short(v) for v in values] == [*texts, "1.20e-4", "-2.50k", "nan"]
    assert [duration(s) for s in (0, 42.4, 185, 7620, 360_000, float("inf"))] == [
        "0s",
        "42s",
        "3m05s",
        "2h07m",
        "4d04h",
        "?",
    ]
    assert [scientific(v) for v in (3e-4, 0.0, 1.0, float("inf"))] == ["3.00e-4", "0.00e0", "1.00e0", "inf"]


LIGHT = ("jsonl", "numbers", "options", "peaks", "profiler", "progress", "report", "throughput", "writers")


def test_what_shows_a_run_imports_no_torch() -> None:
    lines = [f"import forge_core.metrics.{name}" for name in (*LIGHT, "tensorboard", "wandb", "mlflow")]
    lines.append("import sys; assert 'torch' not in sys.modules; assert 'rich' not in sys.modules")
    subprocess.run([sys.executable, "-W", "error", "-c", "\n".join(lines)], check=True, timeout=60)
