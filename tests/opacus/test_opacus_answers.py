"""The engine takes what `opacus.PrivacyEngine` takes and answers as it does; docs/central.md names every difference."""

import inspect
import re
import warnings
from functools import partial
from pathlib import Path
from typing import get_args, get_overloads, get_type_hints

import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import IAccountant, PRVAccountant, RDPAccountant
from opacus.optimizers import DPOptimizer
from plans import make_plan
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedcgd import DPSGD, LambdaCGD, NoiseKey, Participation
from fedcgd.clipping.flat_models import flatten
from fedcgd.opacus import CorrelatedPrivacyEngine

# Of Opacus' own engine, which these tests compare with.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:Secure RNG turned off")

SECRET = NoiseKey(bytes(range(32)))
SIMULATION = NoiseKey.simulation(3)
DIFFERENCES = {  # (method, argument): why its default differs
    ("make_private", "noise_multiplier"): "a plan has it",
    ("make_private", "max_grad_norm"): "a plan has it",
    ("make_private", "criterion"): "the same, made when it is needed",
    ("make_private_with_epsilon", "criterion"): "the same, made when it is needed",
    ("make_private", "poisson_sampling"): "None is True, where no sampling is given",
    ("make_private_with_epsilon", "poisson_sampling"): "None is True, where no sampling is given",
}
METHODS = ["make_private", "make_private_with_epsilon", "get_epsilon", "save_checkpoint", "load_checkpoint"]


def data(examples: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(examples, 4, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def private(engine, *, train: int = 2, **options):
    """A program of an Opacus user: what `engine` made private, after `train` epochs."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=8),
        max_grad_norm=1.0,
        **options,
    )
    module, optimizer, loader = made
    for _ in range(train):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs), targets).backward()
            optimizer.step()
    return made


OURS = {"mechanism": DPSGD(), "epochs": 2, "target_delta": 1e-5}


def parameters(method) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(method).parameters)
    return {name: one for name, one in found.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}


@pytest.mark.parametrize("name", ["make_private", "make_private_with_epsilon"])
def test_type_checkers_know_what_each_mode_returns_and_every_argument(name: str) -> None:
    mine = parameters(getattr(CorrelatedPrivacyEngine, name))
    if name == "make_private_with_epsilon":  # its options are make_private's, but for what makes a plan
        mine |= parameters(CorrelatedPrivacyEngine.make_private)
        mine = {each: one for each, one in mine.items() if each not in ("plan", "noise_multiplier")}
    ghost, hooks = map(get_type_hints, get_overloads(getattr(CorrelatedPrivacyEngine, name)))
    assert (len(get_args(ghost["return"])), len(get_args(hooks["return"]))) == (4, 3)
    for hints in (ghost, hooks):
        (arguments,) = get_args(hints["arguments"])
        assert {"self", "grad_sample_mode", *arguments.__annotations__} == set(mine)


@pytest.mark.parametrize("name", ["__init__", *METHODS])
def test_every_argument_of_opacus_is_taken(name: str) -> None:
    theirs, mine = parameters(getattr(PrivacyEngine, name)), parameters(getattr(CorrelatedPrivacyEngine, name))
    if name == "make_private_with_epsilon":  # its options are make_private's
        mine = parameters(CorrelatedPrivacyEngine.make_private) | mine
    if name == "save_checkpoint":  # and here Opacus' own
        mine = theirs | mine
    assert set(theirs) <= set(mine)
    for argument, one in theirs.items():
        assert mine[argument].kind is one.kind
        if (name, argument) not in DIFFERENCES:
            assert mine[argument].default == one.default, argument


def test_the_documentation_names_every_difference() -> None:
    page = (Path(__file__).parents[2] / "docs" / "central.md").read_text()
    table = page.partition("## How it differs from Opacus")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) > 12
    named = set(re.findall(r"`(\w+)", "".join(rows)))
    mine = parameters(CorrelatedPrivacyEngine.make_private) | parameters(
        CorrelatedPrivacyEngine.make_private_with_epsilon
    )
    added = set(mine) - set(parameters(PrivacyEngine.make_private_with_epsilon)) - {"self"}
    assert added | {argument for _, argument in DIFFERENCES} | {"accountant", "secure_mode", "key"} <= named


@pytest.mark.parametrize("accountant", [RDPAccountant, PRVAccountant])
def test_epsilon_can_be_asked_in_the_words_of_each_accountant(accountant: type[IAccountant]) -> None:
    engine = CorrelatedPrivacyEngine(SIMULATION)
    private(engine, noise_multiplier=1.0, **OURS)
    options = set(parameters(accountant.get_epsilon)) - {"self", "delta"}
    expected = engine.get_epsilon(1e-5)
    given = {"alphas": [2.0, 4.0], "eps_error": 0.01, "delta_error": 1e-8}
    assert engine.accountant.get_epsilon(1e-5, **{name: given[name] for name in options}) == expected
    assert engine.accountant.get_epsilon(delta=1e-5) == expected


@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_dp_sgd_with_poisson_sampling_answers_as_opacus(epochs: int) -> None:
    opacus, mine = PrivacyEngine(), CorrelatedPrivacyEngine(SIMULATION)
    private(opacus, noise_multiplier=1.5, train=epochs)
    private(mine, noise_multiplier=1.5, train=epochs, **OURS)
    assert isinstance(mine.accountant, IAccountant)
    assert mine.accountant.history == opacus.accountant.history
    assert bool(len(mine.accountant)) is bool(len(opacus.accountant))
    assert len(mine.accountant) == 5 * epochs  # "number of optimization steps taken so far"
    assert isinstance(mine.get_epsilon(1e-5), float)
    if epochs:
        assert mine.get_epsilon(1e-5) == pytest.approx(opacus.get_epsilon(1e-5), abs=0.02)


def test_what_is_returned_has_the_types_of_opacus() -> None:
    module, optimizer, loader = private(CorrelatedPrivacyEngine(SIMULATION), noise_multiplier=1.0, **OURS)
    theirs = private(PrivacyEngine(), noise_multiplier=1.0)
    assert isinstance(module, type(theirs[0]))
    assert isinstance(optimizer, DPOptimizer)
    assert isinstance(loader, DataLoader)
    assert len(loader) == len(theirs[2])
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (1.0, 1.0)
    assert optimizer.expected_batch_size == theirs[1].expected_batch_size


@pytest.mark.parametrize("broken", ["foreign parameters", "batch norm", "another accountant"])
def test_errors_have_the_types_and_words_of_opacus(broken: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if broken == "batch norm" else nn.Tanh(), nn.Linear(4, 2))
    moving = list((nn.Linear(4, 2) if broken == "foreign parameters" else model).parameters())
    options = {"accountant": "moments"} if broken == "another accountant" else {}

    def refusal(engine, **more) -> ValueError:
        try:
            engine(**options).make_private(
                module=model,
                optimizer=torch.optim.SGD(moving, lr=0.1),
                data_loader=DataLoader(data(), batch_size=8),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                **more,
            )
        except ValueError as error:
            return error
        raise AssertionError("nothing was refused")

    theirs, mine = refusal(PrivacyEngine), refusal(partial(CorrelatedPrivacyEngine, SIMULATION), **OURS)
    assert type(mine) is type(theirs)
    assert str(mine).startswith(str(theirs)[:60])


def test_a_plan_and_the_arguments_of_opacus_must_agree() -> None:
    participation = Participation(rounds=10, min_separation=5)
    plan = make_plan(LambdaCGD(0.8), participation)
    engine = CorrelatedPrivacyEngine(SIMULATION)
    private(engine, plan=plan, noise_multiplier=2.0)
    assert engine.accountant.plan is plan
    for options, says in (
        ({"plan": plan, "noise_multiplier": 1.0}, "noise_multiplier=1.0 contradicts the plan, which has 2.0"),
        ({"plan": plan, "epochs": 2}, "the plan says epochs already"),
        ({"noise_multiplier": 1.0}, "in its place also mechanism, epochs, target_delta"),
        ({"noise_multiplier": 1.0, **OURS, "mechanism": LambdaCGD(0.8)}, "ampling"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            private(CorrelatedPrivacyEngine(SIMULATION), **options)
    with pytest.raises(TypeError, match="plan must"):
        private(CorrelatedPrivacyEngine(SIMULATION), plan={"noise_multiplier": 1.0})


def test_sigma_and_zeta_make_the_plan_that_says_the_same() -> None:
    engine = CorrelatedPrivacyEngine(SIMULATION)
    private(engine, noise_multiplier=2.0, **OURS | {"mechanism": "lambda-cgd:0.8", "epochs": 3}, poisson_sampling=False)
    participation = Participation(rounds=15, min_separation=5)
    assert engine.accountant.plan == make_plan(LambdaCGD(0.8), participation)


def test_a_noise_generator_repeats_a_simulation_and_never_seeds_a_private_run() -> None:
    def model(seed: int | None) -> torch.Tensor:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        made = private(
            CorrelatedPrivacyEngine(SIMULATION),
            noise_multiplier=1.0,
            noise_generator=generator,
            **OURS,
            sampling="none",
        )
        return flatten(made[0])

    assert torch.equal(model(5), model(5))
    assert not torch.allclose(model(5), model(6))
    assert not torch.allclose(model(5), model(None))
    for key, secure, says in (
        (SECRET, False, "for a test make the engine with NoiseKey.simulation"),
        (SECRET, True, "Passing seed is prohibited in secure mode"),
    ):
        engine = CorrelatedPrivacyEngine(key, secure_mode=secure)
        with pytest.raises(ValueError, match=says):
            private(engine, noise_multiplier=1.0, noise_generator=torch.Generator(), **OURS)


def test_secure_mode_is_what_a_secret_key_is() -> None:
    engine = CorrelatedPrivacyEngine(SECRET, secure_mode=True)
    assert engine.secure_mode
    private(engine, noise_multiplier=1.0, **OURS)
    assert engine.get_epsilon(1e-5) > 0
    with pytest.raises(ValueError, match="is prohibited"):
        CorrelatedPrivacyEngine(SIMULATION, secure_mode=True)


def test_another_accountant_of_opacus_is_not_used_and_that_is_said() -> None:
    with pytest.warns(UserWarning, match="accountant='rdp' is") as said:
        CorrelatedPrivacyEngine(SIMULATION, accountant="rdp")
    assert said[0].filename == __file__


def test_steps_cannot_be_counted_by_hand_and_checkpoints_do_not_mix(tmp_path: Path) -> None:
    mine = CorrelatedPrivacyEngine(SIMULATION)
    for early in (
        lambda: mine.save_checkpoint(path=tmp_path / "mine.pt", module=nn.Linear(4, 2)),
        lambda: mine.load_checkpoint(path=tmp_path / "mine.pt", module=nn.Linear(4, 2)),
        lambda: mine.get_epsilon(1e-5),
    ):
        with pytest.raises(RuntimeError, match="make_private first"):
            early()
    module, optimizer, _ = private(mine, noise_multiplier=1.0, **OURS)
    with pytest.raises(RuntimeError, match="nothing else"):
        mine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    mine.save_checkpoint(path=tmp_path / "mine.pt", module=module, optimizer=optimizer)
    opacus = PrivacyEngine()
    theirs, optimizer, _ = private(opacus, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="state_dict of"):
        opacus.load_checkpoint(path=tmp_path / "mine.pt", module=theirs)
    opacus.save_checkpoint(path=tmp_path / "theirs.pt", module=theirs)
    with pytest.raises(ValueError, match="fedcgd engine"):
        mine.load_checkpoint(path=tmp_path / "theirs.pt", module=module)


@pytest.mark.parametrize("key", [42, None, b"0" * 32])
def test_a_key_that_is_none_is_refused_at_once_and_not_shown(key: object) -> None:
    with pytest.raises(TypeError, match=r"key must be a NoiseKey, .* got (int|NoneType|bytes)$"):
        CorrelatedPrivacyEngine(key)  # type: ignore[arg-type]


@pytest.mark.parametrize(("delta", "warned"), [(0.25, True), (1 / 40, True), (0.01, False)])
def test_a_delta_that_allows_to_publish_an_example_is_a_warning(delta: float, warned: bool) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        private(
            CorrelatedPrivacyEngine(SECRET),
            train=0,
            mechanism="dp-sgd",
            noise_multiplier=1.0,
            epochs=1,
            target_delta=delta,
        )
    found = [one.filename for one in said if "δ times the number of examples is" in str(one.message)]
    assert found == [__file__] * warned
