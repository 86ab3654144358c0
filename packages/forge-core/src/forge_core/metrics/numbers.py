"""Numbers as people read them."""

from __future__ import annotations

import math

UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def short(value: float) -> str:
    """Three significant digits with a unit: 12345 -> "12.3k", 7e9 -> "7.00B", 0.5 -> "0.500"."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for factor, unit in UNITS:
        if size >= factor * 0.9995:
            return f"{_three(value / factor)}{unit}"
    return str(int(value)) if value == int(value) else _three(value)


def scientific(value: float) -> str:
    """Three digits and a power of ten: 0.0003 -> "3.00e-4"."""
    if not math.isfinite(value):
        return str(value)
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def duration(seconds: float) -> str:
    """Seconds as "42s", "3m05s", "2h07m" or "4d03h"; "?" if they are not finite."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _three(value: float) -> str:
    size = abs(value)
    if 0 < size < 0.001:
        return scientific(value)
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3
    return f"{value:.{digits}f}"
