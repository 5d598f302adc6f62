"""Short training jobs on the hosts of a lab, one rank a host: torch is imported once, and each rank is a fork of that.

Importing torch takes a busy machine of two cores longer than the jobs of the experiment themselves. On each host this
module runs as a starter: commands come as lines of JSON on standard input, and a line of JSON goes back when the rank
has ended. Nothing is shared between jobs but the imported modules: sockets, threads and sessions are made after the
fork.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from experiments.jobs import fork
from experiments.pages import ROOT
from hpcpace.core.errors import HpcpaceError
from hpcpace.lab.lab import Lab

_FIRST_PORT = 29500


class TrainingHosts:
    """A starter on each host of a lab; as a context manager they end with the `with` statement."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._ports = itertools.count(_FIRST_PORT)
        self._starters: list[subprocess.Popen[str]] = []
        self._busy: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        for host in self._lab.plan.hosts:
            command = [sys.executable, "-m", "hpcpace", "lab", "run", "--name", self._lab.files.name]
            command += ["--on", host.name, "--", sys.executable, "-m", "experiments.links.hosts"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._starters.append(subprocess.Popen(command, text=True, cwd=ROOT, env=environ, **pipes))
        for starter in self._starters:
            self._answer(starter, "ready")
        return self

    def __exit__(self, *_: object) -> None:
        for starter in self._starters:
            assert starter.stdin is not None
            starter.stdin.close()
        for starter in self._starters:
            starter.wait()

    def start(self, folder: Path, words: Sequence[str], settings: dict[str, str], on: Sequence[str]) -> None:
        """Start one job: a rank on each of some hosts.

        Args:
            folder: for its run and its logs; all hosts see it.
            words: of `hpcpace train`, the model first.
            settings: environment of the ranks.
            on: names of the hosts.
        """
        folder.mkdir(exist_ok=True)
        starters = dict(zip(self._lab.plan.hosts, self._starters, strict=True))
        chosen = {host: starter for host, starter in starters.items() if host.name in on}
        hosts, port = list(chosen), next(self._ports)
        of_all = {"WORLD_SIZE": str(len(hosts)), "GROUP_WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0"}
        of_all |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(port)}
        of_all |= {"HPCPACE_LAB_EMULATION": self._lab.plan.emulation, **settings}
        for rank, (host, starter) in enumerate(chosen.items()):
            self._busy.append(starter)
            address = f"spine.{host.leaf}.{host.name}"
            command = {
                "arguments": ["train", words[0], "--run-dir", str(folder / "run"), *words[1:]],
                "environ": {**of_all, "RANK": str(rank), "GROUP_RANK": str(rank), "SLURM_TOPOLOGY_ADDR": address},
                "folder": str(folder),
                "log": str(folder / f"rank-{rank}.log"),
            }
            assert starter.stdin is not None
            starter.stdin.write(json.dumps(command) + "\n")
            starter.stdin.flush()

    def wait(self) -> list[int]:
        """Wait for the ranks of all jobs that were started and return their exit codes."""
        codes = [int(self._answer(starter, "ended")) for starter in self._busy]
        self._busy.clear()
        return codes

    def _answer(self, starter: subprocess.Popen[str], name: str) -> Any:
        assert starter.stdout is not None
        line = starter.stdout.readline()
        if not line:
            raise HpcpaceError(f"the starter of a host ended with status {starter.wait()}: {starter.args}")
        return json.loads(line)[name]


def main() -> None:
    """Answer commands until standard input ends."""
    for name in ("torch.distributed", "hpcpace.train.models", "hpcpace.cli"):
        importlib.import_module(name)
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        pid = fork(lambda command=command: _become_rank(command), Path(command["log"]))
        print(json.dumps({"ended": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)


def _become_rank(command: dict[str, Any]) -> None:
    """Run the command line of a rank with its environment."""
    from hpcpace.cli import main as run_command

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(command["environ"])
    os.chdir(command["folder"])
    sys.argv = ["hpcpace", *command["arguments"]]
    run_command()


if __name__ == "__main__":
    main()
