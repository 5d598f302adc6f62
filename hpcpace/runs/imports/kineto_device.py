"""What the device of a profile did: when it passed marks of its host, and when it had nothing to do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.runs.imports.imported_run import Rows, rows_of
from hpcpace.runs.imports.kineto_profile import Profile
from hpcpace.trace.schema import Phase

Int64Array = NDArray[np.int64]

# What begins so shortly before a kernel of NCCL ends still waited for it.
_GRAIN_NS = 10_000


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a device did: work is kernels and copies, but for collectives.

    Attributes:
        launched_ns: when each piece of work was launched, ascending, (num_pieces,).
        done_ns: when all work that was launched until then had ended, (num_pieces,).
        begin_ns: begins of all work, ascending.
        ended_ns: until when some work was running that had begun by then, (num_pieces,).
    """

    launched_ns: Int64Array
    done_ns: Int64Array
    begin_ns: Int64Array
    ended_ns: Int64Array

    @classmethod
    def of(cls, profile: Profile) -> Device:
        """Return the device of a profile that has its work."""
        begin, end, link = (np.frombuffer(column, np.int64) for column in profile.kernels)
        launched = launched_ns(link, begin, profile)
        by_launch, by_begin = np.argsort(launched, kind="stable"), np.argsort(begin, kind="stable")
        return cls(
            launched_ns=launched[by_launch],
            done_ns=np.maximum.accumulate(end[by_launch]) if len(end) else end,
            begin_ns=begin[by_begin],
            ended_ns=np.maximum.accumulate(end[by_begin]) if len(end) else end,
        )

    def at(self, host_ns: Int64Array) -> Int64Array:
        """Return when the device passed marks that the host made: all work launched before had ended by then."""
        place = np.searchsorted(self.launched_ns, host_ns, side="left") - 1
        done = self.done_ns[np.maximum(place, 0)] if len(self.done_ns) else np.zeros(len(host_ns), np.int64)
        return np.where(place >= 0, np.maximum(done, host_ns), host_ns)

    def held_ns(self, enter_ns: Int64Array, exit_ns: Int64Array) -> Int64Array:
        """Return for how long before each collective ended the device did nothing else."""
        place = np.searchsorted(self.begin_ns, exit_ns - _GRAIN_NS, side="left") - 1
        busy_until = self.ended_ns[np.maximum(place, 0)] if len(self.ended_ns) else np.zeros(len(exit_ns), np.int64)
        busy_until = np.where(place >= 0, busy_until, 0)
        return np.maximum(exit_ns - np.maximum(enter_ns, busy_until), 0)


def idle_rows(
    profile: Profile,
    device: Device,
    steps: Int64Array,
    *,
    enter_ns: Int64Array,
    exit_ns: Int64Array,
    enqueue_ns: Int64Array,
) -> Rows:
    """Return the phases in which the device had nothing to do, from what ended last to what began next.

    IDLE is the host's: it launched what began next after all else had ended. OTHER is the device's own, as between the
    kernels of a graph, or nobody's, where the launch is not known; the shortest of it is no more than a launch takes.
    Each step has IDLE, at least without length at its end, which says that idle time is known.

    Args:
        profile: what its kernels are taken from.
        device: the same as a device.
        steps: number, begin and end of each step, int64, (num_steps, 3).
        enter_ns, exit_ns, enqueue_ns: of the collectives, which are no other work, int64, (num_operations,).
    """
    begin, end, link = (np.frombuffer(column, np.int64) for column in profile.kernels)
    begins, ends = np.concatenate([begin, enter_ns]), np.concatenate([end, exit_ns])
    launched = np.concatenate([launched_ns(link, begin, profile), enqueue_ns])
    order = np.argsort(begins, kind="stable")
    from_ns, to_ns, launched = np.maximum.accumulate(ends[order])[:-1], begins[order][1:], launched[order][1:]
    is_host = (launched >= from_ns) & (launched < to_ns)
    is_idle = to_ns - from_ns > np.where(is_host, 0, _GRAIN_NS)
    from_ns, to_ns, is_host = from_ns[is_idle], to_ns[is_idle], is_host[is_idle]
    first_ns, last_ns = device.at(steps[:, 1]), device.at(steps[:, 2])
    first = np.searchsorted(last_ns, from_ns, side="right")
    num_steps = np.maximum(np.searchsorted(first_ns, to_ns, side="left") - first, 0)
    of = np.repeat(np.arange(len(from_ns)), num_steps)
    row = first[of] + np.arange(len(of)) - (np.cumsum(num_steps) - num_steps)[of]
    from_ns = np.append(np.maximum(from_ns[of], first_ns[row]), last_ns)
    to_ns = np.append(np.minimum(to_ns[of], last_ns[row]), last_ns)
    return rows_of(
        "phases",
        has_device=profile.has_device,
        step=np.append(steps[row, 0], steps[:, 0]),
        phase=np.where(np.append(is_host[of], np.ones(len(steps), np.bool_)), int(Phase.IDLE), int(Phase.OTHER)),
        begin_ns=from_ns,
        end_ns=to_ns,
        microbatch=-1,
        device_begin_ns=from_ns,
        device_end_ns=to_ns,
    )


def device_columns(device: Device | None, begin_ns: Int64Array, end_ns: Int64Array) -> dict[str, Int64Array]:
    """Return the columns that say when a device passed begins and ends of its host; none without a device."""
    if device is None:
        return {}
    return {"device_begin_ns": device.at(begin_ns), "device_end_ns": device.at(end_ns)}


def launched_ns(link: Int64Array, enter_ns: Int64Array, profile: Profile) -> Int64Array:
    """Return when the host launched each kernel; where that is not known, when it began."""
    times, links = (np.frombuffer(column, np.int64) for column in profile.launches)
    if not len(links):
        return enter_ns
    order = np.argsort(links, kind="stable")
    at = np.minimum(np.searchsorted(links[order], link), len(links) - 1)
    is_known = (links[order][at] == link) & (link != 0)
    return np.where(is_known, np.minimum(times[order][at], enter_ns), enter_ns)
