"""Where and in which type a bench computes: its options, the GPU that it uses, and what that could compute at most.

The lines for GPUs have not been run on one yet.
"""

from __future__ import annotations

import argparse
import re
import sys

import torch

from hpcpace.config import SHORT_DTYPES
from hpcpace.core.errors import WorldError
from hpcpace.train.presets import GPT2Shape
from hpcpace.world.process_group import choose_device

# Dense bfloat16 with float32 sums, in TFLOPS, from NVIDIA's data sheets; a slice of a card (MIG) has another name.
_PEAK_TFLOPS = (
    (r"NVIDIA H100 80GB HBM3|NVIDIA H200", 989.0),
    (r"NVIDIA H100 PCIe", 756.0),
    (r"NVIDIA A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe", 312.0),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--device` and `--dtype`."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="compute on the CPU, or on one GPU")
    parser.add_argument(
        "--dtype",
        type=lambda name: SHORT_DTYPES.get(name, name),
        choices=("float32", "bfloat16"),
        default="float32",
        help="compute in float32, or in bf16 by autocast with parameters in float32",
    )


def open_device(name: str) -> torch.device:
    """Return the device of a bench that has one rank; ends the program if there is none."""
    try:
        device = choose_device(name, local_rank=0)
    except WorldError as error:
        sys.exit(str(error))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def require_gpus(num_ranks: int) -> None:
    """End the program unless each rank of this host can have a GPU; makes no context on one."""
    num_gpus = torch.cuda.device_count()
    if num_gpus < num_ranks:
        sys.exit(f"ranks on GPUs need one each: {num_ranks} wanted, and torch sees {num_gpus}")


def words(device: torch.device) -> str:
    """Return what computes, in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"


def flops_per_token(shape: GPT2Shape, seq_len: int) -> float:
    """Return the operations that training takes for a token (Chowdhery et al. 2022, appendix B).

    Two for each parameter of a matrix product forward and four backward, and 12 layers width tokens in attention, which
    counts what a causal mask leaves out. The position embedding multiplies nothing.
    """
    num_multiplied = shape.num_parameters - shape.context * shape.width
    return 6.0 * num_multiplied + 12.0 * shape.num_layers * shape.width * seq_len


def peak_tflops(device_name: str) -> float | None:
    """Return the TFLOPS of a GPU in bfloat16 by its data sheet; None if it is not in the table."""
    return next((peak for names, peak in _PEAK_TFLOPS if re.fullmatch(names, device_name)), None)
