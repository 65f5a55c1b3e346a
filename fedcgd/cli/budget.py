"""`fedcgd calibrate`: budget → σ. `fedcgd epsilon`: σ → ε. `fedcgd delta`: σ and ε → δ."""

from fedcgd import accounting
from fedcgd.accounting import Guarantee
from fedcgd.accounting.guarantee import rounded_up
from fedcgd.cli.options import (
    BandwidthOption,
    DegreeOption,
    DeltaOption,
    EpsilonOption,
    ErrorName,
    ErrorOption,
    JsonOption,
    LamOption,
    MechanismOption,
    MethodOption,
    MomentumOption,
    NoiseMultiplierOption,
    NormalizeOption,
    NuOption,
    ParticipationsOption,
    ReleasedOption,
    RoundsOption,
    SamplingName,
    SamplingOption,
    SeparationOption,
    participation_of,
    workload_of,
)
from fedcgd.cli.report import console, explained_errors, figures, key_value_table, number, print_json, status
from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.error import error_norms
from fedcgd.mechanisms.workload import Workload
from fedcgd.optimisation.catalogue import make


def calibrate_command(
    rounds: RoundsOption,
    epsilon: EpsilonOption,
    delta: DeltaOption,
    mechanism: MechanismOption = "lambda-cgd",
    lam: LamOption = None,
    bandwidth: BandwidthOption = None,
    degree: DegreeOption = None,
    nu: NuOption = None,
    normalize: NormalizeOption = False,
    participations: ParticipationsOption = None,
    separation: SeparationOption = 1,
    sampling: SamplingOption = SamplingName.NONE,
    method: MethodOption = None,
    momentum: MomentumOption = 0.0,
    error: ErrorOption = ErrorName.RMSE,
    json: JsonOption = False,
) -> None:
    """Find the smallest noise multiplier σ that keeps the whole run within (ε, δ).

    Example: fedcgd calibrate --lam 0.9 --rounds 3900 --participations 10 --separation 390 --epsilon 8 --delta 1e-5
    """
    with explained_errors():
        plan = participation_of(sampling.value, rounds, separation, participations, bandwidth)
        workload = workload_of(momentum)
        chosen = make(
            mechanism, lam=lam, bandwidth=bandwidth, degree=degree, nu=nu, normalize=normalize, rounds=rounds,
            participation=plan, error=error.value, workload=workload,
        )  # fmt: skip
        with status(json) as say:
            guarantee = accounting.calibrate(
                chosen, plan, epsilon=epsilon, delta=delta, method=method.value if method else None, progress=say
            )
        report(chosen, rounds, workload, guarantee, json)


def epsilon_command(
    rounds: RoundsOption,
    noise_multiplier: NoiseMultiplierOption,
    delta: DeltaOption,
    mechanism: MechanismOption = "lambda-cgd",
    lam: LamOption = None,
    bandwidth: BandwidthOption = None,
    degree: DegreeOption = None,
    nu: NuOption = None,
    normalize: NormalizeOption = False,
    participations: ParticipationsOption = None,
    separation: SeparationOption = 1,
    sampling: SamplingOption = SamplingName.NONE,
    method: MethodOption = None,
    released: ReleasedOption = None,
    momentum: MomentumOption = 0.0,
    error: ErrorOption = ErrorName.RMSE,
    json: JsonOption = False,
) -> None:
    """Find an upper bound on ε for a noise multiplier σ that is given, for the whole run or the rounds released so far.

    Example: fedcgd epsilon --lam 0.9 --rounds 3900 --separation 390 --noise-multiplier 4.36 --delta 1e-5
    """
    with explained_errors():
        plan = participation_of(sampling.value, rounds, separation, participations, bandwidth)
        workload = workload_of(momentum)
        chosen = make(
            mechanism, lam=lam, bandwidth=bandwidth, degree=degree, nu=nu, normalize=normalize, rounds=rounds,
            participation=plan, error=error.value, workload=workload,
        )  # fmt: skip
        with status(json) as say:
            guarantee = accounting.compute_epsilon(
                chosen,
                plan,
                noise_multiplier=noise_multiplier,
                delta=delta,
                released=released,
                method=method.value if method else None,
                progress=say,
            )
        report(chosen, rounds, workload, guarantee, json, rounds if released is None else released)


def delta_command(
    rounds: RoundsOption,
    noise_multiplier: NoiseMultiplierOption,
    epsilon: EpsilonOption,
    mechanism: MechanismOption = "lambda-cgd",
    lam: LamOption = None,
    bandwidth: BandwidthOption = None,
    degree: DegreeOption = None,
    nu: NuOption = None,
    normalize: NormalizeOption = False,
    participations: ParticipationsOption = None,
    separation: SeparationOption = 1,
    sampling: SamplingOption = SamplingName.NONE,
    method: MethodOption = None,
    released: ReleasedOption = None,
    momentum: MomentumOption = 0.0,
    error: ErrorOption = ErrorName.RMSE,
    json: JsonOption = False,
) -> None:
    """Find an upper bound on δ at some ε for a noise multiplier σ that is given, for the whole run or the rounds released so far.

    Example: fedcgd delta --lam 0.9 --rounds 3900 --separation 390 --noise-multiplier 4.36 --epsilon 8
    """
    with explained_errors():
        plan = participation_of(sampling.value, rounds, separation, participations, bandwidth)
        workload = workload_of(momentum)
        chosen = make(
            mechanism, lam=lam, bandwidth=bandwidth, degree=degree, nu=nu, normalize=normalize, rounds=rounds,
            participation=plan, error=error.value, workload=workload,
        )  # fmt: skip
        with status(json) as say:
            guarantee = accounting.compute_delta(
                chosen,
                plan,
                noise_multiplier=noise_multiplier,
                epsilon=epsilon,
                released=released,
                method=method.value if method else None,
                progress=say,
            )
        report(chosen, rounds, workload, guarantee, json, rounds if released is None else released)


def report(
    mechanism: Mechanism, rounds: int, workload: Workload, guarantee: Guarantee, json: bool, released: int | None = None
) -> None:
    """Print one guarantee, of `released` rounds if that is given, and the errors that its noise causes."""
    values = figures(mechanism, guarantee, error_norms(mechanism, rounds, workload))
    if json:
        print_json(values if released is None else values | {"released": released})
        return
    of_what = " of the whole run" if guarantee.condition else ""
    rows = [
        ("guarantee", str(guarantee)),
        ("noise multiplier σ", rounded_up(guarantee.noise_multiplier, 6)),
        ("sensitivity", number(guarantee.sensitivity)),
        ("RMSE" + of_what, number(values["rmse"])),
        ("MaxSE" + of_what, number(values["max_se"])),
    ]
    console.print(key_value_table(f"{mechanism.name}, {rounds} rounds", rows))
