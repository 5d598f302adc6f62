"""Lightning's Trainer, under torchrun or with the launcher that it has itself."""

from __future__ import annotations

import os

import lightning
import torch

from experiments.attach.programs.parts import BATCH, STEPS, Model, distributed_batches, loss_of, options
from experiments.attach.witness import Witness


class Module(lightning.LightningModule):
    def __init__(self, witness: Witness, accumulate: int) -> None:
        super().__init__()
        self.model = Model()
        self._witness, self._accumulate = witness, accumulate
        self._loss = torch.zeros(())

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        self._loss = loss_of(self.model(batch[0]), batch[1])
        return self._loss

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.model(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, outputs: object, batch: object, number: int) -> None:
        if (number + 1) % self._accumulate == 0:
            self._witness.step(self._loss, BATCH * self._accumulate)


def main() -> None:
    args = options()
    witness = Witness()
    lightning.seed_everything(0)
    callbacks = []
    if args.callback:
        from hpcpace.callbacks.lightning import TraceCallback

        callbacks.append(TraceCallback(run_dir=os.environ.get("ATTACH_RUN"), warmup_steps=2))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=4,
        strategy="ddp",
        max_epochs=1,
        accumulate_grad_batches=args.accumulate,
        val_check_interval=STEPS * args.accumulate // 2,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    batches = distributed_batches(steps=4 * STEPS * args.accumulate)
    trainer.fit(Module(witness, args.accumulate), batches, distributed_batches(steps=8))


if __name__ == "__main__":
    main()
