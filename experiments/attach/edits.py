"""What is changed in public scripts: sizes and devices, so that they run on CPUs, and calls of the witness.

Each edit is one substitution of a short text, which must be in the pinned file exactly once. Seeds are set where a
script sets none, because two of its runs would not have the same losses otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

_IMPORT = "from experiments.attach.witness import Slow, Witness, hold\n"
_TORCHVISION_OPERATORS = '("nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")'


@dataclass(frozen=True)
class Edit:
    """One substitution in a file of a public repository; the old text must be there exactly once."""

    path: str
    old: str
    new: str


def after(path: str, text: str, added: str) -> Edit:
    """Return an edit that adds something after a text."""
    return Edit(path, text, text + added)


def before(path: str, text: str, added: str) -> Edit:
    """Return an edit that adds something before a text."""
    return Edit(path, text, added + text)


def drop(path: str, text: str) -> Edit:
    """Return an edit that takes a text away."""
    return Edit(path, text, "")


TORCHRUN, SPAWN = "multigpu_torchrun.py", "multigpu.py"
TENSOR_PARALLEL = "tensor_parallel_example.py"
FSDP_TP, LLAMA2 = "fsdp_tp_example.py", "llama2_model.py"
_TITAN = "torchtitan"
_METRICS = f"{_TITAN}/components/metrics.py"
_DEBUG_MODEL = '"debugmodel": TransformerModelArgs(\n        dim=256, n_layers=6'


def _ddp_series(path: str) -> tuple[Edit, ...]:
    layer = "torch.nn.Linear(20, 1)"
    return (
        before(path, "import torch\nimport torch.nn.f", _IMPORT),
        Edit(path, '"nccl"', '"gloo"'),
        drop(path, "            source = source.to(self.gpu_id)\n"),
        drop(path, "            targets = targets.to(self.gpu_id)\n"),
        Edit(path, f"model = {layer}", f"model = torch.nn.Sequential(Slow(), {layer})"),
        before(path, "    train_set = My", "    torch.manual_seed(0)\n"),
        after(path, "        self.optimizer.step()\n", "        self.witness.step(output, len(source))\n"),
        after(path, "    ) -> None:\n", "        self.witness = witness\n"),
        before("datautils.py", "import torch\n", _IMPORT),
        before("datautils.py", "        return self.data[", '        hold("data", parts=32)\n'),
    )


DDP_TORCHRUN = (
    *_ddp_series(TORCHRUN),
    drop(TORCHRUN, '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n'),
    Edit(TORCHRUN, "model.to(self.gpu_id)", "model"),
    Edit(TORCHRUN, "DDP(self.model, device_ids=[self.gpu_id])", "DDP(self.model)"),
    before(TORCHRUN, "    ddp_setup()\n", "    global witness\n    witness = Witness()\n"),
)
DDP_SPAWN = (
    *_ddp_series(SPAWN),
    drop(SPAWN, "    torch.cuda.set_device(rank)\n"),
    Edit(SPAWN, '"12355"', 'os.environ["ATTACH_PORT"]'),
    Edit(SPAWN, "model.to(gpu_id)", "model"),
    Edit(SPAWN, "DDP(model, device_ids=[gpu_id])", "DDP(model)"),
    before(SPAWN, "    ddp_setup(rank, ", "    global witness\n    witness = Witness(rank)\n"),
    Edit(SPAWN, "torch.cuda.device_count()", "4"),
)
FSDP2 = (
    after("example.py", "import argparse\n", _IMPORT),
    Edit("example.py", "    if not verify_min", "    if False and not verify_min"),
    Edit("example.py", "backend=backend, device_id=device", "backend=backend"),
    before("example.py", '    rank = int(os.environ["LOCAL_RANK"])', "    witness = Witness()\n"),
    Edit("example.py", "range(10)", "range(40)"),
    Edit("example.py", "n_layers=10", "n_layers=2"),
    after("example.py", "        optim.zero_grad()\n", "        witness.step(loss, batch_size)\n"),
    before("model.py", "import torch\n", _IMPORT),
    before("model.py", "        _bsz, seq_len = tokens.size()\n", '        hold("compute")\n'),
)


EXAMPLES_TP = (
    after(TENSOR_PARALLEL, "import os\nimport sys\n", _IMPORT),
    Edit(TENSOR_PARALLEL, "if not verify_min", "if False and not verify_min"),
    Edit(TENSOR_PARALLEL, "torch.accelerator.current_accelerator().type", '"cpu"'),
    after(TENSOR_PARALLEL, "logger = get_logger()\n", "witness = Witness()\ntorch.manual_seed(0)\n"),
    after(TENSOR_PARALLEL, "    optimizer.step()\n", "    witness.step(output, len(inp))\n"),
    Edit(TENSOR_PARALLEL, "num_iters = 10", "num_iters = 40"),
    before(TENSOR_PARALLEL, "        return self.out_proj(", '        hold("compute")\n'),
)
EXAMPLES_FSDP_TP = (
    after(FSDP_TP, "import sys\nimport os\n", _IMPORT),
    Edit(FSDP_TP, "if not verify_min", "if False and not verify_min"),
    Edit(FSDP_TP, "torch.accelerator.current_accelerator().type", '"cpu"'),
    after(FSDP_TP, "logger = get_logger()\n", "witness = Witness()\ntorch.manual_seed(0)\n"),
    Edit(FSDP_TP, "vocab_size=32000", "vocab_size=1000"),
    Edit(FSDP_TP, "torch.randint(32000, (8, 256)", "torch.randint(1000, (8, 32)"),
    Edit(FSDP_TP, "num_iterations = 10", "num_iterations = 40"),
    after(FSDP_TP, "    optimizer.step()\n", "    witness.step(output, len(inp))\n"),
    # DTensor has no rule for the attention that torch chooses on CPUs. Heads are apart, so each rank attends by itself.
    Edit(
        LLAMA2,
        "scaled_dot_product_attention(xq, xk, xv, ",
        "scaled_dot_product_attention(xq.to_local(), xk.to_local(), xv.to_local(), ",
    ),
    before(LLAMA2, "import torch\nimport torch.nn.functional", _IMPORT),
    before(LLAMA2, "        h = self.tok_embeddings(tokens)", '        hold("compute")\n'),
)
MINGPT_DDP = (
    after("main.py", "import os\nimport sys\n", _IMPORT),
    Edit("main.py", "    if not verify_min", "    if False and not verify_min"),
    Edit("main.py", 'torch.device(f"{acc}:{rank}")', 'torch.device("cpu")'),
    Edit("main.py", "    torch.accelerator.set_device_index(rank)\n", "    torch.manual_seed(0)\n"),
    before("main.py", "    ddp_setup()\n", "    witness = Witness()\n"),
    before("main.py", "    trainer.train()\n", "    trainer.witness = witness\n"),
    Edit("trainer.py", 'torch.device(f"{self.acc}:{self.local_rank}")', 'torch.device("cpu")'),
    Edit("trainer.py", "model.to(self.local_rank)", "model"),
    Edit("trainer.py", ", device_ids=[self.local_rank])", ")"),
    drop("trainer.py", "            source = source.to(self.local_rank)\n"),
    drop("trainer.py", "            targets = targets.to(self.local_rank)\n"),
    before(
        "trainer.py",
        "        \n        return loss.item()\n",
        "\n        if train:\n            self.witness.step(loss, len(source))\n",
    ),
    after("char_dataset.py", "import torch\n", _IMPORT),
    before("char_dataset.py", "        chunk = ", '        hold("data", parts=8)\n'),
    after("model.py", "import torch\n", _IMPORT),
    before("model.py", "        x = self.emb_stem(idx)\n", '        hold("compute")\n'),
)
NANOGPT = (
    after("train.py", "import os\nimport time\n", _IMPORT),
    drop("train.py", "    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n"),
    Edit("train.py", ", device_ids=[ddp_local_rank])", ")"),
    before("train.py", "# various inits,", "witness = Witness()\n"),
    before("train.py", "    ix = torch.randint(", '    hold("data", parts=2)\n'),
    before(
        "train.py",
        "    # timing and logging\n",
        "    witness.step(loss, gradient_accumulation_steps * batch_size)\n",
    ),
    before("model.py", "import torch\n", _IMPORT),
    before("model.py", "        device = idx.device\n        b, t", '        hold("compute", parts=2)\n'),
)
TORCHTITAN = (
    Edit(f"{_TITAN}/tools/utils.py", 'or "cuda"', 'or "cpu"'),
    # torch.cpu has no name, size and statistics of a device's memory.
    Edit(_METRICS, "device_module.get_device_name(self.device)", '"cpu"'),
    Edit(_METRICS, "device_module.current_device()", "0"),
    Edit(_METRICS, "device_module.get_device_properties(\n            self.device\n        ).total_memory", "1"),
    drop(_METRICS, "        device_module.reset_peak_memory_stats()\n        device_module.empty_cache()\n"),
    Edit(_METRICS, "device_module.memory_stats(self.device)", "{}"),
    Edit(_METRICS, "self):\n        device_module.reset_peak_memory_stats()\n", "self):\n        pass\n"),
    drop(f"{_TITAN}/distributed/utils.py", "device_ids=[device_module.current_device()]"),
    # gloo cannot multiply before it adds.
    after(
        f"{_TITAN}/models/llama3/infra/parallelize.py",
        "            module.set_gradient_divide_factor(1.0)\n",
        "            module.set_force_sum_reduction_for_comms(True)\n",
    ),
    Edit(f"{_TITAN}/models/llama3/__init__.py", _DEBUG_MODEL, _DEBUG_MODEL[:-1] + "2"),
    before(f"{_TITAN}/train.py", "import torch\nimport torch.distributed", _IMPORT),
    before(f"{_TITAN}/train.py", "        device_module, device_type = utils.", "        self.witness = Witness()\n"),
    after(
        f"{_TITAN}/train.py",
        "        loss = torch.sum(torch.stack(accumulated_losses))\n",
        "        self.witness.step(loss, len(labels))\n",
    ),
    before(f"{_TITAN}/models/llama3/model/model.py", "import torch\n", _IMPORT),
    before(
        f"{_TITAN}/models/llama3/model/model.py",
        "        # passthrough for nonexistent layers,",
        '        hold("compute")\n',
    ),
    before(f"{_TITAN}/hf_datasets/text_datasets.py", "import torch\n", _IMPORT),
    before(
        f"{_TITAN}/hf_datasets/text_datasets.py",
        '                    yield {"input": input}, label\n',
        '                    hold("data", parts=2)\n',
    ),
)
IMAGENET = (
    before("main.py", "import torch\n", _IMPORT),
    # PyPI has no torchvision for a torch without CUDA: its operators, of which the example needs none, do not load.
    before(
        "main.py",
        "import torchvision.datasets",
        f"for name in {_TORCHVISION_OPERATORS}:\n"
        '    torch.library.define(f"torchvision::{name}", "(Tensor x) -> Tensor")\n',
    ),
    after("main.py", "def main():\n", "    global witness\n    witness = Witness()\n"),
    Edit(
        "main.py",
        "        print('using CPU, this will be slow')\n",
        "        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(Slow(), model))\n",
    ),
    Edit("main.py", "datasets.FakeData(1281167, (3, 224, 224), 1000,", "Slowly(1280, (3, 32, 32), 10,"),
    Edit("main.py", "datasets.FakeData(50000, (3, 224, 224), 1000,", "Slowly(64, (3, 32, 32), 10,"),
    after(
        "main.py",
        "best_acc1 = 0\n\n",
        "class Slowly(datasets.FakeData):\n"
        "    def __getitem__(self, index):\n"
        '        hold("data", parts=8)\n'
        "        return super().__getitem__(index)\n\n",
    ),
    after("main.py", "        optimizer.step()\n", "        witness.step(loss, len(images))\n"),
)
