"""The runtime benchmark: Opacus is the baseline, two models at once are the most, and variants cost what they say."""

import weakref

import pytest

from fedcgd_experiments import runtime

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Optimal order is the"),
    pytest.mark.filterwarnings("ignore:Full backward hook"),
    pytest.mark.filterwarnings("ignore:this run can be trained, but not saved"),
]


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_record_has_a_row_for_each_variant(monkeypatch, mode):
    alive, most, make = weakref.WeakSet(), [], runtime.MODELS["cnn"]

    def counted():
        alive.add(model := make())
        most.append(len(alive))
        return model

    monkeypatch.setitem(runtime.MODELS, "cnn", counted)
    variants = [("dp-sgd", 1), ("replay", 2), ("cpu-buffer", 4)]
    record = runtime.measure("cnn", batch=4, physical=2, turns=2, steps=1, mode=mode, variants=variants)
    assert [(row["noise"], row["bands"]) for row in record["rows"]] == [("opacus", 1), *variants]
    first, *others = record["rows"]
    assert (first["ratio"], first["quartiles"]) == (1.0, [1.0, 1.0])
    assert all(row["milliseconds"] > 0 and row["ratio"] != 1.0 for row in others)
    assert record["parameters"] == 288_746
    assert max(most) == 2
