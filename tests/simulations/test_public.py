"""Public examples for a task's model: never its training examples, and images of any size made to fit."""

import pytest
import torch

from fedcgd_simulations.public import public_examples, resized
from fedcgd_simulations.task import Data, Examples
from fedcgd_simulations.tasks import fashion_mnist, get_task


def test_held_out_images_are_those_of_validation() -> None:
    task = get_task("digits", model="tanh-cnn")
    found = public_examples("digits", model="tanh-cnn", examples=50, seed=3)
    data = task.load()
    assert torch.equal(found.inputs, data.validation.inputs[:50])
    assert found.classes == 10
    assert found.targets is None
    expected = task.model(3)
    assert all(torch.equal(p, q) for p, q in zip(found.module.parameters(), expected.parameters(), strict=True))


def test_images_of_another_size_are_averaged_to_fit() -> None:
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert torch.equal(resized(image, torch.zeros(5, 1, 2, 2)), torch.tensor([[[[2.5, 4.5], [10.5, 12.5]]]]))
    flat = resized(image, torch.zeros(5, 4))
    assert torch.equal(flat, torch.tensor([[2.5, 4.5, 10.5, 12.5]]))
    assert torch.equal(resized(flat, torch.zeros(2, 3, 2, 2))[:, 1], flat.reshape(1, 2, 2))
    grey = resized(torch.tensor([1.0, 2.0, 6.0]).reshape(1, 3, 1, 1), torch.zeros(1, 1, 1, 1))
    assert grey.tolist() == [[[[3.0]]]]
    with pytest.raises(ValueError, match=r"\(7,\)"):
        resized(torch.zeros(2, 7), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="only images"):
        resized(torch.zeros(2, 4).long(), torch.zeros(1, 4))


def test_the_small_fashion_task_is_a_part_of_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    train = Examples(torch.arange(7000.0), torch.arange(7000))
    validation, test = (Examples(torch.zeros(2), torch.zeros(2).long()) for _ in range(2))
    monkeypatch.setattr(fashion_mnist, "load", lambda data_dir: Data(train, validation, test))
    small = get_task("fashion-mnist-6000").load()
    assert (small.validation, small.test) == (validation, test)
    assert len(set(small.train.targets.tolist())) == 6000
    assert torch.equal(small.train.inputs, small.train.targets.float())
    model = get_task("fashion-mnist-6000").model(0)
    assert sum(p.numel() for p in model.parameters()) == 26_010
