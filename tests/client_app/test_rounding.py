"""Units measure the rounding errors of their messages; a repeated measurement gives equal
errors."""

from typing import get_args

import pytest
import torch

from client_app.payloads import GRADIENT_GAIN, ActivationMeter, measured
from collapipe.report import RoundingErrors
from collapipe.sections import CompressionSettings, PrecisionOrAuto
from collapipe.state import Precision
from collapipe.tensors import Tensors
from collapipe.wire.compression.codec import compress_update, squared_error

ROUNDED = [each for each in get_args(Precision) if each != "float32"]


def compression(upload: PrecisionOrAuto, activation: PrecisionOrAuto) -> CompressionSettings:
    return CompressionSettings(upload, activation, "float32", feedback=False)


def weights(seed: int, rows: int = 7) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    floats = {f"w{n}": torch.randn(rows, 5 + n, generator=generator) for n in range(2)}
    return {**floats, "bias": torch.randn(5, generator=generator), "count": torch.tensor(seed)}


def test_activations_of_the_first_step_count_once() -> None:
    """Repeated micro-batches and later steps do not count."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(4, 16, generator=generator), torch.randn(9, 16, generator=generator)
    meter, again = ActivationMeter(), ActivationMeter()
    for each in (meter, again):
        each.take(20, 0, first)
        each.take(20, 1, second)
    again.take(20, 0, first)
    again.take(21, 0, 100 * second)
    assert meter.errors() == again.errors()
    both = torch.cat([first, second])
    for precision in ROUNDED:
        lost = squared_error(both, precision, by_chance=True)
        expected = GRADIENT_GAIN * lost / float(both.square().sum())
        assert meter.errors()[precision] == pytest.approx(expected, rel=1e-6)
    assert ActivationMeter().errors() == {}


def test_one_large_column_increases_the_measured_error() -> None:
    """Pretrained models have such columns; a table of precisions cannot contain their effect."""
    plain = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    with_outliers = plain.clone()
    with_outliers[:, 3] = 100.0
    errors = []
    for sent in (plain, with_outliers):
        meter = ActivationMeter()
        meter.take(0, 0, sent)
        errors.append(meter.errors()["int4"])
    assert errors[1] > 2 * errors[0] > 0


@pytest.mark.parametrize("precision", ROUNDED)
def test_an_uploads_error_is_its_relative_residual(precision: Precision) -> None:
    start, end, residual = weights(1), weights(2), weights(3)
    residual.pop("count")
    found = measured(compression("auto", "int8"), None, start, end, residual)
    assert found.activation == {}
    _, lacking = compress_update(start, end, residual, precision)
    lost = sum(float(each.square().sum()) for each in lacking.values())
    changes = [end[name] - start[name] + residual[name] for name in residual]
    whole = sum(float(each.square().sum()) for each in changes)
    assert found.upload[precision] == pytest.approx(lost / whole, rel=1e-5)


def test_a_sample_of_rows_gives_nearly_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    start, end = weights(1, rows=600), weights(2, rows=600)
    whole = measured(compression("auto", "float32"), None, start, end, {}).upload
    monkeypatch.setattr("client_app.payloads._SAMPLED", 600)
    sampled = measured(compression("auto", "float32"), None, start, end, {}).upload
    assert sampled != whole
    assert sampled == pytest.approx(whole, rel=0.2)


def test_a_sample_of_few_long_and_many_short_rows_gives_nearly_the_same_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    end = {
        "wide": torch.randn(2, 3000, generator=generator),
        "tall": torch.randn(3000, 2, generator=generator),
    }
    start = {name: torch.zeros_like(each) for name, each in end.items()}
    whole = measured(compression("auto", "float32"), None, start, end, {}).upload
    monkeypatch.setattr("client_app.payloads._SAMPLED", 600)
    sampled = measured(compression("auto", "float32"), None, start, end, {}).upload
    assert sampled == pytest.approx(whole, rel=0.2)


def test_fixed_precisions_and_unchanged_weights_have_no_error() -> None:
    start, end = weights(1), weights(2)
    assert measured(compression("int4", "float32"), None, start, end, {}) == RoundingErrors()
    still = measured(compression("auto", "float32"), None, start, start, {})
    assert still.upload == dict.fromkeys(ROUNDED, 0.0)
