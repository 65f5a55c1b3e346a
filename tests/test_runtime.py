"""The runtime benchmark: DP-SGD is its own baseline, and a variant costs the noise vectors it says."""

import pytest
import torch

from fedcgd.noise import NoiseStream
from fedcgd_experiments import runtime


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_record_has_a_row_for_each_variant(mode):
    variants = [("dp-sgd", 1), ("replay", 2), ("cpu-buffer", 4)]
    record = runtime.measure("cnn", batch=4, physical=2, turns=2, steps=1, mode=mode, variants=variants)
    assert [(row["noise"], row["bands"]) for row in record["rows"]] == variants
    first = record["rows"][0]
    assert (first["ratio"], first["quartiles"]) == (1.0, [1.0, 1.0])
    assert all(row["milliseconds"] > 0 for row in record["rows"])
    assert record["parameters"] == 288_746


def test_replay_makes_each_noise_vector_in_each_step_and_a_buffer_only_one(monkeypatch):
    made = []
    key_of = NoiseStream.key_of

    def counting(self, round, nonce):
        made[-1].add((self._key, round))
        return key_of(self, round, nonce)

    monkeypatch.setattr(NoiseStream, "key_of", counting)
    for noise, bands, expected in (("replay", 4, 4), ("cpu-buffer", 4, 1), ("dp-sgd", 1, 1)):
        step = runtime.prepare("cnn", noise, runtime.InverseBands(bands), 4, 2, "hooks")
        made.append(set())
        for _ in range(4):
            step()
        made[-1] = set()
        step()
        assert len(made[-1]) == expected + 1  # one is the smoothing's


def test_inputs_fit_the_models():
    assert runtime.inputs_for("cnn", 2).shape == (2, 3, 32, 32)
    assert runtime.inputs_for("bert-tiny", 2).dtype == torch.int64
    assert set(runtime.MODELS) >= {"cnn", "wideresnet-40", "vit-b-16", "vit-l-16", "vit-h-14", "lstm", "bert-base"}
