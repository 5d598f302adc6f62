"""Measures what the audit costs: `python -m experiments.bench.audit`; `--lab` (root) adds a run over 64 hosts.

One node as a whole process, compared with the start of Python alone; what a session pays for its snapshot, and the
rules over 2,048 snapshots of 8 ranks: of sound nodes, and of nodes on which more than a hundred things are wrong.

Options:
  --repeats N  [10]
  --hosts N    audit this many nodes at once [2048]
  --lab        also run in a lab, which needs root
"""

from __future__ import annotations

import dataclasses
import resource
import sys
import tempfile
import time
from pathlib import Path

from experiments.bench.pairs import python_taken, taken, taken_medians
from experiments.options import command_line
from hpcpace.audit.facts import Snapshot
from hpcpace.audit.job import AuditedJob
from hpcpace.audit.rulebook import audit
from hpcpace.audit.snapshot_files import snapshot_from, snapshot_text
from hpcpace.core.config import Config
from hpcpace.core.environment import host_identity, locate, process_environ, rank_info
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig
from hpcpace.observe.joined import JoinedRank, SessionSettings, save_host_snapshots
from hpcpace.report.audit_report import audit_document
from hpcpace.world.deadline import Deadline
from hpcpace.world.messages import NoMessages

NUM_RANKS, NUM_LAB_HOSTS = 8, 64
_TIMEOUT_S = 60.0


def one_node(repeats: int) -> None:
    for name, arguments in (("python alone", ("-c", "pass")), ("hpcpace audit", ("-m", "hpcpace", "audit"))):
        times = [python_taken(*arguments) for _ in range(repeats)]
        wall_s, cpu_s = taken_medians(times)
        print(f"{name}: wall {wall_s:.3f} s, processor {cpu_s:.3f} s (medians of {repeats})")


def in_a_session(repeats: int) -> None:
    """Print what a rank that is the first of its host pays, with all modules loaded."""
    environ, identity = process_environ(), host_identity()
    keys = [identity.host_key]
    joined = JoinedRank(
        settings=SessionSettings(),
        config=Config(),
        messages=NoMessages(),
        identity=identity,
        host_keys=keys,
        world=locate(rank_info(environ), keys),
        deadline=Deadline(_TIMEOUT_S * repeats),
    )
    times = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats):
            with taken(resource.RUSAGE_SELF) as one:
                save_host_snapshots(joined, environ, Path(folder), warn=print)
            times.append(one)
    wall_s, cpu_s = taken_medians(times)
    print(f"snapshot in a session: wall {1000 * wall_s:.1f} ms, processor {1000 * cpu_s:.1f} ms (medians of {repeats})")


def cluster(name: str, num_hosts: int) -> list[str]:
    """Return the snapshots of many nodes as texts, each with its own ranks and boot, made of `dgx-NAME.json`."""
    whole = snapshot_from(Path(__file__).with_name(f"dgx-{name}.json").read_text())
    texts = []
    for number in range(num_hosts):
        ranks = tuple(
            dataclasses.replace(rank, rank=number * NUM_RANKS + rank.local_rank, world_size=num_hosts * NUM_RANKS)
            for rank in whole.ranks
        )
        made = dataclasses.replace(whole, host=f"n{number}", boot_id=f"boot-{number}", ranks=ranks)
        texts.append(snapshot_text(made))
    return texts


def rules(num_hosts: int, repeats: int) -> None:
    for name in ("sound", "bad"):
        texts = cluster(name, num_hosts)
        for _ in range(repeats):
            begin_s = time.process_time()
            snapshots: list[Snapshot] = [snapshot_from(text) for text in texts]
            read_s = time.process_time()
            result = audit(AuditedJob(snapshots))
            ruled_s = time.process_time()
            audit_document(result)
            end_s = time.process_time()
            print(
                f"{num_hosts} {name} nodes x {NUM_RANKS} ranks: reading {read_s - begin_s:.2f} s, rules "
                f"{ruled_s - read_s:.2f} s, verdict {end_s - ruled_s:.2f} s of processor time, "
                f"{len(result.findings)} findings"
            )


def in_a_lab() -> None:
    """Print how long all hosts of a lab take; they share this machine's cores."""
    config = LabConfig(name="bench-audit", hosts=NUM_LAB_HOSTS, leaves=8)
    with Lab.up(config) as lab, tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        command = ("srun", f"-N{NUM_LAB_HOSTS}", "--ntasks-per-node=1", sys.executable, "-m", "hpcpace", "audit")
        begin_s = time.perf_counter()
        done = lab.run(*command, cwd=Path(folder), timeout_s=120)
        print(f"srun hpcpace audit over {NUM_LAB_HOSTS} lab hosts: wall {time.perf_counter() - begin_s:.1f} s")
        print(done.stdout.splitlines()[2])


def main() -> None:
    options = command_line(__doc__)
    one_node(options.repeats)
    in_a_session(options.repeats)
    rules(options.hosts, max(1, options.repeats // 5))
    if options.lab:
        in_a_lab()


if __name__ == "__main__":
    main()
