"""A rank that has joined the other ranks of its session: what they agree on before they record."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpcpace import __version__
from hpcpace.config import Config
from hpcpace.core.environment import HostIdentity, RankInfo
from hpcpace.core.files import other_writers
from hpcpace.core.rundir import Attempt, RunDirectory, default_run_path
from hpcpace.observe.coordination import Coordinator
from hpcpace.observe.cores import usable_cpus
from hpcpace.observe.network import find_network_counters
from hpcpace.observe.record import run_record
from hpcpace.observe.session_settings import SessionSettings
from hpcpace.trace.schema import TraceHeader
from hpcpace.world.clock import ClockSync
from hpcpace.world.deadline import Deadline, in_time


@dataclass(frozen=True, kw_only=True)
class JoinedRank:
    """A rank in a job of which all ranks take part in the session.

    Attributes:
        settings: of the session.
        config: the configuration that applies.
        coordinator: to the other ranks.
        identity: of this host.
        host_keys: of all ranks, in order; equal on ranks of one host.
        world: this rank's place.
        deadline: by when the session must have started.
    """

    settings: SessionSettings
    config: Config
    coordinator: Coordinator
    identity: HostIdentity
    host_keys: list[str]
    world: RankInfo
    deadline: Deadline

    def make_attempt(self, warn: Callable[[str], None]) -> Attempt | None:
        """Let rank 0 make the folder of this attempt; return it on all ranks, or None if that failed.

        Collective: every rank calls this.
        """
        hosts = self.coordinator.allgather(
            {"rank": self.world.rank, "host": self.world.host, "node": self.world.node}, self.deadline.left_s
        )
        made = {"path": "", "problem": ""}
        writers = ""
        if self.world.rank == 0:
            place = self.settings.run_dir or default_run_path(self.settings.name, self.settings.environ)
            try:
                run = RunDirectory(Path(place))
                # A file system that hangs must not keep the job from training.
                make = partial(self._new_attempt, run, hosts)
                made["path"], writers = in_time(make, self.deadline.left_s / 2, "its file system")
            except Exception as error:  # whatever it is, the other ranks wait for an answer
                reason = error.strerror if isinstance(error, OSError) and error.strerror else error
                made["problem"] = f"cannot make the run directory {place}: {reason}"
        made = self.coordinator.allgather(made, self.deadline.left_s)[0]
        if made["problem"]:
            if self.world.rank == 0:
                warn(f"nothing is recorded: {made['problem']}; choose another run directory")
            return None
        attempt = Attempt(Path(made["path"]))
        if writers:
            advice = "choose another run directory, or chmod go-w this one if it is yours"
            warn(f"the run directory {attempt.path.parent} {writers}: others can change what is recorded; {advice}")
        return attempt

    def make_clock_sync(self) -> ClockSync | None:
        """Return what compares the clocks; None where that is switched off. Collective: every rank calls this."""
        settings = self.config.clock
        if not settings.enabled:
            return None
        return ClockSync(
            self.coordinator.transport(self.deadline.left_s),
            self.world.rank,
            self.host_keys,
            num_pings=settings.num_pings,
            interval_s=settings.interval_s,
            timeout_s=settings.timeout_s,
        )

    def make_header(self, attempt: Attempt) -> TraceHeader:
        """Return the header of this rank's trace."""
        world, settings = self.world, self.settings
        return TraceHeader(
            run_id=attempt.path.parent.name,
            attempt=attempt.number,
            rank=world.rank,
            world_size=world.world_size,
            local_rank=world.local_rank,
            local_size=world.local_size,
            node=world.node,
            host=self.identity.host,
            topology_addr=world.topology_addr,
            job_id=world.job_id,
            boot_id=self.identity.boot_id,
            host_key=self.identity.host_key,
            cpus=usable_cpus(),
            mesh=",".join(f"{name}={size}" for name, size in settings.mesh.items()),
            dp=settings.coords.get("dp", -1),
            pp=settings.coords.get("pp", -1),
            tp=settings.coords.get("tp", -1),
            samples_unit=settings.samples_unit,
            interfaces=find_network_counters().interfaces,
            created_unix_ns=time.time_ns(),
            hpcpace_version=__version__,
        )

    def _new_attempt(self, run: RunDirectory, hosts: list[Mapping[str, Any]]) -> tuple[str, str]:
        """Make the folder of this attempt; return its path, and who else can write to the run directory."""
        run = RunDirectory(run.path.absolute())
        was_there = run.path.exists()
        made = run.new_attempt()
        made.write_json(made.run_json, self._record(hosts))
        with run.open() as folder:
            found = os.fstat(folder.descriptor)
        # One that this job has made has the mode that its user's umask left.
        is_own = not was_there and found.st_uid == os.geteuid()
        return str(made.path), "" if is_own else other_writers(found)

    def _record(self, hosts: list[Mapping[str, Any]]) -> dict[str, Any]:
        settings = self.settings
        facts = {
            "launcher": self.world.launcher,
            "world_size": self.world.world_size,
            "mesh": dict(settings.mesh),
            "samples_unit": settings.samples_unit,
            "coordinated_over": self.coordinator.name,
            **settings.record,
        }
        return run_record(name=settings.name, config=self.config, environ=settings.environ, hosts=hosts, facts=facts)
