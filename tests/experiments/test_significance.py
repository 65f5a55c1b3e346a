"""The paired comparison: each seed with its own counterpart."""

import math

import pytest

from fedcgd_experiments.significance import holm, paired


def test_seeds_are_paired() -> None:
    found = paired({0: 0.53, 1: 0.64, 2: 0.75, 9: 0.0}, {0: 0.50, 1: 0.60, 2: 0.70})
    assert found is not None
    assert (found.accuracy, found.baseline, found.seeds) == (pytest.approx(0.64), pytest.approx(0.60), 3)
    # differences 0.03, 0.04, 0.05: mean 0.04, standard error 0.01/√3, t = 6.928 with 2 degrees of freedom
    assert found.difference == pytest.approx(0.04)
    assert found.p_value == pytest.approx(1 - 6.9282 / math.sqrt(2 + 6.9282**2), rel=1e-4)
    # the 97.5 % quantile of Student's t with 2 degrees of freedom is 4.30265
    half = 4.30265 * 0.01 / math.sqrt(3)
    assert (found.low, found.high) == (pytest.approx(0.04 - half, abs=1e-6), pytest.approx(0.04 + half, abs=1e-6))


def test_what_cannot_be_known_is_not_said() -> None:
    one = paired({0: 0.7}, {0: 0.5, 1: 0.6})
    assert one is not None
    assert math.isnan(one.p_value)
    assert math.isnan(one.low)
    same = paired({0: 0.75, 1: 0.875}, {0: 0.5, 1: 0.625})
    assert same is not None
    assert math.isnan(same.p_value)
    assert paired({0: 0.7}, {1: 0.5}) is None


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03, math.nan]) == [
        0.03,
        pytest.approx(0.06),
        pytest.approx(0.06),
        pytest.approx(math.nan, nan_ok=True),
    ]
    assert holm([0.5, 0.6]) == [1.0, 1.0]
