"""Norms and rotary tables against plain formulas."""

from __future__ import annotations

import math

import pytest
import torch
from modelkit import config

from forge_core.config.tables import RopeScalingConfig
from forge_core.errors import ForgeError
from forge_core.model import LayerNorm, RMSNorm, RotaryTable, build_norm, rotate
from forge_core.model.rope import frequencies


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rmsnorm_rows_have_unit_rms_and_keep_their_dtype(dtype: torch.dtype) -> None:
    x = (torch.randn(5, 7, 64, generator=torch.Generator().manual_seed(0)) * 300).to(dtype)
    y = RMSNorm(64, eps=1e-5).to(dtype)(x)
    assert y.dtype == dtype
    rms = y.double().square().mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.ones_like(rms), rtol=4e-3, atol=0)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_low_precision_rmsnorm_computes_in_fp32_and_rounds_once(weight_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(9, 64, generator=generator) * 3).bfloat16()
    norm = RMSNorm(64, eps=1e-5).to(weight_dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(64, generator=generator))
    wide = x.float()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * norm.weight.float()
    y = norm(x)
    assert y.dtype == torch.bfloat16
    # equal to the rounded exact value but for ties decided by the last bit of fp32
    assert (y != exact.bfloat16()).float().mean() < 0.01
    torch.testing.assert_close(y, exact.bfloat16(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layernorm_equals_its_formula(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(3, 5, 32, generator=generator) * 4 + 7).to(dtype)
    norm = LayerNorm(32, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(32, generator=generator))
        norm.bias.copy_(torch.randn(32, generator=generator))
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    exact = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias
    y = norm(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


def test_norm_type_picks_the_norm() -> None:
    assert isinstance(build_norm(config(), 16), RMSNorm)
    norm = build_norm(config(norm_type="layernorm", norm_eps=0.25), 16)
    assert isinstance(norm, LayerNorm)
    assert norm.eps == 0.25


def plain_frequencies(scaling: RopeScalingConfig, theta: float, width: int) -> tuple[list[float], float]:
    """Angles per token of each pair, number by number."""
    result = []
    original, factor = scaling.original_max_seq_len, scaling.factor
    for pair in range(width // 2):
        rate = theta ** (-2 * pair / width)
        if scaling.type == "linear":
            rate /= factor
        elif scaling.type == "llama3":
            wavelength = 2 * math.pi / rate
            longest, shortest = original / scaling.low_freq_factor, original / scaling.high_freq_factor
            if wavelength > longest:
                rate /= factor
            elif wavelength > shortest:
                smooth = (original / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                rate = (1 - smooth) * rate / factor + smooth * rate
        elif scaling.type == "yarn":

            def turning(rotations: float) -> float:
                return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

            low, high = turning(scaling.beta_fast), turning(scaling.beta_slow)
            if scaling.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, width - 1)
            ramp = min(1.0, max(0.0, (pair - low) / (high - low)))
            rate = rate / factor * ramp + rate * (1 - ramp)
        result.append(rate)
    yarn = scaling.attention_factor or 0.1 * math.log(factor) + 1
    return result, yarn if scaling.type == "yarn" else 1.0


SCALINGS = [
    RopeScalingConfig(),
    RopeScalingConfig(type="linear", factor=4.0),
    RopeScalingConfig(type="llama3", factor=8.0, original_max_seq_len=64),
    RopeScalingConfig(type="llama3", factor=32.0, original_max_seq_len=256, low_freq_factor=2.0),
    RopeScalingConfig(type="yarn", factor=4.0, original_max_seq_len=128),
    RopeScalingConfig(type="yarn", factor=16.0, original_max_seq_len=1024, truncate=False),
    RopeScalingConfig(type="yarn", factor=4.0, original_max_seq_len=128, beta_fast=8.0, attention_factor=1.5),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: f"{s.type}-{s.factor:g}")
def test_tables_equal_the_plain_formula(scaling: RopeScalingConfig) -> None:
    model = config(head_dim=32, rope_theta=500.0, rope_scaling=scaling)
    rates, factor = plain_frequencies(scaling, 500.0, 32)
    assert scaling.type == "none" or rates != plain_frequencies(SCALINGS[0], 500.0, 32)[0]
    found, found_factor = frequencies(model, torch.float64)
    torch.testing.assert_close(found, torch.tensor(rates, dtype=torch.float64), rtol=1e-12, atol=0)
    assert found_factor == pytest.approx(factor, rel=1e-12)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-11)):
        cos, sin = RotaryTable(model).at(torch.zeros(1, 31, 4, dtype=dtype))
        assert cos.shape == sin.shape == (31, 1, 32)
        assert cos.dtype == sin.dtype == dtype
        for position in (0, 1, 17, 30):
            for pair, rate in enumerate(rates):
                want = [math.cos(position * rate) * factor, math.sin(position * rate) * factor]
                got = [cos[position, 0, pair].item(), sin[position, 0, pair + 16].item()]
                assert got == pytest.approx(want, abs=tolerance)
                assert cos[position, 0, pair + 16] == cos[position, 0, pair]
                assert sin[position, 0, pair] == -sin[position, 0, pair + 16]


def test_rotation_is_the_identity_at_position_zero_and_keeps_norms() -> None:
    model = config()
    x = torch.randn(2, 9, 3, 8, generator=torch.Generator().manual_seed(0))
    y = rotate(x, *RotaryTable(model).at(x))
    assert torch.equal(y[:, 0], x[:, 0])
    assert not torch.allclose(y[:, 1:], x[:, 1:])
    pairs = (x.view(2, 9, 3, 2, 4), y.view(2, 9, 3, 2, 4))
    torch.testing.assert_close(pairs[0].norm(dim=3), pairs[1].norm(dim=3))


def test_rotation_turns_the_halves_by_the_angle_of_the_position() -> None:
    x = torch.randn(1, 6, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = rotate(x, *RotaryTable(config(head_dim=4, rope_theta=100.0)).at(x))
    for position in range(6):
        for pair, rate in enumerate((1.0, 0.1)):
            a, b = x[0, position, 0, pair], x[0, position, 0, pair + 2]
            c, s = math.cos(position * rate), math.sin(position * rate)
            torch.testing.assert_close(y[0, position, 0, pair], a * c - b * s)
            torch.testing.assert_close(y[0, position, 0, pair + 2], b * c + a * s)


def test_scores_depend_on_distance_alone() -> None:
    table = RotaryTable(config())
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(i: int, j: int) -> float:
        at = [table.at(q, torch.tensor([p])) for p in (i, j)]
        return (rotate(q, *at[0]) * rotate(k, *at[1])).sum().item()

    assert score(3, 1) == pytest.approx(score(20, 18), rel=1e-12)
    assert score(3, 1) != pytest.approx(score(3, 2), rel=1e-3)


def test_low_precision_is_rotated_in_fp32_and_keeps_its_dtype() -> None:
    x = torch.randn(1, 30, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    cos, sin = RotaryTable(config()).at(x)
    assert cos.dtype == torch.float32
    y = rotate(x, cos, sin)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, rotate(x.float(), cos, sin).bfloat16())


def test_given_positions_pick_their_rows() -> None:
    table = RotaryTable(config())
    x = torch.zeros(2, 5, 4)
    positions = torch.tensor([[0, 1, 2, 0, 1], [7, 8, 9, 10, 31]])
    cos, sin = table.at(x, positions)
    assert cos.shape == (2, 5, 1, 8)
    whole = table.at(torch.zeros(1, 32, 4))
    for row in range(2):
        for column in range(5):
            assert torch.equal(cos[row, column], whole[0][positions[row, column]])
            assert torch.equal(sin[row, column], whole[1][positions[row, column]])
    shifted = table.at(x, offset=3)
    assert torch.equal(shifted[0], whole[0][3:8])


def test_a_sequence_beyond_the_table_is_refused() -> None:
    table = RotaryTable(config())
    with pytest.raises(ForgeError, match=r"33 tokens are more than model\.max_seq_len = 32"):
        table.at(torch.zeros(1, 33, 4))
    with pytest.raises(ForgeError, match="33"):
        table.at(torch.zeros(1, 1, 4), offset=32)


def test_tables_born_in_inference_mode_serve_training() -> None:
    table = RotaryTable(config())
    with torch.inference_mode():
        table.at(torch.zeros(1, 4, 4))
    x = torch.randn(1, 4, 1, 8, requires_grad=True)
    rotate(x, *table.at(x)).sum().backward()
    assert x.grad is not None


def test_tables_do_not_outlive_a_fake_trace() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    table = RotaryTable(config())
    with FakeTensorMode():
        table.at(torch.zeros(1, 4, 4))
    cos, _ = table.at(torch.zeros(1, 4, 4))
    assert cos[0].tolist() == [[1.0] * 8]


def test_pairs_follow_the_axes_of_their_sections() -> None:
    """Three axes, of which pairs 0 and 1 follow the first, 2 the second and 3 the third."""
    table = RotaryTable(config(rope_sections=[2, 1, 1]))
    positions = torch.tensor([[[3, 0], [5, 1], [9, 2]]])
    cos, sin = table.at(torch.zeros(1, 2, 8), positions)
    assert cos.shape == sin.shape == (1, 2, 1, 8)
    for pair, axis in enumerate((0, 0, 1, 2)):
        plain_cos, plain_sin = table.at(torch.zeros(1, 2, 8), positions[:, axis])
        for column in (pair, pair + 4):
            assert torch.equal(cos[..., column], plain_cos[..., column])
            assert torch.equal(sin[..., column], plain_sin[..., column])


def test_equal_positions_on_all_axes_are_plain_ones() -> None:
    x, positions = torch.zeros(2, 5, 8), torch.arange(5).expand(2, 3, 5)
    found = RotaryTable(config(rope_sections=[1, 2, 1])).at(x, positions)
    expected = RotaryTable(config()).at(x, positions[:, 0])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_places_on_axes_may_lie_beyond_the_length() -> None:
    """Those of time count seconds, not tokens: as of a longer table, also under a scaling with a factor."""
    for scaling in ({}, {"type": "yarn", "factor": 4.0, "original_max_seq_len": 8}):
        more = {"rope_scaling": RopeScalingConfig(**scaling)}
        positions = torch.tensor([[[7, 90], [1, 2], [3, 63]]])
        short = RotaryTable(config(rope_sections=[1, 2, 1], max_seq_len=8, **more))
        longer = RotaryTable(config(rope_sections=[4], max_seq_len=100, **more))
        cos, sin = short.at(torch.zeros(1, 2, 8), positions)
        for pair, axis in enumerate((0, 1, 1, 2)):
            plain_cos, plain_sin = longer.at(torch.zeros(1, 2, 8), positions[:, axis])
            for column in (pair, pair + 4):
                assert torch.equal(cos[..., column], plain_cos[..., column])
                assert torch.equal(sin[..., column], plain_sin[..., column])


def test_several_axes_need_sections() -> None:
    with pytest.raises(ForgeError, match=r"need model\.rope_sections"):
        RotaryTable(config()).at(torch.zeros(1, 2, 8), torch.zeros(1, 3, 2, dtype=torch.int64))
    [problem] = config(rope_sections=[2, 1]).problems()
    assert "are not the 4 pairs" in problem.message


def test_tables_kept_from_an_evaluation_serve_training() -> None:
    table = RotaryTable(config(head_dim=8))
    x = torch.randn(2, 6, 2, 8, requires_grad=True)
    with torch.inference_mode():
        first = table.at(x)
    cos, sin = table.at(x)
    rotate(x, cos, sin).sum().backward()
    assert x.grad is not None
    assert torch.equal(first[0], cos)
    ahead, _ = table.at(x, offset=2)
    assert torch.equal(ahead[:4], cos[2:])
    again, _ = table.at(x.double())
    assert again.dtype is torch.float64
    assert torch.equal(table.at(x)[0], cos)
