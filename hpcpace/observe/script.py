"""A session around an unchanged script: it starts once the ranks are connected and ends before they disconnect."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpcpace.errors import DataError, WorldError
from hpcpace.observe.session import session
from hpcpace.world.environment import process_environ, rank_info

# If a launcher of several ranks has set any of these, the script will connect them.
_LAUNCHED = frozenset(("RANK", "WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))


def run_script(
    script: Path,
    arguments: Sequence[str],
    *,
    config_file: Path | None,
    pace: str | None,
    run_dir: Path | None,
    warmup_steps: int,
    samples_unit: str,
) -> None:
    """Run a Python script as `python SCRIPT ARGUMENTS` would, traced.

    Raises:
        DataError: the script does not exist.
        BaseException: whatever the script raises.
    """
    if not script.is_file():
        raise DataError(f"no script at {script}: give the training script, then its arguments")
    try:
        connects = rank_info(process_environ()).world_size > 1
    except WorldError:
        # The session warns why this rank cannot record, and tells the other ranks if the script connects it to them.
        connects = not _LAUNCHED.isdisjoint(process_environ())
    with ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(
                session(
                    name=script.stem,
                    run_dir=run_dir,
                    config_file=config_file,
                    pace=pace,
                    samples_unit=samples_unit,
                    warmup_steps=warmup_steps,
                    record={"script": str(script), "arguments": list(arguments)},
                    step_per_optimizer=True,
                )
            )

        if connects:
            _between_init_and_destroy(begin, stack)
        else:
            begin()
        _take_place_of_command(script, arguments)
        runpy.run_path(str(script), run_name="__main__")


def _take_place_of_command(script: Path, arguments: Sequence[str]) -> None:
    """Give the script the arguments and the search path for modules that `python SCRIPT ARGUMENTS` gives it."""
    folder_of_command = str(Path(sys.argv[0]).resolve().parent)
    if sys.path[:1] == [folder_of_command]:
        del sys.path[0]
    # -P may be meant for hpcpace alone; the variable is meant for every Python.
    if not process_environ().get("PYTHONSAFEPATH"):
        sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [str(script), *arguments]


def _between_init_and_destroy(begin: Any, stack: ExitStack) -> None:
    initialise, destroy = dist.init_process_group, dist.destroy_process_group

    @wraps(initialise)
    def traced_initialise(*args: Any, **kwargs: Any) -> Any:
        result = initialise(*args, **kwargs)
        dist.init_process_group = initialise
        begin()
        return result

    @wraps(destroy)
    def traced_destroy(group: Any = None) -> Any:
        if group is None or group == dist.group.WORLD:
            dist.destroy_process_group = destroy
            stack.close()
        return destroy(group)

    dist.init_process_group = traced_initialise
    dist.destroy_process_group = traced_destroy
