"""Public pictures: a stamp in the middle of each, the photograph around it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedcgd_simulations.public_pictures import read, things_on_photographs


def test_a_stamp_lies_on_a_crop_of_a_photograph(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stamps"):
        read(tmp_path)
    stamp = Image.new("RGBA", (60, 60), (0, 0, 0, 0))
    stamp.paste((255, 0, 0, 255), (10, 20, 50, 40))  # empty around it
    (tmp_path / "stamps" / "animals").mkdir(parents=True)
    stamp.save(tmp_path / "stamps" / "animals" / "cat.png")
    Image.new("RGB", (200, 90), (0, 0, 255)).save(tmp_path / "sea.jpg")
    stamps, photographs = read(tmp_path)
    assert [one.size for one in stamps] == [(40, 20)]
    made = things_on_photographs(stamps, photographs[-1:], np.random.default_rng(0))
    for _ in range(20):
        red, _, blue = np.asarray(next(made)).transpose(2, 0, 1) > 128
        assert red.shape == (32, 32)
        assert not (red & blue).any()
        assert blue[0].all()
        wide, high = red.any(0).sum(), red.any(1).sum()
        assert 18 <= wide <= 32
        assert abs(high - wide / 2) <= 2
        assert red[16, 16]
