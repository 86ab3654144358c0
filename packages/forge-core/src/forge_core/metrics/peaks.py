"""Peak throughput of accelerators, for MFU.

Dense bf16 (fp16 where the device has no bf16) with fp32 accumulation and without structured sparsity, in
TFLOP/s of one torch device, from the vendors' data sheets. MFU is by convention the share of this peak,
whatever precision a run computes in.
"""

from __future__ import annotations

PEAK_TFLOPS: dict[str, float] = {
    "GB300": 2500.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "B100": 1750.0,
    "GH200": 989.4,
    "H200 NVL": 835.5,
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.5,
    "H100": 989.4,
    "H800 PCIe": 756.5,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX A6000": 154.8,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 6000 Ada": 364.2,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 4080": 97.5,
    "RTX 3090": 71.0,
    "V100-PCIE": 112.0,
    "V100": 125.0,
    "T4": 65.0,
    "MI355X": 2516.0,
    "MI350X": 2307.0,
    "MI325X": 1307.4,
    "MI300X": 1307.4,
    "MI300A": 980.6,
    # One torch device is one of the two dies of an MI250.
    "MI250X": 191.5,
    "MI250": 181.0,
    "MI210": 181.0,
}
"""By a part of `torch.cuda.get_device_name()`. Longer names are looked for first."""


def peak_flops(device_name: str) -> float | None:
    """Peak FLOP/s of a device by the name its driver gives, e.g. "NVIDIA H100 80GB HBM3"; None if unknown."""
    words = f" {device_name.replace('-', ' ')} ".lower()
    for name in sorted(PEAK_TFLOPS, key=len, reverse=True):
        if f" {name.replace('-', ' ')} ".lower() in words:
            return PEAK_TFLOPS[name] * 1e12
    return None
