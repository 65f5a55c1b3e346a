"""Clip norm and noise are the plan's in every round: no scheduler and no assignment changes one without the other."""

import pytest
from central_runs import MODES, Run
from opacus.schedulers import (
    ExponentialGradClip,
    ExponentialNoise,
    LambdaGradClip,
    LambdaNoise,
    StepGradClip,
    StepNoise,
)

CLIP = {
    "lambda": lambda optimizer: LambdaGradClip(optimizer, scheduler_function=lambda epoch: 1.0 + epoch),
    "exponential": lambda optimizer: ExponentialGradClip(optimizer, gamma=10.0),
    "step": lambda optimizer: StepGradClip(optimizer, step_size=1, gamma=0.5),
}
NOISE = {
    "lambda": lambda optimizer: LambdaNoise(optimizer, noise_lambda=lambda epoch: 1.0 / (1 + epoch)),
    "exponential": lambda optimizer: ExponentialNoise(optimizer, gamma=0.1),
    "step": lambda optimizer: StepNoise(optimizer, step_size=1, gamma=0.1),
}


@pytest.mark.parametrize("make", CLIP.values(), ids=CLIP)
@pytest.mark.parametrize("mode", MODES)
def test_schedulers_of_the_clip_norm_are_refused(mode, make, monkeypatch):
    run = Run(monkeypatch, batch=1, mode=mode)
    scheduler = make(run.optimizer)
    with pytest.raises(ValueError, match="max_grad_norm cannot"):
        run.train(then=scheduler.step)
    assert max(run.norms()) <= 1.0


@pytest.mark.parametrize("make", NOISE.values(), ids=NOISE)
def test_schedulers_of_the_noise_are_refused(make, monkeypatch):
    run = Run(monkeypatch)
    scheduler = make(run.optimizer)
    with pytest.raises(ValueError, match="noise_multiplier cannot"):
        run.train(then=scheduler.step)


def test_assignments_are_refused(monkeypatch):
    run = Run(monkeypatch)
    with pytest.raises(ValueError, match="max_grad_norm cannot"):
        run.optimizer.max_grad_norm = 50.0
    with pytest.raises(ValueError, match="noise_multiplier cannot"):
        run.optimizer.noise_multiplier = 0
    with pytest.raises(ValueError, match="expected_batch_size cannot"):
        run.optimizer.expected_batch_size = 3  # as many as a batch has: a number of the data
    assert (run.optimizer.max_grad_norm, run.optimizer.noise_multiplier) == (1.0, 1.0)
    assert run.optimizer.expected_batch_size == 4
