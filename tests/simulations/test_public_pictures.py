"""Public pictures: a stamp in the middle of each, the photograph around it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedcgd_simulations.public_pictures import read, things_on_photographs


def test_a_stamp_lies_on_a_crop_of_a_photograph(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stamps"):
        read(tmp_path)
    (folder := tmp_path / "stamps" / "animals").mkdir(parents=True)
    stamp = Image.new("RGBA", (60, 60))
    stamp.paste((255, 0, 0, 255), (10, 20, 50, 40))  # nothing around it
    stamp.save(folder / "cat.png")
    Image.new("RGB", (200, 90), (0, 0, 255)).save(tmp_path / "sea.jpg")
    stamps, photographs = read(tmp_path)
    made = next(things_on_photographs(stamps, photographs[-1:], np.random.default_rng(0)))
    red, _, blue = np.asarray(made).transpose(2, 0, 1) > 128
    assert (made.size, stamps[0].size) == ((32, 32), (40, 20))
    assert red[16, 16] and blue[0].all() and not (red & blue).any()  # noqa: PT018
