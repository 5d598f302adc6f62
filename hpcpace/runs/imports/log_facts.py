"""What single lines of logs say of ranks that wait, before it is known of which attempt of a job they are."""

from __future__ import annotations

from hpcpace.core.records import dataclass


@dataclass(frozen=True)
class Label:
    """What a line has in front of a message: the global rank, that of torchrun on its node, and a task of Slurm."""

    rank: int | None = None
    local_rank: int | None = None
    task: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it names nobody."""
        return self.rank is None and self.local_rank is None and self.task is None


@dataclass(frozen=True)
class GroupName:
    """A process group as a line names it: its number in the process, its name in the job, and its description."""

    number: str = ""
    name: str = ""
    description: str = ""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Where a message comes from.

    Attributes:
        label: what is in front of it.
        member: its rank within the group, which is the global one in the default group; None where not said.
        group: None where not said.
        at_ns: when it was written, in a year of 366 days that has no number; None where not said.
        actor: the class of the Ray actor that wrote it; empty without one.
    """

    label: Label
    member: int | None = None
    group: GroupName | None = None
    at_ns: int | None = None
    actor: str = ""


@dataclass(frozen=True, kw_only=True)
class TimedOut:
    """An operation that ran out of time. `number` is None in torch 1.8, `num_elements` -1 before 2.2."""

    line: Line
    number: int | None
    op: str
    num_elements: int
    timeout_ms: int
    ran_ms: int | None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The last operations that a rank enqueued and completed, and the one that ran out of time; None where not said."""

    line: Line
    enqueued: int | None
    completed: int | None
    failed: int | None


@dataclass(frozen=True, kw_only=True)
class Desync:
    """What a report says of other members of its group: how far they came."""

    line: Line
    members: tuple[int, ...]
    number: int
    has_finished: bool
    op: str = ""


@dataclass(frozen=True, kw_only=True)
class Gloo:
    """A message of gloo that did not come through: how long a rank waited, or None where its peer had closed."""

    line: Line
    waited_ms: int | None
    op: str


@dataclass(frozen=True)
class WorldSize:
    """How many ranks a communicator of the job has."""

    num_ranks: int


@dataclass(frozen=True)
class Start:
    """The workers of a job are started, perhaps again."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A frame of the code that called an operation that ran out of time, the innermost first."""

    line: Line
    where: str


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """A rank on which torch's watchdog itself stands still."""

    line: Line


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A rank that raised an exception, or tasks of Slurm that ended.

    Attributes:
        line: where an exception comes from; of tasks, nowhere.
        how: the exception with its message, or Slurm's word for it.
        tasks: those of Slurm; empty for an exception.
    """

    line: Line
    how: str
    tasks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Repeated:
    """How many messages like the one before Ray has left out, of any rank."""

    count: int


@dataclass(frozen=True, kw_only=True)
class Joined:
    """How many processes have come to the start of a job or of a group.

    Attributes:
        key: which start that is, 0 for one that the message does not number.
        num_ranks: how many have to come; 0 where all have.
    """

    key: int
    num_joined: int
    num_ranks: int


Fact = TimedOut | Progress | Desync | Gloo | WorldSize | Start | Frame | Stuck | Ended | Repeated | Joined
