"""What every fault of a lab is: its settings, what it affects, how it is injected and undone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from hpcpace.lab.cgroups import HostCgroup
from hpcpace.lab.files import LabFiles
from hpcpace.lab.hosts import living_pid
from hpcpace.lab.plan import LabPlan

Wait = Callable[[float | None], bool]
"""Wait this many seconds, or without limit, and return whether to undo the fault now."""


@dataclass(frozen=True)
class InsideLab:
    """A lab as its faults see it: its plan and its files."""

    plan: LabPlan
    files: LabFiles

    def pid(self, host: str) -> int:
        """Return the first process of a host, which must be alive."""
        return living_pid(self.files, self.plan.host(host))

    def cgroup(self, host: str) -> HostCgroup:
        """Return the control group of a host."""
        return HostCgroup(self.files.name, self.plan.host(host).name)


class LabFault(ABC):
    """One kind of fault; subclasses are frozen dataclasses with its settings."""

    kind: ClassVar[str]
    is_instant: ClassVar[bool] = False
    """Whether it is over as soon as it has been applied, and cannot be undone."""

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return dict(vars(self))

    @property
    @abstractmethod
    def target(self) -> str:
        """What it affects; a target can have one fault of a kind at a time."""

    @abstractmethod
    def check(self, lab: InsideLab) -> None:
        """Raise a UsageError if the settings do not fit the lab."""

    @abstractmethod
    def apply(self, lab: InsideLab) -> None:
        """Inject the fault."""

    def hold(self, lab: InsideLab, wait: Wait, note: Callable[..., None]) -> None:
        """Keep the fault active until `wait` returns true; `note` adds events to the log of truth."""
        wait(None)

    @abstractmethod
    def undo(self, lab: InsideLab) -> None:
        """Restore what can be restored."""


@dataclass(frozen=True, kw_only=True)
class HostFault(LabFault):
    """A fault of one host."""

    host: str

    @property
    def target(self) -> str:
        """The host."""
        return self.host

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown host."""
        lab.plan.host(self.host)
