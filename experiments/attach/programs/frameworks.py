"""Training by libraries that bring a loop, a loss, a model or an optimizer: frameworks.py NAME."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from experiments.attach.programs.parts import BATCH, STEPS, WIDTH, Model, Numbers, batches, loss_of
from experiments.attach.tiny_models import write_models
from experiments.attach.witness import Witness, hold

_RANK, _NUM_RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _loader(steps: int = STEPS) -> DataLoader:
    return batches(_RANK, _NUM_RANKS, steps=steps)


def _joined() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def ignite(witness: Witness) -> None:
    """Train by an engine, and evaluate at the end of the epoch."""
    import ignite.distributed as idist
    from ignite.engine import Engine, Events, create_supervised_evaluator
    from ignite.metrics import MeanSquaredError

    def train(_: int) -> None:
        torch.manual_seed(0)
        model = idist.auto_model(Model())
        optimizer = idist.auto_optim(_adam(model))

        def update(engine: Engine, batch: Any) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            return loss

        trainer = Engine(update)
        evaluator = create_supervised_evaluator(model, {"error": MeanSquaredError()})
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda own: witness.step(own.state.output, BATCH))
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run(_loader(2)))
        trainer.run(_loader(), max_epochs=1)

    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(train)


def torchtnt(witness: Witness) -> None:
    """Train by an AutoUnit that accumulates over two microbatches, and evaluate."""
    from torchtnt.framework.auto_unit import AutoUnit
    from torchtnt.framework.fit import fit
    from torchtnt.utils import init_from_env

    class Unit(AutoUnit):
        def compute_loss(self, state: Any, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
            output = self.module(data[0])
            return loss_of(output, data[1]), output

        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
            return _adam(module), None

        def on_train_step_end(self, state: Any, data: Any, step: int, results: Any) -> None:
            if self.train_progress.num_steps_completed % 2 == 0:
                witness.step(results.loss, 2 * BATCH)

    device = init_from_env()
    torch.manual_seed(0)
    unit = Unit(module=Model(), strategy="ddp", device=device, gradient_accumulation_steps=2)
    fit(unit, train_dataloader=_loader(2 * STEPS), eval_dataloader=_loader(2), max_epochs=1)


def mmengine(witness: Witness) -> None:
    """Train by a Runner that accumulates over two microbatches and saves at the end."""
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Net(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model()

        def forward(self, x: torch.Tensor, y: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
            return {"loss": loss_of(self.net(x), y)}

    class Steps(Hook):
        def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any, outputs: Any) -> None:
            if batch_idx % 2:
                witness.step(outputs["loss"], 2 * BATCH)

    import_module("experiments.attach.without_cuda")
    torch.manual_seed(0)
    Runner(
        model=Net(),
        work_dir=os.path.join(os.environ["ATTACH_FOLDER"], "work"),
        train_dataloader=_loader(2 * STEPS),
        train_cfg={"by_epoch": True, "max_epochs": 1},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 1e-3}, "accumulative_counts": 2},
        custom_hooks=[Steps()],
        randomness={"seed": 0},
        launcher="pytorch",
        log_level="WARNING",
    ).train()


def fastai(witness: Witness) -> None:
    """Train by a Learner, whose optimizer is none of torch's, and evaluate."""
    from fastai.callback.core import Callback
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader as FastLoader
    from fastai.distributed import Learner
    from fastai.optimizer import SGD

    class Steps(Callback):
        def after_step(self) -> None:
            witness.step(self.learn.loss, BATCH)

    import_module("experiments.attach.without_cuda")
    torch.manual_seed(0)
    loaders = [FastLoader(Numbers(steps * BATCH * _NUM_RANKS), bs=BATCH) for steps in (STEPS, 2)]
    model, device = Model(), torch.device("cpu")
    model.device = device  # fastai asks the model
    learner = Learner(DataLoaders(*loaders, device=device), model, loss_func=loss_of, opt_func=SGD, cbs=[Steps()])
    with learner.distrib_ctx(sync_bn=False, cpu=True), learner.no_bar(), learner.no_logging():
        learner.fit(1, lr=0.01)


def graphs(witness: Witness) -> None:
    """Train a graph network of PyTorch Geometric on batches of small graphs."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Graphs(Dataset):
        def __len__(self) -> int:
            return STEPS * BATCH * _NUM_RANKS

        def __getitem__(self, index: int) -> Data:
            hold("data", parts=BATCH)
            random, num_nodes = torch.Generator().manual_seed(index), 6 + index % 5
            nodes = torch.randn(num_nodes, 16, generator=random)
            edges = torch.randint(num_nodes, (2, 3 * num_nodes), generator=random)
            return Data(x=nodes, edge_index=edges, y=nodes.mean(0, keepdim=True))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(16, 128), GCNConv(128, 16)

        def forward(self, batch: Data) -> torch.Tensor:
            hold("compute")
            nodes = self.first(batch.x, batch.edge_index).relu()
            return global_mean_pool(self.second(nodes, batch.edge_index), batch.batch)

    _joined()
    model, data = DistributedDataParallel(Net()), Graphs()
    optimizer = _adam(model)
    for batch in GraphLoader(data, batch_size=BATCH, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        loss = loss_of(model(batch), batch.y)
        loss.backward()
        optimizer.step()
        witness.step(loss, BATCH)


def lightly(witness: Witness) -> None:
    """Train with a contrastive loss over the views of all ranks, and a momentum encoder."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum

    _joined()
    student, teacher = (nn.Sequential(Model(), SimCLRProjectionHead(WIDTH, WIDTH, 64)) for _ in range(2))
    deactivate_requires_grad(teacher)
    model, optimizer = DistributedDataParallel(student), _adam(student)
    losses = NTXentLoss(gather_distributed=True), NTXentLoss(memory_bank_size=(64, 64))
    for x, y in _loader():
        update_momentum(student, teacher, m=0.99)
        query, key = model(x), teacher(y).detach()
        loss = losses[0](query, key) + losses[1](query, key)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        witness.step(loss, BATCH)


def monai(witness: Witness) -> None:
    """Train by a SupervisedTrainer that evaluates at the end of the epoch."""
    from ignite.engine import Events
    from monai.engines import SupervisedEvaluator, SupervisedTrainer
    from monai.handlers import ValidationHandler

    def as_pair(batch: Any, *_: Any, **__: Any) -> Any:
        return batch

    _joined()
    model = DistributedDataParallel(Model())
    usual = {"device": torch.device("cpu"), "network": model, "prepare_batch": as_pair, "decollate": False}
    evaluator = SupervisedEvaluator(val_data_loader=_loader(2), **usual)
    trainer = SupervisedTrainer(
        max_epochs=1,
        train_data_loader=_loader(),
        optimizer=_adam(model),
        loss_function=loss_of,
        train_handlers=[ValidationHandler(1, evaluator)],
        **usual,
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda own: witness.step(own.state.output["loss"], BATCH))
    trainer.run()


def keras(witness: Witness) -> None:
    """Train a model of Keras by its own optimizer, with gradients that the script averages."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    class Slow(keras.layers.Layer):
        def call(self, x: torch.Tensor) -> torch.Tensor:
            hold("compute")
            return x

    _joined()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(8)]
    model = keras.Sequential([keras.Input((WIDTH,)), Slow(), *layers])
    optimizer = keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)
    for x, y in _loader():
        model.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        gradients = [weight.value.grad for weight in model.trainable_weights]
        for gradient in gradients:
            dist.all_reduce(gradient)
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_weights)
        witness.step(loss, BATCH)


def opacus(witness: Witness) -> None:
    """Train with differential privacy: batches drawn by chance, in microbatches of at most BATCH."""
    from opacus import PrivacyEngine
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    _joined()
    torch.manual_seed(_RANK)
    model = DifferentiallyPrivateDistributedDataParallel(Model())
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=_adam(model),
        data_loader=DataLoader(Numbers(2 * STEPS * BATCH * _NUM_RANKS), batch_size=2 * BATCH * _NUM_RANKS),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    samples = 0
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=BATCH, optimizer=optimizer) as microbatches:
        for x, y in microbatches:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            samples += len(x)
            if not optimizer._is_last_step_skipped:
                witness.step(loss, samples)
                samples = 0


def metric_learning(witness: Witness) -> None:
    """Train with a loss that has parameters and an optimizer of its own, over the embeddings of all ranks."""
    from pytorch_metric_learning.losses import ArcFaceLoss
    from pytorch_metric_learning.miners import MultiSimilarityMiner
    from pytorch_metric_learning.utils.distributed import DistributedLossWrapper, DistributedMinerWrapper

    _joined()
    model = DistributedDataParallel(Model())
    criterion, miner = DistributedLossWrapper(ArcFaceLoss(4, WIDTH)), DistributedMinerWrapper(MultiSimilarityMiner())
    optimizers = _adam(model), torch.optim.SGD(criterion.parameters(), lr=1e-2)
    for x, y in _loader():
        labels, embeddings = y.sum(1).long() % 4, model(x)
        loss = criterion(embeddings, labels, miner(embeddings, labels))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        witness.step(loss, BATCH)


def pyro(witness: Witness) -> None:
    """Infer by SVI, with an optimizer for each parameter; gradients are averaged as in Pyro's example for Horovod."""
    import pyro
    from pyro.distributions import Normal
    from pyro.infer import SVI, Trace_ELBO

    _joined()
    pyro.set_rng_seed(0)
    encoder, decoder = Model(), Model()

    def model(x: torch.Tensor) -> None:
        pyro.module("decoder", decoder)
        with pyro.plate("samples", len(x)):
            z = pyro.sample("z", Normal(torch.zeros_like(x), 1.0).to_event(1))
            pyro.sample("x", Normal(decoder(z), 1.0).to_event(1), obs=x)

    def guide(x: torch.Tensor) -> None:
        pyro.module("encoder", encoder)
        with pyro.plate("samples", len(x)):
            pyro.sample("z", Normal(encoder(x), 1.0).to_event(1))

    elbo = Trace_ELBO()

    def averaged(*args: Any) -> float:
        loss = elbo.loss_and_grads(*args)
        for parameter in pyro.get_param_store().values():
            dist.all_reduce(parameter.unconstrained().grad)
        return loss

    inference = SVI(model, guide, pyro.optim.Adam({"lr": 1e-4}), loss=elbo.loss, loss_and_grads=averaged)
    for x, _ in _loader():
        witness.step(inference.step(x), BATCH)


def skorch(witness: Witness) -> None:
    """Train a net with the interface of scikit-learn, and evaluate at the end of the epoch."""
    from accelerate import Accelerator
    from skorch import NeuralNetRegressor
    from skorch.callbacks import Callback
    from skorch.helper import predefined_split
    from skorch.hf import AccelerateMixin

    class Net(AccelerateMixin, NeuralNetRegressor):
        """Has its module, optimizer and loaders prepared by Accelerate."""

    class Steps(Callback):
        def on_batch_end(self, net: Any, training: bool = False, loss: Any = None, **_: Any) -> None:
            if training:
                witness.step(loss, BATCH)

    torch.manual_seed(0)
    net = Net(
        Model,
        criterion=lambda: loss_of,  # one that is a module without parameters ends in an error of DDP
        accelerator=Accelerator(cpu=True),
        optimizer=torch.optim.Adam,
        lr=1e-3,
        batch_size=BATCH,
        max_epochs=1,
        train_split=predefined_split(Numbers(2 * BATCH * _NUM_RANKS)),
        callbacks=[Steps()],
        verbose=0,
        device=None,
    )
    net.fit(Numbers(STEPS * BATCH * _NUM_RANKS), None)


def denoising_diffusion(witness: Witness) -> None:
    """Train a diffusion model on pictures, and sample on rank 0 every 20 steps."""
    from denoising_diffusion_pytorch import denoising_diffusion_pytorch as package

    pictures = 8

    class Pictures(package.Dataset):
        def __getitem__(self, index: int) -> torch.Tensor:
            hold("data", parts=2 * pictures)
            return super().__getitem__(index)

    package.Dataset, package.cpu_count = Pictures, lambda: 0  # workers for the loader
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.manual_seed(0)
    folder = Path(os.environ["ATTACH_FOLDER"]) / f"tiny-{_RANK}"
    write_models(folder)
    unet = package.Unet(8, dim_mults=(1, 2), attn_heads=2, attn_dim_head=8)
    trainer = package.Trainer(
        package.GaussianDiffusion(unet, image_size=16, timesteps=10, sampling_timesteps=5),
        folder / "pictures",
        train_batch_size=pictures,
        gradient_accumulate_every=2,
        train_num_steps=STEPS,
        save_and_sample_every=20,
        num_samples=4,
        calculate_fid=False,
        results_folder=folder / "results",
    )
    microbatches: list[tuple[torch.Tensor, int]] = []
    trainer.model.register_forward_pre_hook(lambda *_: hold("compute", parts=2))
    trainer.model.register_forward_hook(lambda _, inputs, loss: microbatches.append((loss, len(inputs[0]))))
    clear = trainer.opt.zero_grad

    def ended() -> None:
        witness.step(microbatches[-1][0], sum(size for _, size in microbatches[-2:]))
        clear()

    trainer.opt.zero_grad = ended
    trainer.train()


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(90))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **special)


def _texts(step: int) -> list[str]:
    return [f"w{number % 90} w{step * number % 90}" for number in range(STEPS * BATCH * _NUM_RANKS)]


def _run_trainer(witness: Witness, trainer: Any, model: nn.Module) -> None:
    from transformers import TrainerCallback

    losses: list[torch.Tensor] = []

    class Steps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            witness.step(losses[-1], BATCH)

    collate, train = trainer.data_collator, trainer.training_step

    class Slow:
        def __call__(self, items: Any) -> Any:
            hold("data")
            return collate(items)

        def __getattr__(self, name: str) -> Any:
            return getattr(collate, name)

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        losses.append(train(*args, **options))
        return losses[-1]

    trainer.data_collator, trainer.training_step = Slow(), noted
    model.register_forward_pre_hook(lambda *_: hold("compute") if torch.is_grad_enabled() else None)
    trainer.add_callback(Steps())
    trainer.train()


def _usual(name: str) -> dict[str, Any]:
    usual = {"per_device_train_batch_size": BATCH, "max_steps": STEPS, "save_strategy": "no", "logging_steps": 1_000}
    output = os.path.join(os.environ["ATTACH_FOLDER"], name)
    return {**usual, "output_dir": output, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 0}


def sentence_transformers(witness: Witness) -> None:
    """Train with a cached loss: a step has several backward passes, each over a part of the batch."""
    from datasets import Dataset as Texts
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, models
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    place = os.path.join(os.environ["ATTACH_FOLDER"], f"bert-{_RANK}")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    BertModel(BertConfig(vocab_size=94, max_position_embeddings=64, **sizes)).save_pretrained(place)
    _tokenizer().save_pretrained(place)
    bert = models.Transformer(place, max_seq_length=16)
    model = SentenceTransformer(modules=[bert, models.Pooling(64)], device="cpu")
    trainer = SentenceTransformerTrainer(
        model=model,
        args=Arguments(**_usual("sentences")),
        train_dataset=Texts.from_dict({"anchor": _texts(3), "positive": _texts(7)}),
        loss=CachedMultipleNegativesRankingLoss(model, mini_batch_size=BATCH // 2),
    )
    _run_trainer(witness, trainer, bert)


def _language_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=94, max_position_embeddings=64, **sizes, **special))


def _run_trl(witness: Witness, trainer: type, columns: dict[str, list[str]], settings: Any, **options: Any) -> None:
    """Run a trainer of TRL on texts by column."""
    from datasets import Dataset as Texts

    model, texts = _language_model(), Texts.from_dict(columns)
    made = trainer(model=model, processing_class=_tokenizer(), train_dataset=texts, args=settings, **options)
    _run_trainer(witness, made, model)


def grpo(witness: Witness) -> None:
    """Train by reinforcement learning: the model samples completions, and a function rewards them."""
    from trl import GRPOConfig, GRPOTrainer

    def rewards(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text.split()) % 5) for text in completions]

    settings = GRPOConfig(num_generations=4, max_completion_length=8, bf16=False, **_usual("grpo"))
    _run_trl(witness, GRPOTrainer, {"prompt": _texts(7)}, settings, reward_funcs=rewards)


def dpo(witness: Witness) -> None:
    """Train on preferences, with a reference model without gradients in each step."""
    from trl import DPOConfig, DPOTrainer

    texts = {"prompt": _texts(3), "chosen": _texts(7), "rejected": _texts(11)}
    _run_trl(witness, DPOTrainer, texts, DPOConfig(bf16=False, **_usual("dpo")), ref_model=_language_model())


def sft(witness: Witness) -> None:
    """Tune adapters of low rank, while the model itself is frozen."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(bf16=False, gradient_accumulation_steps=1, **_usual("sft"))
    adapters = LoraConfig(target_modules=["q_proj", "v_proj"])
    _run_trl(witness, SFTTrainer, {"text": _texts(7)}, settings, peft_config=adapters)


PROGRAMS = (
    *(ignite, torchtnt, mmengine, fastai, graphs, lightly, monai, keras, opacus, metric_learning, pyro),
    *(skorch, denoising_diffusion, sentence_transformers, grpo, dpo, sft),
)


def main() -> None:
    torch.set_num_threads(1)
    {program.__name__: program for program in PROGRAMS}[sys.argv[1]](Witness())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
