"""NumPy's numbers become Python's at the border: three digits of a float16 are no basis for a bound."""

import json
from dataclasses import fields

import numpy as np
import pytest
from plans import make_plan

from fedcgd import BISR, BSR, DPSGD, LambdaCGD, NuDPFTRL, Participation, calibrate, compute_delta, compute_epsilon
from fedcgd.accounting import PastRun, compose
from fedcgd.ledger import JointBudget
from fedcgd.mechanisms import BLT, BandedToeplitz
from fedcgd.mechanisms.workload import Workload
from fedcgd.support.numbers import as_float, as_whole

RUN = Participation(rounds=20, min_separation=5)
HALF = np.float16(0.7)  # 0.7001953125
EXACT = 0.7001953125


@pytest.mark.parametrize(
    "participation", [RUN, Participation(rounds=20, sampling="poisson", sampling_rate=np.float16(0.1))]
)
def test_epsilon_and_delta_of_numbers_in_half_precision(participation) -> None:
    """A budget that was kept in half precision cost 2.7 % of δ, which was above the one asked for."""
    for ask, numbers in (
        (compute_epsilon, {"noise_multiplier": EXACT, "delta": 2**-10}),
        (compute_delta, {"noise_multiplier": EXACT, "epsilon": 0.5}),
        (calibrate, {"epsilon": EXACT, "delta": 2**-10}),
    ):
        half = ask(DPSGD(), participation, **{name: np.float16(value) for name, value in numbers.items()})
        assert half == ask(DPSGD(), participation, **numbers)
        assert type(half.epsilon) is type(half.delta) is type(half.noise_multiplier) is float


@pytest.mark.parametrize(
    "value",
    [
        LambdaCGD(HALF),
        NuDPFTRL(HALF),
        BLT((HALF,), (HALF,)),
        BandedToeplitz((np.float32(1), HALF)),
        BSR(np.int64(3)),
        Workload(momentum=HALF, learning_rates=(HALF,)),
        BISR(np.int8(3)),
        Participation(rounds=np.int64(20), min_separation=np.int32(5), max_participations=np.int8(4)),
        Participation(rounds=20, sampling="poisson", sampling_rate=np.float32(0.5)),
        make_plan(DPSGD(), RUN, clip_norm=HALF, noise_multiplier=np.float32(3), delta=np.float32(1e-5)),
        PastRun(mechanism=DPSGD(), participation=RUN, noise_multiplier=np.float32(3)),
        JointBudget(epsilon=HALF, delta=np.float32(1e-5), after=[]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_kept_is_python_s(value) -> None:
    for field in fields(value):
        kept = getattr(value, field.name)
        for part in kept if isinstance(kept, tuple) else (kept,):
            assert not isinstance(part, np.generic)


def test_composition_in_half_precision() -> None:
    half = PastRun(mechanism=DPSGD(), participation=RUN, noise_multiplier=HALF)
    double = PastRun(mechanism=DPSGD(), participation=RUN, noise_multiplier=EXACT)
    assert compose([half] * 2, delta=np.float32(2**-17)) == compose([double] * 2, delta=2**-17)


@pytest.mark.parametrize("name", ["rounds", "min_separation", "max_participations"])
def test_a_truth_value_is_no_count(name) -> None:
    with pytest.raises(ValueError, match=f"^{name} .*True"):
        Participation(**{"rounds": 20, name: True})


def test_a_whole_number_stays_what_ledgers_have_on_record() -> None:
    """`{"clip_norm": 1}` and `{"clip_norm": 1.0}` are two texts, with two hashes: a run could not go on."""
    plan = make_plan(LambdaCGD(0), RUN, clip_norm=1, noise_multiplier=3)
    assert json.dumps(plan.to_description()) == (
        '{"mechanism": {"name": "lambda-cgd", "lam": 0}, "participation": {"rounds": 20, "min_separation": 5, '
        '"max_participations": null, "sampling": "none", "sampling_rate": null}, "clip_norm": 1, "noise_multiplier": 3, '
        '"delta": 1e-05}'
    )


def test_a_truth_value_is_no_number() -> None:
    with pytest.raises(TypeError, match=r"^clip_norm .*True"):
        make_plan(DPSGD(), RUN, clip_norm=True)
    with pytest.raises(TypeError, match=r"^size .*'1'"):
        as_float("size", "1")
    with pytest.raises(ValueError, match=r"^size .*1\.0"):
        as_whole("size", 1.0)


@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_a_number_that_no_double_holds_is_refused_by_its_name(number: int) -> None:
    """It was an OverflowError from deep inside."""
    with pytest.raises(ValueError, match=r"^noise_multiplier"):
        compute_epsilon(DPSGD(), RUN, noise_multiplier=number, delta=1e-5)
    with pytest.raises(ValueError, match=r"^epsilon"):
        calibrate(DPSGD(), RUN, epsilon=number, delta=1e-5)
