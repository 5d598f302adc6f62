"""What a layout of a training job would cost: step time, memory and network volume, predicted before it runs.

`model` has what is trained, `machine` where, `layouts` how it is shared out, `engine` and `steps` the step, `schedule`
its pipeline, `of_run` what a traced run shows, and `answer` the choice.
"""

CHANGES = (
    "nodes", "layout", "precision", "checkpointing", "compression", "local-sgd", "network", "memory", "hierarchical",
)  # fmt: skip
"""Kinds of changes to a job that a plan can try."""
