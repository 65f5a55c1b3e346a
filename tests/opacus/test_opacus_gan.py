"""A private GAN as Opacus' example has it: the discriminator sees the data, and is private; the generator learns from it."""

import pytest
import torch
from central_runs import private
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def generator():
    return nn.Sequential(
        nn.ConvTranspose2d(5, 8, 4, 1, 0, bias=False), nn.GroupNorm(4, 8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def discriminator():
    return nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(4, 8, 3, 1, 1, bias=False), nn.GroupNorm(4, 8), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0),
    )  # fmt: skip


def private_gan(mode="hooks", **sampling):
    torch.manual_seed(0)
    images = TensorDataset(torch.rand(24, 1, 8, 8) * 2 - 1)
    fake, judge = generator(), discriminator()
    adam = torch.optim.Adam(judge.parameters(), lr=1e-3)
    loader = DataLoader(images, batch_size=8)
    return fake, *private(judge, loader, optimizer=adam, epochs=2, grad_sample_mode=mode, **sampling)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("sampling", ["poisson", "none"])
def test_the_loop_of_opacus_example_runs(sampling, mode):
    """Both gradients of an example, of a real and of a made one, are one example's; then the generator goes through the judge."""
    fake, judge, optimizer, loader = private_gan(mode, sampling=sampling)
    learns = torch.optim.Adam(fake.parameters(), lr=1e-3)
    before = [p.detach().clone() for p in fake.parameters()]
    criterion = nn.BCELoss()
    for _ in range(2):
        for (real,) in loader:
            optimizer.zero_grad(set_to_none=True)
            size = len(real)
            made = fake(torch.randn(size, 5, 1, 1))
            loss = criterion(judge(real), torch.ones(size)) + criterion(judge(made.detach()), torch.zeros(size))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            learns.zero_grad()
            criterion(judge(made), torch.ones(size)).backward()
            learns.step()
    assert optimizer._rounds.releases.count == 6
    assert any(not torch.equal(a, b) for a, b in zip(before, fake.parameters(), strict=True))
    assert all(bool(p.isfinite().all()) for p in (*judge.parameters(), *fake.parameters()))


def test_a_generator_that_learns_with_a_batch_in_hand_is_told_when_to():
    fake, judge, _, loader = private_gan(sampling="none")
    for (real,) in loader:
        with pytest.raises(RuntimeError, match="trained after"):
            judge(fake(torch.randn(len(real), 5, 1, 1)))
        break
