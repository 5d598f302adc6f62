"""Runs short training jobs on the hosts of a lab, one rank a host, by a starter on each host."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hpcpace.core.errors import HpcpaceError
from hpcpace.lab.lab import Lab

_FIRST_PORT = 29500


class TrainingHosts:
    """A starter on each host of a lab; as a context manager they end with the `with` statement."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._ports = itertools.count(_FIRST_PORT)
        self._starters: list[subprocess.Popen[str]] = []

    def __enter__(self) -> TrainingHosts:
        root = Path(__file__).parents[2]
        for host in self._lab.plan.hosts:
            command = [sys.executable, "-m", "hpcpace", "lab", "run", "--name", self._lab.files.name]
            command += ["--on", host.name, "--", sys.executable, "-m", "experiments.links.starter"]
            pipe = subprocess.PIPE
            self._starters.append(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root, env={**os.environ, **_ENVIRON})
            )
        for starter in self._starters:
            self._answer(starter, "ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for starter in self._starters:
            assert starter.stdin is not None
            starter.stdin.close()
        for starter in self._starters:
            starter.wait()

    def start(self, folder: Path, words: Sequence[str], settings: dict[str, str]) -> None:
        """Start one job: a rank on each host.

        Args:
            folder: for its run and its logs; all hosts see it.
            words: options of `hpcpace train gpt2`.
            settings: environment of the ranks.
        """
        hosts, port = self._lab.plan.hosts, next(self._ports)
        for rank, (host, starter) in enumerate(zip(hosts, self._starters, strict=True)):
            environ = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(hosts)),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "GROUP_RANK": str(rank),
                "GROUP_WORLD_SIZE": str(len(hosts)),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": str(port),
                "SLURM_TOPOLOGY_ADDR": f"spine.{host.leaf}.{host.name}",
                "HPCPACE_LAB_EMULATION": self._lab.plan.emulation,
                **settings,
            }
            command = {
                "arguments": ["train", "gpt2", "--run-dir", str(folder / "run"), *words],
                "environ": environ,
                "folder": str(folder),
                "log": str(folder / f"rank-{rank}.log"),
            }
            assert starter.stdin is not None
            starter.stdin.write(json.dumps(command) + "\n")
            starter.stdin.flush()

    def wait(self) -> list[int]:
        """Wait for the ranks of the job and return their exit codes."""
        return [int(self._answer(starter, "ended")) for starter in self._starters]

    def _answer(self, starter: subprocess.Popen[str], name: str) -> Any:
        assert starter.stdout is not None
        line = starter.stdout.readline()
        if not line:
            raise HpcpaceError(f"the starter of a host ended with status {starter.wait()}: {starter.args}")
        return json.loads(line)[name]


_ENVIRON = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
