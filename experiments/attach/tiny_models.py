"""Small models and pictures for public scripts that fetch theirs from a hub, in the files that they read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from experiments.pages import read_toml

_PIXELS, _NUM_PICTURES = 32, 160


def write_models(folder: Path) -> None:
    """Write models `gpt2`, `vit` and `unet` without weights, and pictures of two classes."""
    words = ["<unk>", *(np.binary_repr(number) for number in range(64))]
    for model, files in read_toml(__file__).items():
        (folder / model).mkdir(parents=True)
        for name, content in files.items():
            if name == "tokenizer":
                content["model"]["vocab"] = {word: number for number, word in enumerate(words)}
            (folder / model / f"{name}.json").write_text(json.dumps(content))
    shades = np.random.default_rng(0).integers(0, 255, (_NUM_PICTURES, _PIXELS, _PIXELS, 3), dtype=np.uint8)
    for number, shade in enumerate(shades):
        place = folder / "pictures" / ("cat", "dog")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(shade).save(place / f"{number}.png")
