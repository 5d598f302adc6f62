"""The rows of the matrix: what each runs, from where, and with which options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Fault = Literal["compute", "loader", "host"]
FAULTS: tuple[Fault, ...] = ("compute", "loader", "host")
_WITHOUT_LOADER: tuple[Fault, ...] = ("compute", "host")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A public repository at a commit: its clone is `folder` of the option --sources."""

    repository: str
    commit: str

    @property
    def folder(self) -> str:
        """The name of its clone."""
        return self.repository.partition("/")[2]


EXAMPLES = Source(repository="pytorch/examples", commit="77f55b912142e11fcfdf5b530231fb9c52f181e8")
TORCHTITAN = Source(repository="pytorch/torchtitan", commit="73a0e6979dd10b6b1904098eb3c8f62c18ab87ce")
TRANSFORMERS = Source(repository="huggingface/transformers", commit="1618d44b9295361607ec74d7be860ba886aac039")
DIFFUSERS = Source(repository="huggingface/diffusers", commit="58eb52c0803ea9af3abec60841c2a093bdf1f951")
LITGPT = Source(repository="Lightning-AI/litgpt", commit="26857050fe3ff627cd714fe92f5838f51a3d5efa")
OPEN_CLIP = Source(repository="mlfoundations/open_clip", commit="89fb801f1e6087880e951fc8354b8a2077b79c6d")
TORCHTUNE = Source(repository="pytorch/torchtune", commit="bd2a0fc7c31430972728494fa01aaeeb0ebf1ba1")
DEEPSPEED_EXAMPLES = Source(
    repository="deepspeedai/DeepSpeedExamples", commit="45b4b7156c8794a3452a5a7d03dbd8d797068569"
)
COLOSSALAI = Source(repository="hpcaitech/ColossalAI", commit="4f9953be335ef371b3848719ddafe596c01ecd37")
NANOTRON = Source(repository="huggingface/nanotron", commit="2411b022a75fb7f7561a1bb4166706da5e1b76de")
NANOGPT = Source(repository="karpathy/nanoGPT", commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row.

    Attributes:
        name: for --only.
        title: in the document.
        program: file in programs/, or in the source's folder; a module of it where it has no `.py`.
        arguments: of the program.
        num_ranks: how many ranks it runs on.
        launches_itself: whether it starts its ranks; torchrun does otherwise.
        shares_batches: whether ranks compute on the same samples, of which hpcpace then makes no guess.
        source, folder, edits: the public script, and a key of edits.toml; None for a program of this experiment.
        parts: what of the repository is laid out, where that is not its folder.
        packages: distributions whose version counts.
        faults: those that the script has a place for.
        note: what a reader must know.
        is_profiled: whether torch's profiler can see six steps without too many events.
        is_repeatable: whether the script has the same losses each time it runs.
        refused: why it cannot run without a GPU; it is not run then.
    """

    name: str
    title: str
    program: str
    arguments: tuple[str, ...] = ()
    num_ranks: int = 4
    launches_itself: bool = False
    shares_batches: bool = False
    source: Source | None = None
    folder: str = ""
    parts: tuple[str, ...] = ()
    edits: str = ""
    packages: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = FAULTS
    note: str = ""
    is_profiled: bool = True
    is_repeatable: bool = True
    refused: str = ""

    @property
    def is_module(self) -> bool:
        """Whether the program is started as a module."""
        return not self.program.endswith(".py")

    @property
    def has_callback(self) -> bool:
        """Whether the program opens the session by a callback of ours."""
        return "--callback" in self.arguments


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _own(name: str, title: str, program: str, *arguments: str, package: str = "", **more: Any) -> Row:
    packages = (package,) if package else ()
    return Row(name=name, title=title, program=f"{program}.py", arguments=arguments, packages=packages, **more)


def _callback(name: str, title: str, *program: str, package: str, **more: Any) -> Row:
    title = f"{title}, accumulating over 2 microbatches"
    return _own(name, title, *program, "--callback", "--accumulate", "2", package=package, **more)


_DEEPSPEED, _LIGHTNING, _TRANSFORMERS = {"package": "deepspeed"}, {"package": "lightning"}, {"package": "transformers"}
_LAUNCHER: dict[str, Any] = {**_LIGHTNING, "launches_itself": True}
_TWO: dict[str, Any] = {"num_ranks": 2}
_REENTRANT = "Activation checkpointing inside DDP, reentrant"
_ASYNC = "torch.distributed.checkpoint `async_save` every 10 steps, DDP"
_TENSOR, _PIPELINE = "DTensor, tensor parallel, `init_device_mesh` alone", "torch.distributed.pipelining, 1F1B"
_OWN_CALLBACK = "Lightning with its own launcher and our callback"
_OWN = (
    _own("ddp", "DDP", "loops", "ddp"),
    _own("ddp-accumulate", "DDP, accumulating over 2 microbatches", "loops", "ddp", "--accumulate", "2"),
    _own("fsdp1", "FSDP1 (`FullyShardedDataParallel`)", "loops", "fsdp1"),
    _own("fsdp2", "FSDP2 (`fully_shard`)", "loops", "fsdp2"),
    _own("tensor-parallel", _TENSOR, "loops", "tensor", shares_batches=True),
    _own("pipelining", _PIPELINE, "loops", "pipeline", shares_batches=True),
    _own("compile", "torch.compile inside DDP", "loops", "compile"),
    _own("compile-alone", "torch.compile without DDP, gradients averaged by hand", "loops", "by-hand", **_TWO),
    _own("recompute", "Activation checkpointing inside DDP", "loops", "recompute", **_TWO),
    _own("recompute-reentrant", _REENTRANT, "loops", "recompute-reentrant", **_TWO),
    _own("async-checkpoint", _ASYNC, "loops", "async-checkpoint", **_TWO),
    _own("local-sgd", "Local SGD by DDP's post-local-SGD hook, averaging every 4 steps", "loops", "local-sgd", **_TWO),
    *(
        _own(f"zero{n}", f"DeepSpeed ZeRO-{n}, two parameter groups", "loops", "zero", "--stage", f"{n}", **_DEEPSPEED)
        for n in (1, 2, 3)
    ),
    _callback("zero-two-lines", "DeepSpeed with our two lines", "loops", "zero", "--stage", "2", **_DEEPSPEED),
    _own("lightning", "Lightning under torchrun", "lightning_fit", **_LIGHTNING),
    _own("lightning-launcher", "Lightning with its own launcher", "lightning_fit", **_LAUNCHER),
    _callback("lightning-callback", "Lightning with our callback", "lightning_fit", **_LIGHTNING),
    _callback("lightning-launcher-callback", _OWN_CALLBACK, "lightning_fit", **_LAUNCHER),
    _own("accelerate", "Accelerate", "loops", "accelerate", package="accelerate"),
    _callback("accelerate-two-lines", "Accelerate with our two lines", "loops", "accelerate", package="accelerate"),
    _own("trainer", "Hugging Face Trainer", "trainer_fit", **_TRANSFORMERS),
    _callback("trainer-callback", "Hugging Face Trainer with our callback", "trainer_fit", **_TRANSFORMERS),
)
_NANOGPT = Row(
    name="nanogpt",
    title="nanoGPT `train.py`",
    source=NANOGPT,
    program="train.py",
    edits="nanogpt",
    arguments=_words(
        "--device=cpu --backend=gloo --compile=False --dtype=float32 --dataset=tiny --n_layer=2 "
        "--n_head=2 --n_embd=64 --block_size=64 --batch_size=8 --gradient_accumulation_steps=8 "
        "--max_iters=39 --lr_decay_iters=39 --warmup_iters=2 --eval_interval=20 --eval_iters=4"
    ),
    faults=_WITHOUT_LOADER,
    note="Loading is a function of the script and counts as other; what GradScaler does counts as optimizer.",
)
_MINGPT = Row(
    name="mingpt-ddp",
    title="pytorch/examples: minGPT-ddp `main.py`",
    source=EXAMPLES,
    folder="distributed/minGPT-ddp/mingpt",
    program="main.py",
    edits="mingpt-ddp",
    arguments=_words(
        "data_config.path=data/input.txt data_config.truncate=0.0013 data_config.block_size=32 "
        "gpt_config.n_layer=2 gpt_config.n_head=2 gpt_config.n_embd=64 trainer_config.max_epochs=1 "
        "trainer_config.batch_size=8 trainer_config.data_loader_workers=0 trainer_config.save_every=1 "
        "trainer_config.use_amp=False"
    ),
    packages=("hydra-core",),
)


def _ddp_series(name: str, program: str, *, launches_itself: bool = False) -> Row:
    return Row(
        name=name,
        title=f"pytorch/examples: ddp-tutorial-series `{program}`{' (mp.spawn)' if launches_itself else ''}",
        source=EXAMPLES,
        folder="distributed/ddp-tutorial-series",
        program=program,
        edits=name,
        arguments=("3", "2"),
        launches_itself=launches_itself,
    )


def _made_in_loop(name: str, folder: str, program: str, *, shares_batches: bool) -> Row:
    note = "The script makes its data in the loop, where no loader can be seen."
    if program == "fsdp_tp_example.py":
        note += " On CPUs its attention needs local tensors (`llama2_model.py:223`)."
    return Row(
        name=name,
        title=f"pytorch/examples: {folder} `{program}`",
        source=EXAMPLES,
        folder=f"distributed/{folder}",
        program=program,
        edits=name,
        shares_batches=shares_batches,
        faults=_WITHOUT_LOADER,
        note=note,
    )


_IMAGENET = Row(
    name="imagenet",
    title="pytorch/examples: imagenet `main.py`",
    source=EXAMPLES,
    folder="imagenet",
    program="main.py",
    edits="imagenet",
    arguments=_words(
        "--dummy --dist-backend=gloo --dist-url=env:// --seed=0 --epochs=1 --batch-size=8 --workers=0 "
        "--no-accel --arch=mobilenet_v3_small"
    ),
    packages=("torchvision",),
)
_TORCHTITAN = Row(
    name="torchtitan",
    title="torchtitan `torchtitan.train`, Llama 3 with FSDP2",
    source=TORCHTITAN,
    parts=("torchtitan", "tests/assets/tokenizer"),
    program="torchtitan.train",
    edits="torchtitan",
    arguments=_words(
        "--job.config_file=torchtitan/models/llama3/train_configs/debug_model.toml --training.steps=40 "
        "--training.seq_len=64 --training.local_batch_size=2 --debug.seed=0"
    ),
    packages=("triton", "datasets", "torchdata"),
    note=(
        "It insists on CUDA, first at `train.py:90` (`set_device`), because `tools/utils.py:37` falls back to it. On "
        "CPUs the monitor of device memory (`components/metrics.py:45`) and a barrier's device "
        "(`distributed/utils.py:386`) fail as well, and gloo cannot reduce with the factor of "
        "`models/llama3/infra/parallelize.py:284`. `experiments/attach/edits.toml` changes these lines. "
        "`models/moe/kernels.py:8` needs triton."
    ),
)
_HUGGING_FACE = ("accelerate", "datasets", "transformers")


def _no_trainer(name: str, folder: str, program: str, arguments: str, *packages: str) -> Row:
    return Row(
        name=name,
        title=f"transformers examples: `{program}` (Accelerate)",
        source=TRANSFORMERS,
        folder=f"examples/pytorch/{folder}",
        program=program,
        edits=name,
        arguments=_words(f"{arguments} --max_train_steps=30 --seed=0 --output_dir=saved --checkpointing_steps=20"),
        num_ranks=2,
        packages=(*_HUGGING_FACE, *packages),
    )


_CLM = _no_trainer(
    "clm",
    "language-modeling",
    "run_clm_no_trainer.py",
    "--train_file=tests/assets/c4_test/data.json --validation_file=tests/assets/c4_test/data.json --block_size=32 "
    "--config_name=data/tiny/gpt2 --tokenizer_name=data/tiny/gpt2 --per_device_train_batch_size=4",
)
_IMAGE = _no_trainer(
    "image",
    "image-classification",
    "run_image_classification_no_trainer.py",
    "--train_dir=data/tiny/pictures --model_name_or_path=data/tiny/vit --per_device_train_batch_size=4",
    "torchvision",
)
_DIFFUSION = Row(
    name="diffusion",
    title="diffusers: `train_unconditional.py`, with EMA",
    source=DIFFUSERS,
    folder="examples/unconditional_image_generation",
    program="train_unconditional.py",
    edits="diffusion",
    arguments=_words(
        "--train_data_dir=data/tiny/pictures --model_config_name_or_path=data/tiny/unet --resolution=32 --use_ema "
        "--train_batch_size=4 --num_epochs=2 --eval_batch_size=1 --ddpm_num_inference_steps=3 --output_dir=saved "
        "--checkpointing_steps=15"
    ),
    num_ranks=2,
    packages=("accelerate", "datasets", "diffusers", "torchvision"),
)
_RPC = Row(
    name="ddp-rpc",
    title="pytorch/examples: rpc/ddp_rpc `main.py`, two trainers with DDP, a master and a parameter server",
    source=EXAMPLES,
    folder="distributed/rpc/ddp_rpc",
    program="main.py",
    edits="ddp-rpc",
    num_ranks=2,
    launches_itself=True,
    faults=_WITHOUT_LOADER,
    note=(
        "Master and parameter server make no process group, and are not recorded. The trainers update the parameter "
        "server in any order: losses differ without tracing, too. Batches are seen from the second step on."
    ),
    is_repeatable=False,
)
_LITGPT = Row(
    name="litgpt",
    title="litgpt `pretrain` (Fabric's launcher, torch.compile, litdata)",
    source=LITGPT,
    parts=("litgpt",),
    program="litgpt",
    edits="litgpt",
    arguments=_words(
        "pretrain pythia-14m --precision 32-true --devices 2 --data TextFiles --data.train_data_path data/tiny "
        "--data.num_workers 0 --tokenizer_dir data/tiny --logger_name csv --train.global_batch_size 8 "
        "--train.micro_batch_size 2 --train.max_tokens 20480 --train.lr_warmup_steps 2 --eval.interval 20 "
        "--eval.max_iters 4"
    ),
    num_ranks=2,
    launches_itself=True,
    packages=("lightning", "litdata"),
    note="Fabric refuses FSDP without a GPU (`lightning/fabric/connector.py:436`), so DDP takes its place.",
)
_TORCHTUNE = Row(
    name="torchtune",
    title="torchtune `full_finetune_distributed`, Llama 3.2 with FSDP2, accumulating over 2 microbatches",
    source=TORCHTUNE,
    parts=("torchtune", "recipes", "tests/assets/m.model"),
    program="recipes.full_finetune_distributed",
    edits="torchtune",
    arguments=_words(
        "--config recipes/configs/llama3_2/1B_full.yaml device=cpu dtype=fp32 seed=0 epochs=2 max_steps_per_epoch=20 "
        "batch_size=2 gradient_accumulation_steps=2 optimizer.fused=False output_dir=out "
        "tokenizer._component_=torchtune.models.llama2.llama2_tokenizer tokenizer.path=tests/assets/m.model "
        "tokenizer.max_seq_len=64 dataset._component_=torchtune.datasets.text_completion_dataset dataset.source=json "
        "dataset.column=text dataset.split=train dataset.data_files=tests/assets/c4_test/data.json "
        "model._component_=torchtune.models.llama3_2.llama3_2 model.vocab_size=2000 model.num_layers=2 "
        "model.num_heads=4 model.num_kv_heads=4 model.embed_dim=64 model.max_seq_len=64 "
        "model.intermediate_dim=128 model.tie_word_embeddings=False"
    ),
    num_ranks=2,
    packages=("torchao", "torchdata", "datasets"),
)
_OPEN_CLIP = Row(
    name="open-clip",
    title="open_clip `open_clip_train.main`, DDP, accumulating over 2 batches",
    source=OPEN_CLIP,
    folder="src",
    program="open_clip_train.main",
    edits="open-clip",
    arguments=_words(
        "--dataset-type synthetic --train-num-samples 1280 --batch-size 8 --accum-freq 2 --epochs 1 --workers 0 "
        "--model ViT-S-32-alt --device cpu --precision fp32 --lr 1e-3 --warmup 2 --seed 0"
    ),
    num_ranks=2,
    packages=("torchvision", "timm"),
)
_CIFAR = Row(
    name="deepspeed-cifar",
    title="DeepSpeedExamples: cifar `cifar10_deepspeed.py`, ZeRO-1",
    source=DEEPSPEED_EXAMPLES,
    folder="training/cifar",
    program="cifar10_deepspeed.py",
    edits="deepspeed-cifar",
    arguments=_words("--epochs 1 --dtype fp32 --stage 1"),
    num_ranks=2,
    packages=("deepspeed", "torchvision"),
)
_DEEPSPEED_PIPELINE = Row(
    name="deepspeed-pipeline",
    title="DeepSpeedExamples: pipeline_parallelism `train.py`, 2 stages, 4 microbatches",
    source=DEEPSPEED_EXAMPLES,
    folder="training/pipeline_parallelism",
    program="train.py",
    edits="deepspeed-pipeline",
    arguments=_words("--steps 40 --pipeline-parallel-size 2 --backend gloo --deepspeed_config ds_config.json"),
    num_ranks=2,
    shares_batches=True,
    packages=("deepspeed", "torchvision"),
)
_COLOSSALAI = Row(
    name="colossalai",
    title="ColossalAI: gpt `gemini/train_gpt_demo.py`, GPT-2, ZeRO-1, recomputing activations",
    source=COLOSSALAI,
    parts=("colossalai", "extensions", "examples/language/gpt/gemini", "examples/language/performance_evaluator.py"),
    program="examples.language.gpt.gemini.train_gpt_demo",
    edits="colossalai",
    arguments=_words("--distplan CAI_ZeRO1 --train_step 40"),
    is_profiled=False,
    num_ranks=2,
    packages=("transformers",),
    faults=_WITHOUT_LOADER,
    note=(
        "The script makes its data in the loop, where no loader can be seen. `LowLevelZeroPlugin` insists on a GPU "
        "(`colossalai/zero/low_level/low_level_optim.py:254`) and its streams (`:347`), which `edits.toml` changes; "
        "`HybridAdam` compiles an optimizer, so torch's takes its place. `GeminiPlugin` was not tried."
    ),
)
_NANOTRON = Row(
    name="nanotron",
    title="nanotron `run_train.py`",
    source=NANOTRON,
    program="run_train.py",
    refused=(
        "It ends without CUDA (`src/nanotron/distributed.py:264`). All of its models need flash-attn, which needs CUDA "
        "(`trainer.py:65` imports `models/llama.py:20`, and `qwen.py:4`), and its gradients, parameters and batches "
        "are on the device `cuda` by name (`optim/gradient_accumulator.py:95`, `models/base.py:192`, "
        "`data/dataloader.py:58`, and some thirty more)."
    ),
)
ROWS: tuple[Row, ...] = (
    *_OWN,
    _NANOGPT,
    _MINGPT,
    _ddp_series("ddp-torchrun", "multigpu_torchrun.py"),
    _ddp_series("ddp-spawn", "multigpu.py", launches_itself=True),
    _made_in_loop("examples-fsdp2", "FSDP2", "example.py", shares_batches=False),
    _made_in_loop("examples-tp", "tensor_parallelism", "tensor_parallel_example.py", shares_batches=True),
    _made_in_loop("examples-fsdp-tp", "tensor_parallelism", "fsdp_tp_example.py", shares_batches=True),
    _IMAGENET,
    _TORCHTITAN,
    _CLM,
    _IMAGE,
    _DIFFUSION,
    _RPC,
    _LITGPT,
    _TORCHTUNE,
    _OPEN_CLIP,
    _COLOSSALAI,
    _CIFAR,
    _DEEPSPEED_PIPELINE,
    _NANOTRON,
)
