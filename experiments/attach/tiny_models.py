"""Small models and pictures for public scripts that fetch theirs from a hub, in the files that they read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

_PIXELS, _NUM_PICTURES = 32, 160
_GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64, "vocab_size": 80}
_VIT = {
    "model_type": "vit",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": _PIXELS,
    "patch_size": 8,
}
_UNET = {
    "_class_name": "UNet2DModel",
    "sample_size": _PIXELS,
    "in_channels": 3,
    "out_channels": 3,
    "layers_per_block": 1,
    "block_out_channels": [8, 16],
    "norm_num_groups": 4,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
}


def write_models(folder: Path) -> None:
    """Write models `gpt2`, `vit` and `unet` without weights, and pictures of two classes."""
    words = ["<unk>", *(np.binary_repr(number) for number in range(64))]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": {word: i for i, word in enumerate(words)}},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "model_max_length": 64}
    size = {"height": _PIXELS, "width": _PIXELS}
    _write(folder / "gpt2", {"config": _GPT2, "tokenizer": tokenizer, "tokenizer_config": settings})
    _write(
        folder / "vit",
        {"config": _VIT, "preprocessor_config": {"image_processor_type": "ViTImageProcessor", "size": size}},
    )
    _write(folder / "unet", {"config": _UNET})
    shades = np.random.default_rng(0).integers(0, 255, (_NUM_PICTURES, _PIXELS, _PIXELS, 3), dtype=np.uint8)
    for number, shade in enumerate(shades):
        place = folder / "pictures" / ("cat", "dog")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(shade).save(place / f"{number}.png")


def _write(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
