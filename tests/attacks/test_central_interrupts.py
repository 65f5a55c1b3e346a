"""A step of central training that is broken off: Ctrl-C waits for its end, and after an error no noise serves two sums."""

import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from central_runs import Run

import fedcgd
from fedcgd.noise.keys import NoiseKey

LIBRARY = str(Path(fedcgd.__file__).parent)
STATEFUL = (
    "opacus/optimizer.py", "opacus/rounds.py", "central/releases.py", "release/run_noise.py", "noise/quantisation.py",
)  # fmt: skip
"""Where a step keeps what the next one finds, or writes into its sum; all else computes."""


@pytest.fixture(autouse=True)
def pythons_own_handler():
    """Servers and Ray in the same process leave handlers of their own, which do not raise KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def at_each_line(do):
    """Calls `do((file, line))` before each line of `STATEFUL` that is executed."""

    def trace(frame, event, _):
        file = frame.f_code.co_filename.removeprefix(LIBRARY).lstrip("/")
        if file not in STATEFUL:
            return None
        if event == "line":
            do((file, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def step(run, before_each_line=lambda line: None):
    run.backward(next(iter(run.loader)))
    with at_each_line(before_each_line):
        run.optimizer.step()


def interrupted(run, place, how):
    """A round, with `how()` before the first execution of the line `place` in its step."""
    done = []

    def do(line):
        if line == place and not done:
            done.append(line)
            how()

    with pytest.raises(KeyboardInterrupt):
        step(run, do)


def lines_of_a_step(monkeypatch, **options):
    run = Run(monkeypatch, size=4, epochs=2, **options)
    step(run)
    found = {}
    step(run, lambda line: found.setdefault(line))
    assert {file for file, _ in found} == set(STATEFUL)
    return list(found)


def flat(run):
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def test_after_ctrl_c_the_run_goes_on_to_the_model_of_one_that_was_left_alone(monkeypatch):
    """The signal itself, before each line of a step, each in a round of its own."""
    lines, models = lines_of_a_step(monkeypatch), []
    straight = Run(monkeypatch, size=4, epochs=len(lines))
    for _ in lines:
        step(straight)
        models.append(flat(straight))
    run = Run(monkeypatch, size=4, epochs=len(lines))
    handler = signal.getsignal(signal.SIGINT)
    for round, line in enumerate(lines):
        interrupted(run, line, lambda: signal.raise_signal(signal.SIGINT))
        if run.released == round:
            step(run)
        assert run.released == round + 1
        assert torch.equal(flat(run), models[round]), line
        assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.filterwarnings("ignore:another run of this process")  # on purpose
@pytest.mark.filterwarnings("ignore:round .* is released already")  # where it failed after its release
@pytest.mark.parametrize("noise", ["replay", "buffer"])
def test_a_step_that_fails_leaves_nothing_without_noise_and_uses_no_noise_twice(noise, monkeypatch):
    """An exception before each line of a step: what can be seen has noise and is counted, and another sum gets other noise."""
    options = {"noise": noise, "key": NoiseKey.generate()}
    lines = lines_of_a_step(monkeypatch, **options)
    run = Run(monkeypatch, size=4, epochs=2 * len(lines) + 1, **options)
    step(run)
    used, noised = listen(run)
    handler = signal.getsignal(signal.SIGINT)
    counted = set()
    for line in lines:
        noised.clear()
        before, released = flat(run), run.released
        interrupted(run, line, raising)
        signal.signal(signal.SIGINT, handler)
        gradients = [p.grad.flatten() for p in run.model.parameters() if p.grad is not None]
        seen = any(bool(gradient.any()) for gradient in gradients) or not torch.equal(flat(run), before)
        assert run.released == released + 1 or not seen, line
        counted.add(run.released - released)
        parts = torch.split(noised[-1] / 4, [18, 3]) if noised else ()
        for gradient in gradients:
            assert not gradient.any() or any(torch.equal(gradient, part.float()) for part in parts), line
        values = {name: value + 1.0 for name, value in run.model.named_parameters()}
        run.model.load_state_dict(values)  # if the round is not released, it comes again with another sum
        step(run)
    assert counted == {0, 1}
    assert all(torch.equal(total, totals[0]) for totals in used.values() for total in totals)


def raising():
    raise KeyboardInterrupt


def listen(run):
    """The sums on the grid that each noise, named by its rounds and nonces, is added to from now on; the sums with noise."""
    releases, used, noised = run.engine.accountant.rounds.releases, {}, []
    source, step = releases._noise._source, releases.step
    add = source.add

    def listening(total, nonces, stddev):
        used.setdefault(tuple(nonces), []).append(torch.tensor(total))
        add(total, nonces, stddev)
        noised.append(torch.tensor(total * step))

    source.add = listening
    return used, noised
