"""docs/guides/your_data.md: its functions read a CSV and folders of persons, and its app trains on them."""

import csv
import re
from pathlib import Path

import numpy as np
import torch
from fake_grid import FakeGrid, FakeNode
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAvg

from fedcgd import DPSGD, NoiseKey, Participation, Plan
from fedcgd_flower import CorrelatedNoise

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "your_data.md").read_text()


def functions() -> dict:
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(block, names)
    return names


def test_people_of_a_csv_train_a_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        {"person": f"p{i % 40}", "age": float(x), "dose": float(y), "label": int(x > y)}
        for i, (x, y) in enumerate(rng.normal(size=(200, 2)))
    ]
    with (tmp_path / "people.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    page = functions()
    people = page["rows_by_person"](tmp_path / "people.csv")
    assert len(people) == 40
    assert people["p3"][0].shape == (5, 2)
    assert people["p3"][0][0].tolist() == [np.float32(rows[3]["age"]), np.float32(rows[3]["dose"])]
    plan = Plan(
        mechanism=DPSGD(), participation=Participation(rounds=25), clip_norm=1.0, noise_multiplier=0, delta=1e-3
    )
    torch.manual_seed(0)
    net = page["network"](2, 2)
    strategy = CorrelatedNoise(FedAvg(), plan, key=NoiseKey.simulation(0), cohort_size=40)
    result = strategy.start(
        FakeGrid({1: FakeNode(page["make_app"](people, 2))}),
        ArrayRecord(net.state_dict()),
        train_config=ConfigRecord({"lr": 1.0}),
    )
    net.load_state_dict(result.arrays.to_torch_state_dict())
    features, labels = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*people.values(), strict=True))
    assert (net(features).argmax(1) == labels).float().mean() > 0.9


def test_folders_of_persons_are_found(tmp_path: Path) -> None:
    for name in ("anna/2.png", "anna/1.png", "bert/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "notes.txt").touch()
    found = functions()["files_by_person"](tmp_path)
    assert {name: [path.name for path in paths] for name, paths in found.items()} == {
        "anna": ["1.png", "2.png"],
        "bert": ["1.png"],
    }
