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
NANOGPT = Source(repository="karpathy/nanoGPT", commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row.

    Attributes:
        name: for --only.
        title: in the document.
        program: file in programs/, or in the source's folder; a module of it where it has no `.py`.
        arguments: of the program.
        launches_itself: whether it starts its ranks; torchrun does otherwise.
        shares_batches: whether ranks compute on the same samples, of which hpcpace then makes no guess.
        source, folder, edits: the public script, and a key of edits.toml; None for a program of this experiment.
        parts: what of the repository is laid out, where that is not its folder.
        packages: distributions whose version counts.
        faults: those that the script has a place for.
        note: what a reader must know.
    """

    name: str
    title: str
    program: str
    arguments: tuple[str, ...] = ()
    launches_itself: bool = False
    shares_batches: bool = False
    source: Source | None = None
    folder: str = ""
    parts: tuple[str, ...] = ()
    edits: str = ""
    packages: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = FAULTS
    note: str = ""

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
)
