"""Jobs of known truth: ranks that run programs of operations over several groups, until a fault holds them up.

The simulation knows nothing of the rules under test: a rank goes on when its operation is complete, and not before.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpcpace.hang.views import Call, Channel, Doing, GroupView, HangKind, JobView, RankView

STEPS = 4
_KEPT_CALLS = 8


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One line of a rank's program; with `waits_later`, the rank waits for it only at the end of the step."""

    channel: Channel
    op: str
    size_bytes: int = 1024
    root: int = -1
    waits_later: bool = False
    ends_step: bool = False


@dataclass
class Fault:
    """What is done to one rank, or to one operation, and where."""

    kind: str
    rank: int
    at: int
    doing: Doing = Doing.UNKNOWN


@dataclass
class Mesh:
    """Ranks in the order of Megatron: tensor parallel first, then data parallel, then pipeline stages."""

    dp: int
    pp: int
    tp: int
    groups: list[GroupView] = field(default_factory=list)

    def __post_init__(self) -> None:
        for kind in ("tp", "dp", "pp", "dpxpp"):
            seen: dict[tuple[int, ...], None] = {}
            for rank in range(self.size):
                seen.setdefault(self.members(kind, rank))
            self.groups += [
                GroupView(name=f"{kind}{number}", members=members) for number, members in enumerate(seen) if members[1:]
            ]

    @property
    def size(self) -> int:
        return self.dp * self.pp * self.tp

    def place(self, rank: int) -> tuple[int, int, int]:
        return rank // self.tp % self.dp, rank // (self.tp * self.dp), rank % self.tp

    def members(self, kind: str, rank: int) -> tuple[int, ...]:
        dp, pp, tp = self.place(rank)
        same = {
            "tp": lambda d, p, t: (d, p) == (dp, pp),
            "dp": lambda d, p, t: (p, t) == (pp, tp),
            "pp": lambda d, p, t: (d, t) == (dp, tp),
            "dpxpp": lambda d, p, t: t == tp,
        }[kind]
        return tuple(other for other in range(self.size) if same(*self.place(other)))

    def group(self, kind: str, rank: int) -> int | None:
        members = self.members(kind, rank)
        names = [n for n, group in enumerate(self.groups) if group.members == members and group.name.startswith(kind)]
        return next((n for n in names if self.groups[n].name.rstrip("0123456789") == kind), None)


def program(mesh: Mesh, rank: int, *, with_buckets: bool) -> list[Operation]:
    """Return what a rank of a training job calls, step by step."""
    tp, dp, pp, norm = (mesh.group(kind, rank) for kind in ("tp", "dp", "pp", "dpxpp"))
    stages = mesh.members("pp", rank)
    stage = stages.index(rank)
    lines: list[Operation] = []

    def message(source: int, destination: int) -> None:
        assert pp is not None
        op = "send" if rank == source else "recv"
        lines.append(Operation(channel=Channel(pp, source, destination), op=op))

    def together(group: int | None, op: str, **known: Any) -> None:
        if group is not None:
            lines.append(Operation(channel=Channel(group), op=op, **known))

    for step in range(STEPS):
        for _ in range(2):
            if stage:
                message(stages[stage - 1], rank)
            together(tp, "all_reduce")
            together(tp, "all_gather", size_bytes=512)
            if stage < len(stages) - 1:
                message(rank, stages[stage + 1])
        for _ in range(2):
            if stage < len(stages) - 1:
                message(stages[stage + 1], rank)
            together(tp, "reduce_scatter", size_bytes=512)
            if stage:
                message(rank, stages[stage - 1])
        for size in (4096, 2048):
            together(dp, "all_reduce", size_bytes=size, waits_later=with_buckets)
        together(norm, "all_reduce", size_bytes=8)
        if step % 2 and norm is not None:
            together(norm, "broadcast", size_bytes=8, root=mesh.groups[norm].members[0])
        if lines:
            lines[-1] = replace(lines[-1], ends_step=True)
    return lines


@dataclass
class Simulation:
    """Runs the programs until nobody can go on."""

    mesh: Mesh
    programs: list[list[Operation]]
    fault: Fault
    chance: random.Random
    now: int = 0
    at: list[int] = field(default_factory=list)
    called: list[list[tuple[Operation, int, int]]] = field(default_factory=list)  # operation, place, when
    counts: list[dict[Channel, int]] = field(default_factory=list)
    stuck: set[tuple[Channel, int]] = field(default_factory=set)
    left_behind: set[tuple[int, Channel, int]] = field(default_factory=set)
    waits: list[list[tuple[Channel, int]]] = field(default_factory=list)
    waits_later: dict[int, list[tuple[Channel, int]]] = field(default_factory=dict)
    met: dict[tuple[Channel, int], list[Operation]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.mesh.size
        self.at = [0] * size
        self.called = [[] for _ in range(size)]
        self.counts = [{} for _ in range(size)]
        self.waits = [[] for _ in range(size)]

    def run(self) -> None:
        while True:
            able = [rank for rank in range(self.mesh.size) if self.can_go_on(rank)]
            if not able:
                return
            self.go_on(self.chance.choice(able))

    def is_stopped(self, rank: int) -> bool:
        return self.fault.kind in ("stuck", "gone") and rank == self.fault.rank and self.at[rank] == self.fault.at

    def can_go_on(self, rank: int) -> bool:
        if self.is_stopped(rank) or self.at[rank] >= len(self.programs[rank]):
            return False
        return all(self.is_complete(rank, *place) for place in self.waits[rank])

    def go_on(self, rank: int) -> None:
        self.now += 1
        line = self.programs[rank][self.at[rank]]
        seq = self.counts[rank].get(line.channel, 0)
        self.counts[rank][line.channel] = seq + 1
        self.called[rank].append((line, seq, self.now))
        self.met.setdefault((line.channel, seq), []).append(line)
        if rank == self.fault.rank and self.at[rank] == self.fault.at:
            if self.fault.kind == "left":
                self.left_behind.add((rank, line.channel, seq))
            if self.fault.kind == "network":
                self.stuck.add((line.channel, seq))
        self.at[rank] += 1
        later = self.waits_later.setdefault(rank, [])
        self.waits[rank] = []
        (later if line.waits_later else self.waits[rank]).append((line.channel, seq))
        if line.ends_step:
            self.waits[rank] += later
            later.clear()

    def is_complete(self, rank: int, channel: Channel, seq: int) -> bool:
        if (channel, seq) in self.stuck or (rank, channel, seq) in self.left_behind:
            return False
        members = (
            (channel.source, channel.destination) if channel.source >= 0 else self.mesh.groups[channel.group].members
        )
        calls = self.met.get((channel, seq), [])
        if calls and channel.source < 0 and all(line.op == "broadcast" for line in calls):
            return rank == calls[0].root or self.counts[calls[0].root].get(channel, 0) > seq
        if len(calls) < len(members):
            return False
        return channel.source >= 0 or len({(line.op, line.size_bytes, line.root) for line in calls}) == 1

    def view(self, hidden: Mapping[int, str] | None = None) -> JobView:
        """Return what records show of the job, but for the ranks that have none, or a gap."""
        hidden = hidden or {}
        ranks = {rank: self.rank_view(rank, hidden.get(rank, "")) for rank in range(self.mesh.size)}
        return JobView(groups=tuple(self.mesh.groups), ranks=ranks, now_ns=self.now + 1000)

    def rank_view(self, rank: int, lacks: str) -> RankView:
        if lacks == "record":
            return RankView(rank=rank, is_recorded=False)
        called = self.called[rank]
        if lacks == "end":  # the last calls are lost, and it is known that some are
            called = called[: -self.chance.randint(1, 3)]
        calls = [
            Call(
                channel=line.channel,
                seq=seq,
                op=line.op,
                size_bytes=line.size_bytes,
                root=line.root,
                entered_ns=when,
                is_open=not self.is_complete(rank, line.channel, seq),
            )
            for line, seq, when in called
        ]
        entered: dict[Channel, int] = {}
        for line, seq, _ in called:
            entered[line.channel] = seq + 1
        is_faulty = rank == self.fault.rank
        return RankView(
            rank=rank,
            entered=entered,
            calls=tuple(call for n, call in enumerate(calls) if call.is_open or n >= len(calls) - _KEPT_CALLS),
            is_complete=lacks != "end",
            is_gone=True if is_faulty and self.fault.kind == "gone" else None,
            doing=self.fault.doing if is_faulty else Doing.UNKNOWN,
        )

    @property
    def hangs(self) -> bool:
        """Whether some rank waits and cannot go on."""
        return any(
            not self.is_complete(rank, line.channel, seq)
            for rank in range(self.mesh.size)
            for line, seq, _ in self.called[rank][-12:]
        )


KINDS: dict[str, HangKind] = {
    "stuck": HangKind.NEVER_CALLED,
    "busy": HangKind.OWN_WORK,
    "gone": HangKind.GONE,
    "left": HangKind.PEERS_LEFT,
    "network": HangKind.NETWORK,
    "mismatch": HangKind.MISMATCH,
    "disorder": HangKind.DISORDER,
}
MESHES: Sequence[tuple[int, int, int]] = (
    *((4, 1, 1), (2, 1, 2), (1, 4, 1), (2, 2, 1), (2, 2, 2), (4, 2, 2), (3, 1, 3), (2, 4, 1), (4, 1, 2)),
)


def broken_job(kind: str, seed: int) -> Simulation:
    """Return a job that hangs by a fault of one kind at a random place of a random rank."""
    chance = random.Random(f"{kind} {seed}")
    while True:
        mesh = Mesh(*chance.choice(MESHES))
        with_buckets = chance.random() < 0.5
        programs = [program(mesh, rank, with_buckets=with_buckets) for rank in range(mesh.size)]
        rank = chance.randrange(mesh.size)
        at = chance.randrange(len(programs[rank]))
        fault = Fault(kind="stuck" if kind == "busy" else kind, rank=rank, at=at)
        if kind == "busy":
            fault.doing = chance.choice([Doing.LOADING, Doing.SAVING, Doing.EVALUATING, Doing.COMPUTING])
        if not _break(programs[rank], fault, mesh, chance):
            continue
        simulation = Simulation(mesh, programs, fault, chance)
        simulation.run()
        if simulation.hangs:
            return simulation


def _break(lines: list[Operation], fault: Fault, mesh: Mesh, chance: random.Random) -> bool:
    """Change the program of the rank as the fault says; return whether that breaks the job in this way."""
    line = lines[fault.at]
    is_message = line.channel.source >= 0
    members = () if is_message else mesh.groups[line.channel.group].members
    match fault.kind:
        case "left":
            return not is_message and line.op != "broadcast"
        case "mismatch":
            if is_message or len(members) < 3:
                return False
            other = [
                replace(line, op="barrier", size_bytes=0, root=-1),
                replace(line, size_bytes=line.size_bytes * 2),
            ]
            if line.op == "broadcast":
                other.append(replace(line, root=members[-1]))
            lines[fault.at] = chance.choice(other)
            return True
        case "disorder":
            if fault.at + 1 >= len(lines):
                return False
            after = lines[fault.at + 1]
            lines[fault.at : fault.at + 2] = [replace(after, ends_step=False), replace(line, ends_step=after.ends_step)]
            return after.channel != line.channel and not is_message and after.channel.source < 0
        case _:
            return True
