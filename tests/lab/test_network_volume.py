"""Bytes on the links of a lab are those of a formula that was evaluated before the job began."""

from __future__ import annotations

from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from cases import only_nightly
from lab_status import status_of
from numpy.typing import NDArray

from experiments.labs import JobQueue
from hpcpace.core.rundir import open_run
from hpcpace.lab.fabric import LinkCounters
from hpcpace.lab.lab import Lab
from hpcpace.metrics.common_clock import rank_clocks
from hpcpace.metrics.flows import flows_of
from hpcpace.metrics.topology import topology_of
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import Op
from hpcpace.trace.tables import RankTrace
from hpcpace.train.plan import TrainPlan, plan_training
from hpcpace.train.settings import TrainConfig
from library.volume import (
    LinkVolume,
    PacketOverhead,
    link_volumes,
    messages,
    run_operations,
    step_operations,
    wire_matrix,
)

SCRIPT = Path(__file__).parents[2] / "sbatch" / "gpt2_dp.sh"
HOSTS = ("n1", "n2", "n3", "n4")
LEAF_OF_HOST = {"n1": "leaf1", "n2": "leaf1", "n3": "leaf2", "n4": "leaf2"}
TOLERANCE = 0.05
JOB_TIMEOUT_S = 300

WITHOUT_HEADERS = PacketOverhead(ethernet_bytes=0, ip_bytes=0, tcp_bytes=0)

Collectives = Counter[tuple[Op, int]]
"""How often a rank does an operation of a size."""


# Sizes keep Slurm's own traffic, some hundred kB a host, below a hundredth, and the slower uplinks busy for seconds.
@pytest.mark.parametrize(
    ("mesh", "steps", "seq_len"),
    only_nightly([("dp=2,pp=2", 40, 128)], [("tp=4", 20, 64), ("dp=4", 40, 128), ("pp=4", 60, 128)]),
)
def test_links_carry_the_bytes_of_the_formula(
    lab: Lab, queue: JobQueue, tmp_path: Path, mesh: str, steps: int, seq_len: int
) -> None:
    plan = planned(mesh, steps=steps, seq_len=seq_len)
    expected = volumes(plan)
    print(f"\n{mesh}, {steps} steps, by formula: {expected}")
    before = links(lab)
    traces = train(queue, plan, cwd=tmp_path)
    after = links(lab)
    assert [trace.header.host for trace in traces] == list(HOSTS)
    off = {}
    for name, volume in expected.items():
        tx_bytes = after[name].tx_bytes - before[name].tx_bytes
        rx_bytes = after[name].rx_bytes - before[name].rx_bytes
        off[name] = (tx_bytes / volume.tx_bytes - 1, rx_bytes / volume.rx_bytes - 1)
        print(f"{name}: tx {tx_bytes} ({off[name][0]:+.2%}), rx {rx_bytes} ({off[name][1]:+.2%})")
    assert {name: pair for name, pair in off.items() if max(map(abs, pair)) > TOLERANCE} == {}
    payload = wire_matrix(messages(run_operations(plan)), len(HOSTS), WITHOUT_HEADERS)
    recorded = recorded_payload(traces)
    print(f"payload by formula:\n{payload}\nas flows in the traces have it:\n{recorded}")
    assert np.abs(recorded - payload).max() <= TOLERANCE * payload.max()


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", only_nightly(["pp=2,tp=2"], ["dp=2,pp=2", "dp=2,tp=2"]))
def test_ranks_do_the_operations_of_the_formula(queue: JobQueue, tmp_path: Path, mesh: str) -> None:
    plan = planned(mesh, steps=8, seq_len=32)
    expected = operations_of_ranks(plan)
    traces = train(queue, plan, cwd=tmp_path)
    assert [collectives_of_step(trace, 5) for trace in traces] == expected


def links(lab: Lab) -> dict[str, LinkCounters]:
    return {link.name: link for link in status_of(lab).links}


def recorded_payload(traces: list[RankTrace]) -> NDArray[np.int64]:
    """Return the bytes that each rank (row) has sent to each other one by its flows, (num_ranks, num_ranks)."""
    ranks = range(len(traces))
    topology = topology_of(ranks=ranks, nodes=ranks, hosts=HOSTS, addresses=[""] * len(HOSTS))
    flows = flows_of(traces, rank_clocks(traces)[0], topology)
    assert (flows.connections.peer_rank >= 0).any() and set(flows.connections.interface) == {"eth0"}
    found = np.zeros((len(traces), len(traces)), np.int64)
    for rank, peer, row in zip(flows.connections.rank, flows.connections.peer_rank, count(), strict=False):
        if peer >= 0:
            found[rank, peer] += flows.acked_bytes[flows.connection == row].sum()
    return found


def planned(mesh: str, *, steps: int, seq_len: int) -> TrainPlan:
    return plan_training(TrainConfig(mesh=mesh, steps=steps, seq_len=seq_len), len(HOSTS))


def volumes(plan: TrainPlan) -> dict[str, LinkVolume]:
    wire_bytes = wire_matrix(messages(run_operations(plan)), len(HOSTS), PacketOverhead())
    return link_volumes(wire_bytes, HOSTS, LEAF_OF_HOST)


def train(queue: JobQueue, plan: TrainPlan, *, cwd: Path) -> list[RankTrace]:
    """Run a plan as a job of one rank a host; return the traces in order of the ranks."""
    settings = plan.settings
    options = {
        "--mesh": settings.mesh,
        "--steps": settings.steps,
        "--seq-len": plan.seq_len,
        "--batch-size": settings.batch_size,
        "--microbatches": settings.microbatches,
    }
    arguments = [str(word) for option in options.items() for word in option]
    job_id = queue.submit(f"-N{len(HOSTS)}", "--ntasks-per-node=1", SCRIPT, *arguments, cwd=cwd)
    job = queue.wait(job_id, timeout_s=JOB_TIMEOUT_S)
    assert job.state == "COMPLETED", job.output.read_text()
    (attempt,) = open_run(cwd / "runs" / f"{job_id}-gpt2_dp").attempts()
    return [read_trace(path) for _, path in sorted(attempt.trace_files().items())]


def operations_of_ranks(plan: TrainPlan) -> list[Collectives]:
    """Return what each rank records of a step: a send is a receive at its other end."""
    ranks = [Collectives() for _ in HOSTS]
    for operation in step_operations(plan):
        ops = (Op.SEND, Op.RECV) if operation.kind == "send" else [Op.ALL_REDUCE] * len(operation.ranks)
        for rank, op in zip(operation.ranks, ops, strict=True):
            ranks[rank][op, operation.size_bytes] += operation.count
    return ranks


def collectives_of_step(trace: RankTrace, step: int) -> Collectives:
    table = trace.tables["collectives"]
    rows = table["step"] == step
    return Counter((Op(int(op)), int(size)) for op, size in zip(table["op"][rows], table["bytes"][rows], strict=True))
