"""What one rank tells the centre of its job, where settings ask for that: a file of metrics, a line in its comment."""

from __future__ import annotations

from collections.abc import Callable

from hpcpace import __version__
from hpcpace.config import MetricsConfig
from hpcpace.core.environment import RankInfo, process_redaction
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import format_duration, plural, shell_word
from hpcpace.observe.job_comment import add_to_comment
from hpcpace.observe.metrics_file import MetricsFile, Reading, StepTally, metrics_path
from hpcpace.observe.recording import Recording


class Telling:
    """Tells of one rank's steps until it is closed; what fails is a warning.

    Args:
        config: what is asked for.
        world: this rank's place.
        host: its host.
        attempt: the folder of this attempt.
        recording: what records this rank.
        warn: takes a warning.
    """

    def __init__(
        self,
        config: MetricsConfig,
        *,
        world: RankInfo,
        host: str,
        attempt: Attempt,
        recording: Recording,
        warn: Callable[[str], None],
    ) -> None:
        self._recording, self._warn = recording, warn
        self._run = attempt.path.parent
        self._job_id = world.job_id if config.job_comment and world.rank == 0 else ""
        self._tally = StepTally()
        self._file: MetricsFile | None = None
        tells = world.rank == 0 if config.ranks == "first" else world.local_rank <= 0
        if config.prometheus is not None and tells:
            redaction = process_redaction()
            run, name = redaction.text(str(self._run)), redaction.text(self._run.name)
            labels = {"jobid": world.job_id or name, "step": world.step_id, "node": host}
            self._file = MetricsFile(
                metrics_path(config.prometheus, labels, world.rank),
                labels=labels,
                info={"run": run, "name": name, "hpcpace_version": __version__},
                tally=self._tally,
                reading=self._reading,
                interval_s=config.interval_s,
                warn=warn,
            )

    def start(self) -> None:
        """Begin to tell."""
        if self._file is not None:
            self._file.start()

    def end_step(self, begin_ns: int, end_ns: int, samples: int) -> None:
        """Take a step."""
        self._tally.add(begin_ns, end_ns, samples)

    def close(self) -> None:
        """End the metrics, and say in the job's comment what was recorded."""
        if self._file is not None:
            self._file.close()
        if not self._job_id:
            return
        problem = add_to_comment(self._job_id, self.line())
        if problem:
            self._warn(f"the comment of job {self._job_id} stays as it is ({problem})")

    def line(self) -> str:
        """Return what the job's comment gets."""
        tally, dropped = self._tally, self._recording.recorder.num_dropped
        mean = f" of {format_duration(tally.total_ns / tally.num_steps)}" if tally.num_steps else ""
        lost = f", {plural(dropped, 'row')} dropped" if dropped else ""
        # Others see comments of jobs.
        run = shell_word(process_redaction().text(str(self._run)))
        return f"hpcpace: {plural(tally.num_steps, 'step')}{mean}{lost}, see hpcpace report {run}"

    def _reading(self) -> Reading:
        recorder = self._recording.recorder
        return Reading(
            num_dropped=recorder.num_dropped, cost_ns=recorder.cost_ns, halfwidth_ns=self._recording.halfwidth_ns
        )
