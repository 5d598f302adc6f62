"""Averaging of gradients in 8 bits, for DDP.

torch's own 8-bit hooks fail on gloo, have one scale for a whole bucket, or loop over blocks in Python, and they gather
all gradients on each rank, which is more than an all-reduce of float32 from 8 replicas on. This one goes like that of
ZeRO++ (Wang et al. 2023, section 3.3): each replica averages one share and hands it on.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpcpace.train.compression import INT8_BLOCK as BLOCK
from hpcpace.train.compression import SCALE_BYTES

_LARGEST = 127


def int8_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over the replicas, with all that is sent in 8 bits and a scale for each block.

    An all-to-all brings each replica the same share of all buckets; an all-gather brings all the averaged shares.
    """
    gradients, num_ranks = bucket.buffer(), group.size()
    shares = quantize(_padded(gradients, num_ranks).view(num_ranks, -1))
    received = torch.empty_like(shares)
    arrived = dist.all_to_all_single(received, shares, group=group, async_op=True).get_future()

    def hand_on(_: torch.futures.Future[list[Tensor]]) -> Tensor:
        share = quantize(dequantize(received).mean(0, keepdim=True))
        gathered = torch.empty_like(shares)
        dist.all_gather(list(gathered.split(1)), share, group=group, async_op=True).get_future().wait()
        return gradients.copy_(dequantize(gathered).flatten()[: gradients.numel()])

    average: torch.futures.Future[Tensor] = arrived.then(hand_on)
    return average


def quantize(values: Tensor) -> Tensor:
    """Round values to 8 bits.

    Args:
        values: (rows, columns), of any floating type; columns are a multiple of INT8_BLOCK.

    Returns:
        int8, (rows, columns + 4 columns / INT8_BLOCK): the integers of a row, then the bytes of its float32 scales. A
        value is its integer times the scale of its block, the largest absolute value of which is 127.
    """
    blocks = values.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2, keepdim=True) / _LARGEST
    # A block of zeros has a scale of 0.
    integers = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    return torch.cat([integers.flatten(1), scales.flatten(1).view(torch.int8)], dim=1)


def dequantize(message: Tensor) -> Tensor:
    """Return the values of `quantize` again: float32, (rows, columns)."""
    num_blocks = message.shape[1] // (BLOCK + SCALE_BYTES)
    integers, scales = message.split([num_blocks * BLOCK, num_blocks * SCALE_BYTES], dim=1)
    scales = scales.contiguous().view(torch.float32)
    values: Tensor = integers.unflatten(1, (-1, BLOCK)).float() * scales.unsqueeze(2)
    return values.flatten(1)


def _padded(values: Tensor, num_ranks: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % (num_ranks * BLOCK)))
