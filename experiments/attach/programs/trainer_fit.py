"""Hugging Face's Trainer with a model of its own kind, evaluation and checkpoints."""

from __future__ import annotations

import os

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from experiments.attach.programs.parts import BATCH, STEPS, WIDTH, Layers, options
from experiments.attach.witness import Witness, hold


class Items(Dataset):
    def __init__(self, num_items: int) -> None:
        self._num_items = num_items

    def __len__(self) -> int:
        return self._num_items

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index % BATCH == 0:
            hold("data")
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(WIDTH, generator=generator), "labels": torch.randn(WIDTH, generator=generator)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Layers()
        self.loss = torch.zeros(())

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hold("compute")
        output = self.net(x)
        self.loss = torch.nn.functional.mse_loss(output, labels)
        return {"loss": self.loss, "logits": output}


class Steps(TrainerCallback):
    def __init__(self, witness: Witness, model: Model, samples: int) -> None:
        self._witness, self._model, self._samples = witness, model, samples

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self._witness.step(self._model.loss, self._samples)


def main() -> None:
    args = options()
    witness = Witness()
    torch.manual_seed(0)
    model = Model()
    callbacks: list[TrainerCallback] = []
    if args.callback:
        from hpcpace.callbacks.transformers import TraceCallback

        callbacks.append(TraceCallback(run_dir=os.environ.get("ATTACH_RUN"), warmup_steps=2))
    callbacks.append(Steps(witness, model, BATCH * args.accumulate))
    settings = TrainingArguments(
        output_dir=os.path.join(os.environ["ATTACH_FOLDER"], "output"),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=args.accumulate,
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=STEPS // 2,
        save_strategy="steps",
        save_steps=STEPS // 2,
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
        seed=0,
    )
    items = Items(4 * BATCH * STEPS * args.accumulate)
    trainer = Trainer(
        model=model, args=settings, train_dataset=items, eval_dataset=Items(4 * BATCH * 2), callbacks=callbacks
    )
    trainer.train()


if __name__ == "__main__":
    main()
