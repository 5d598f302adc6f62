"""The mesh and the batch of a training over all tasks of a job, where the user asks for none."""

from __future__ import annotations

from collections.abc import Mapping

LAYOUTS = ("data", "pipeline", "tensor", "zero")
# Sequences or images of a task in each step; four sequences divide into four microbatches on every mesh.
_SAMPLES_PER_TASK = {"gpt2": 4, "resnet18": 32}


def training_options(layout: str, workload: str, num_tasks: int, environ: Mapping[str, str]) -> list[str]:
    """Return the options of `hpcpace train WORKLOAD` for a layout; those of the user, behind them, win.

    Args:
        layout: `data`, `pipeline` (two stages; as many as tasks if their number is odd), `tensor` (four slices, or two,
            or none, whichever divides the number of tasks) or `zero` (data, with everything sharded).
        workload: `gpt2` or `resnet18`.
        num_tasks: number of ranks.
        environ: environment; HPCPACE_TRAIN_MESH, _BATCH_SIZE and _ZERO replace what is chosen here.
    """
    stages = (num_tasks if num_tasks % 2 else 2) if layout == "pipeline" else 1
    slices = next(n for n in (4, 2, 1) if num_tasks % n == 0) if layout == "tensor" else 1
    mesh = f"dp={num_tasks // (stages * slices)},pp={stages},tp={slices}"
    batch_size = _SAMPLES_PER_TASK.get(workload, 1) * num_tasks
    options = ["--mesh", environ.get("HPCPACE_TRAIN_MESH") or mesh]
    options += ["--batch-size", environ.get("HPCPACE_TRAIN_BATCH_SIZE") or str(batch_size)]
    if layout == "zero":
        # A single task has nothing to shard.
        options += ["--zero", environ.get("HPCPACE_TRAIN_ZERO") or ("3" if num_tasks > 1 else "0")]
    return options
