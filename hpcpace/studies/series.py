"""Runs all open runs of one layout, one after the other, in the ranks of one job.

Loading Python and torch takes longer than a short run, so they are loaded once. Each run is what `hpcpace train` would
have left: its own process group, traces, result and peak memory.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

from hpcpace.core.config import Config
from hpcpace.core.environment import RankInfo, host_identity, process_environ, rank_info, set_environ_default
from hpcpace.core.errors import WorldError
from hpcpace.core.settings import REQUESTED, load_config
from hpcpace.core.text import format_count, format_duration
from hpcpace.studies.setups import Layout, StudyFolder, StudyRun, planned
from hpcpace.train.data import TrainingData, open_data
from hpcpace.train.plan import TrainPlan, threads_of_rank
from hpcpace.train.settings import TrainConfig
from hpcpace.world.mpi import abort_guard, locate_ranks, mpi_world
from hpcpace.world.settings import WorldConfig

_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Linux, Documentation/filesystems/proc.rst: resets VmHWM of the process to its present size."""


def run_series(study: StudyFolder, layout: Layout) -> int:
    """Run all open runs of a layout and return 0, or 1 if a signal ended it early.

    Collective: every rank of the job calls this, in its main thread, before torch is loaded.

    Args:
        study: with a plan.
        layout: that of the job.

    Raises:
        SystemExit: a run failed, or the job has another layout; the study goes on with the next job.
    """
    environ = process_environ()
    info = rank_info(environ)
    with abort_guard(None, info, errors_alike=True):
        config = load_config(environ=environ, requested=REQUESTED)
        comm = mpi_world(info, timeout_s=config.of(WorldConfig).start_timeout_s)
    with abort_guard(comm, info):
        if comm is not None:
            info, _ = locate_ranks(info, comm, host_identity())
        _check_layout(info, layout)
        set_environ_default("OMP_NUM_THREADS", str(threads_of_rank(max(info.local_size, 1))))
        return _Series(study, config, info, comm).run(layout)


def _check_layout(info: RankInfo, layout: Layout) -> None:
    """Refuse a job whose servers or ranks differ from the layout."""
    if info.world_size == 1 and layout.num_ranks == 1:
        return
    found = Layout(servers=info.num_nodes, ranks_per_server=info.local_size)
    if found != layout or info.world_size != layout.num_ranks:
        raise WorldError(
            f"{info.world_size} ranks on {info.num_nodes} hosts are not layout {layout}: give "
            f"--nodes {layout.servers} --ntasks-per-node {layout.ranks_per_server}"
        )


class _Series:
    """The runs of one job and their progress."""

    def __init__(self, study: StudyFolder, config: Config, info: RankInfo, comm: Any) -> None:
        self._study, self._config, self._info, self._comm = study, config, info, comm
        self._data: dict[tuple[str, int, int], TrainingData] = {}
        self._begin_ns = time.monotonic_ns()
        self._can_reset = True

    def run(self, layout: Layout) -> int:
        """Run what is open when this begins; rank 0 decides which runs."""
        from hpcpace.train.loop import train

        todo = self._study.open_runs(layout) if self._info.rank == 0 else None
        total = len(self._study.runs()) if self._info.rank == 0 else 0
        if self._comm is not None:
            todo = self._comm.bcast(todo)
        assert todo is not None
        for number, run in enumerate(todo, start=1):
            self._reset_peak_memory()
            result = train(self._job(run))
            if result.stopped_by:
                return 1
            num_open = len(self._study.open_runs()) if self._info.rank == 0 else 0
            rate = f"{format_count(result.samples_per_s)} {result.samples_unit}/s"
            self._tell(f"[{total - num_open}/{total}] {run.name}: {rate}; {self._left(number, len(todo), layout)}")
        return 0

    def _job(self, run: StudyRun) -> Any:
        from hpcpace.train.loop import TrainJob

        plan = planned(run.setup, self._config.of(TrainConfig))
        return TrainJob(
            plan=plan,
            config=self._config.updated(train=vars(plan.settings), trace={"summary": False}),
            info=self._info,
            comm=self._comm,
            data=self._data_of(plan),
            run_dir=self._study.run_dir(run).path,
            progress="off",
        )

    def _data_of(self, plan: TrainPlan) -> TrainingData:
        """Return the data of a plan, opened once for all runs that read the same."""
        key = (plan.settings.model, plan.seq_len, plan.settings.eval_every and plan.settings.batch_size)
        if key not in self._data:
            self._data[key] = open_data(plan)
        return self._data[key]

    def _reset_peak_memory(self) -> None:
        """Reset peak memory, so that the next run measures only its own."""
        import torch

        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError as error:
            if self._can_reset:
                self._tell(f"warning: peak memory of a process is that of all runs so far: {_CLEAR_REFS}: {error}")
            self._can_reset = False

    def _left(self, number: int, total: int, layout: Layout) -> str:
        elapsed_ns = time.monotonic_ns() - self._begin_ns
        left_ns = elapsed_ns * (total - number) // number
        left = f"about {format_duration(left_ns)} left" if left_ns else "done"
        return f"layout {layout}: {number} of {total}, {left}"

    def _tell(self, line: str) -> None:
        if self._info.rank == 0:
            print(line, file=sys.stderr, flush=True)
