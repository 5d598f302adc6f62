"""DeepSpeed ZeRO with two parameter groups, as most scripts have for weight decay."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import deepspeed
import torch
import torch.distributed as dist

from experiments.attach.programs.parts import BATCH, STEPS, Model, batches, loss_of, options
from experiments.attach.witness import Witness


def main() -> None:
    parser = options()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--callback", action="store_true")
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    witness = Witness()
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Model()
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": args.accumulate,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    traced: AbstractContextManager[object] = nullcontext()
    if args.callback:
        from hpcpace.callbacks.deepspeed import trace

        traced = trace(engine, run_dir=os.environ["ATTACH_RUN"], warmup_steps=2)
    with traced:
        for x, y in batches(dist.get_rank(), dist.get_world_size(), steps=STEPS * args.accumulate):
            loss = loss_of(engine(x), y)
            engine.backward(loss)
            is_last = engine.is_gradient_accumulation_boundary()
            engine.step()
            if is_last:
                witness.step(loss, BATCH * args.accumulate)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
