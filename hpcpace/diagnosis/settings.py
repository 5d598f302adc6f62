"""How a report reads a run, and from which figures on it says that something is wrong: `[report]` and `[diagnosis]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from hpcpace.core.config import Section, check_size, number
from hpcpace.core.records import dataclass
from hpcpace.core.text import parse_size


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Section, section="report"):
    """How a report reads a run."""

    memory: str = "2GiB"
    """Memory for the tables of a run; beyond it, the largest files are left out and named."""
    topology: str = ""
    """File with the leaf switch of each host: topology.conf, topology.yaml, the output of `scontrol show topology`, or
    `host leaf spine` on each line; empty: what Slurm told the job."""
    shared_cores: bool | None = None
    """Whether ranks share cores on purpose: reports then look for other causes; by default what the run says."""

    def checks(self) -> Iterator[Callable[[], None]]:
        """Yield the check of the size."""
        yield partial(check_size, "report", "memory", self.memory)

    @property
    def memory_bytes(self) -> int:
        """The same, in bytes."""
        return parse_size(self.memory)


@dataclass(frozen=True, kw_only=True)
class DiagnosisConfig(Section, section="diagnosis"):
    """The thresholds above which a report says that something is wrong; docs/diagnosis.md explains each."""

    least_steps: int = number(20, 4)
    """Steps that a report needs; with fewer it cannot tell. Looking for stragglers always takes 20."""
    level: float = number(0.005, 1e-9, 1)
    """Probability of blaming somebody by chance, over all ranks of a run together."""
    straggler_share: float = number(0.03, 1e-9, 1)
    """Straggler: excess of the own work of a rank or node over the others of its role, relative to them."""
    imbalance_share: float = number(0.025, 1e-9, 1)
    """Pipeline imbalance: excess of the own work of a stage over the other stages, relative to them."""
    jitter_share: float = number(0.06, 1e-9, 1)
    """Synchronisation amplification: share of the step lost because each step waits for its slowest rank."""
    data_share: float = number(0.5, 1e-9, 1)
    """Work varies with the data: what stages have in common of how the work of microbatches varies within a step."""
    contention_share: float = number(0.02, 1e-9, 1)
    """Fabric contention: share of the time spent in transfers that took much longer than usual."""
    link_share: float = number(0.2, 1e-9, 1)
    """Slow link, locality: excess of transfers over a link or across switches, relative to other transfers."""
    flow_share: float = number(0.3, 1e-9, 1)
    """Slow link, by connections: excess of the time that connections take for their bytes, relative to others."""
    uplink_factor: float = number(3.0, 1e-9)
    """Slow uplinks: how many times as long connections between leaves may take by design as those within one."""
    foreign_share: float = number(0.1, 1e-9, 1)
    """Foreign traffic: its least rate on a link, relative to that of a connection that is not slow."""
    repeat_share: float = number(0.002, 1e-9, 1)
    """Lossy link: least share of segments that are sent again, and four times that of other connections."""
    communication_share: float = number(0.15, 1e-9, 1)
    """Communication-bound: share of exposed transfer in the time without waits."""
    probed_share: float = number(0.8, 1e-9, 1)
    """Communication-bound: share of the probed rate from which on transfers run at the link's own rate."""
    input_share: float = number(0.1, 1e-9, 1)
    """Input-bound: share of the step spent waiting for data."""
    host_share: float = number(0.05, 1e-9, 1)
    """Host-bound: share of the step in which devices wait for their hosts to issue work."""
    runtime_share: float = number(0.02, 1e-9, 1)
    """Runtime and control plane: share of the time lost to recurring events or to garbage collection."""
    core_share: float = number(0.1, 1e-9, 1)
    """Ranks share cores: share of the time for which a rank is ready to run and waits for a core."""
    hang_s: float = number(5.0, 1e-9)
    """Hang: seconds that an operation must last, and at least twenty usual steps."""
