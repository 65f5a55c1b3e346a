"""Partitions cover every example once, and have the skew they promise."""

import numpy as np
import pytest

from fedcgd_simulations.partitions import dirichlet_label_skew, iid_shards, natural, one_per_user

LABELS = np.random.default_rng(0).integers(0, 10, size=2000)
PARTITIONS = {
    "one": one_per_user(2000),
    "iid": iid_shards(2000, 30, seed=1),
    "skewed": dirichlet_label_skew(LABELS, 30, concentration=0.05, seed=1),
    "even": dirichlet_label_skew(LABELS, 30, concentration=1000.0, seed=1),
    "natural": natural(LABELS.astype(str)),
}


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_example_has_one_owner_and_every_user_an_example(name):
    parts = PARTITIONS[name]
    assert sorted(np.concatenate(parts)) == list(range(2000))
    assert min(len(part) for part in parts) >= 1


def labels_of(name):
    """How many of a user's examples have the user's commonest label, averaged over users."""
    return np.mean([np.bincount(LABELS[part], minlength=10).max() / len(part) for part in PARTITIONS[name]])


def test_sizes_and_skew_are_as_named():
    assert {len(part) for part in PARTITIONS["iid"]} == {66, 67}
    assert {len(part) for part in PARTITIONS["one"]} == {1}
    assert labels_of("natural") == 1
    assert labels_of("skewed") > 0.7
    assert labels_of("even") < 0.2


@pytest.mark.parametrize("users", [0, 11])
def test_impossible_numbers_of_users_are_refused(users):
    with pytest.raises(ValueError, match=f"got {users}"):
        iid_shards(10, users, seed=0)
    with pytest.raises(ValueError, match="got 0"):
        dirichlet_label_skew([0, 1], 2, concentration=0, seed=0)


def test_seeds_decide():
    again = iid_shards(2000, 30, seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(again, PARTITIONS["iid"], strict=True))
    other = iid_shards(2000, 30, seed=2)
    assert not all(np.array_equal(a, b) for a, b in zip(other, again, strict=True))


def test_as_many_users_as_examples_leaves_nobody_out():
    parts = dirichlet_label_skew([0, 0, 1, 1], 4, concentration=0.01, seed=0)
    assert sorted(len(part) for part in parts) == [1, 1, 1, 1]
