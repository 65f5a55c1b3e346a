"""Public pictures of things, for the planner: nobody's private data, with the statistics of CIFAR-10's.

Each is one of Tux Paint's stamps (Debian's tuxpaint-stamps-default) on a crop of a photograph: scikit-learn's two, and the
wallpapers of Debian's plasma-workspace-wallpapers, lomiri-wallpapers-16.04, lomiri-wallpapers-20.04 and gnome-backgrounds.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

SIDE = 32
THINGS = ("animals", "clothes", "food", "hobbies", "household", "military", "plants", "vehicles")
"""Folders of stamps; the others hold letters, money and drawings."""


def things_on_photographs(
    stamps: Sequence[Image.Image], photographs: Sequence[Image.Image], generator: np.random.Generator
) -> Iterator[Image.Image]:
    """Pictures of 32 × 32 without end: any stamp, 20 to 32 pixels long, in the middle of a tenth to all of any photograph."""
    while True:
        behind = photographs[int(generator.integers(len(photographs)))]
        least = min(behind.size)
        side = max(SIDE, int(least * np.exp(generator.uniform(np.log(0.1), 0))))
        left, top = (int(generator.integers(length - side + 1)) for length in behind.size)
        picture = behind.crop((left, top, left + side, top + side)).resize((SIDE, SIDE), Image.Resampling.BOX)
        stamp = stamps[int(generator.integers(len(stamps)))]
        scale = int(generator.integers(20, SIDE + 1)) / max(stamp.size)
        width, height = (max(1, round(length * scale)) for length in stamp.size)
        small = stamp.resize((width, height), Image.Resampling.BOX)
        picture.paste(small, ((SIDE - width) // 2, (SIDE - height) // 2), small)
        yield picture


def read(pictures: Path) -> tuple[list[Image.Image], list[Image.Image]]:
    """(stamps without their empty borders, photographs of 800 pixels) in a folder. Raises ValueError if either is missing."""
    stamps, photographs = [], [Image.fromarray(image) for image in load_sample_images().images]
    for path in sorted(pictures.rglob("*")):
        if path.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
            continue
        if "stamps" not in path.parts:
            photographs.append(Image.open(path).convert("RGB"))
            photographs[-1].thumbnail((1600, 1600), Image.Resampling.BOX)
        elif set(path.parts) & set(THINGS):
            stamp = Image.open(path).convert("RGBA")
            stamps.append(stamp.crop(stamp.getbbox()))
    if not stamps:
        raise ValueError(f"{pictures} has no stamps; unpack Debian's tuxpaint-stamps-default there (dpkg-deb -x)")
    return stamps, photographs
