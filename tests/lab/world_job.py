"""What a rank in the lab prints of its world: started by srun alone, or by torchrun within it."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

from hpcpace.core.environment import process_environ, rank_info

info = rank_info(process_environ())
dist.init_process_group("gloo")
ranks = torch.tensor([float(info.rank)])
dist.all_reduce(ranks)
dist.destroy_process_group()
line = f"{info.rank} of {info.world_size}, {info.local_rank} of {info.local_size}, node {info.node} of {info.num_nodes}"
os.write(1, f"{line}, {socket.gethostname()}, {info.launcher}, sum {int(ranks)}\n".encode())
