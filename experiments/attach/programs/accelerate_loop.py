"""A loop with Accelerate: it wraps model, optimizer and loader, and accumulates gradients."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator

from experiments.attach.programs.parts import BATCH, STEPS, Model, distributed_batches, loss_of, options
from experiments.attach.witness import Witness


def main() -> None:
    parser = options()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--callback", action="store_true")
    args = parser.parse_args()
    witness = Witness()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = distributed_batches(steps=4 * STEPS * args.accumulate)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    traced: AbstractContextManager[object] = nullcontext()
    if args.callback:
        from hpcpace.callbacks.accelerate import trace

        traced = trace(accelerator, run_dir=os.environ["ATTACH_RUN"], warmup_steps=2)
    with traced:
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = loss_of(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                witness.step(loss, BATCH * args.accumulate)
    accelerator.end_training()


if __name__ == "__main__":
    main()
