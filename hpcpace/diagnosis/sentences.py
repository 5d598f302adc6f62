"""Sentences on what is missing from a run: operations that never completed, lost traces, wrong clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcpace.core.text import format_duration, listed, named_ranks, plural, printable
from hpcpace.diagnosis.summary import Clocks, ClockSuspect, IncompleteRank
from hpcpace.metrics.lost_operations import OpenOperation
from hpcpace.trace.schema import NUMBER_BITS

HOST_TIMES = "not known: phases are host times of ranks with a device"
"""Why figures that rest on phases are left out where nobody recorded what the device did when."""
NO_PHASES = "not known: phases were not recorded (trace.detail)"
"""Why they are left out where collectives were recorded, and phases were not."""
_MAX_AGAINST = 4  # display: hosts that a sentence on a wrong clock names


def operation_number(seq: int) -> str:
    """Return the number of an operation in words: counted from a step, where its group was observed from there on."""
    first_step, number = divmod(seq, 1 << NUMBER_BITS)
    return f"{number} since step {first_step}" if first_step > 0 else str(seq)


def open_line(operation: OpenOperation, hosts: Mapping[int, str]) -> str:
    """Return one sentence on an operation that never completed or that failed."""
    number = operation_number(operation.seq)
    where = f"{operation.op} {number} of group '{printable(operation.group)}' in step {operation.step}"
    parts = [f"{named_ranks(operation.inside, hosts)} inside for {format_duration(operation.age_ns)}"]
    parts += [f"{named_ranks(operation.completed, hosts)} completed it"] if operation.completed else []
    parts += [f"no record of it from {named_ranks(operation.absent, hosts)}"] if operation.absent else []
    if operation.late:
        parts.append(f"{named_ranks(operation.late, hosts)} entered it when it had failed")
    if not operation.failed:
        return f"{where} never completed: {', '.join(parts)}"
    on = "" if operation.failed == operation.inside else f" on {named_ranks(operation.failed, hosts)}"
    return f"{where} failed{on}: {', '.join(parts)}"


def incomplete_rank_line(rank: IncompleteRank, hosts: Mapping[int, str]) -> str:
    """Return one sentence on a rank whose trace is missing, was not closed, or lacks records."""
    who = named_ranks((rank.rank,), hosts)
    count, steps = plural(rank.num_lost_operations, "operation"), plural(rank.num_lost_steps, "step")
    if not rank.has_trace:
        ended = f" and ended {steps}" if rank.num_lost_steps else ""
        entered = f"; it entered at least {count}{ended}, as other ranks show" if rank.num_lost_operations else ""
        return f"{who}: no trace{entered}"
    parts = ["no step recorded" if rank.last_step is None else f"last step recorded {rank.last_step}"]
    parts[0] += f", {format_duration(rank.gap_ns)} before the last trace ends" if rank.gap_ns else ""
    if rank.num_lost_operations:
        ended = f" and {steps} that it had ended" if rank.num_lost_steps else ""
        parts.append(f"lost at least {count} that it had entered{ended}, as other ranks show")
    parts += [f"its recorder dropped {plural(rank.num_dropped, 'record')}"] if rank.num_dropped else []
    return f"{who}: {'; '.join(parts)}"


def suspect_line(clocks: Clocks) -> str:
    """Return one sentence on clocks that are proven wrong; empty if none is."""
    if not clocks.num_wrong:
        return ""
    num_more = clocks.num_suspects - len(clocks.suspects)
    names = [printable(suspect.host) for suspect in clocks.suspects] + ([f"{num_more} more"] if num_more else [])
    bounds_ns = [max(suspect.ahead_ns, suspect.behind_ns) for suspect in clocks.suspects]
    if clocks.num_wrong != clocks.num_suspects:
        return _undecided(clocks, names, f"by at least {format_duration(max(bounds_ns))}")
    bound = f"wrong by at least {format_duration(min(bounds_ns))}"
    if len(names) > 1:
        return (
            f"the clocks of {listed(names)} are {bound}: no smaller set explains what violates causality; times "
            "between them and others cannot be trusted"
        )
    suspect = clocks.suspects[0]
    is_short = suspect.num_against <= _MAX_AGAINST
    against = listed([printable(host) for host in suspect.against]) if is_short else f"{suspect.num_against} others"
    return (
        f"the clock of {names[0]} is {bound} against {against} ({_direction(suspect)}); times between {names[0]} and "
        "others cannot be trusted"
    )


def _undecided(clocks: Clocks, names: Sequence[str], bound: str) -> str:
    which = f"at least {clocks.num_wrong} of them are wrong; the traces do not show which"
    if clocks.num_suspects == 2:
        bound += f" ({names[0]} {_direction(clocks.suspects[0])})"
        which = "the traces do not show which one is wrong"
    return f"the clocks of {listed(names)} contradict each other {bound}; {which}; times between them cannot be trusted"


def _direction(suspect: ClockSuspect) -> str:
    if suspect.ahead_ns and suspect.behind_ns:
        return "sometimes ahead, sometimes behind"
    return "ahead" if suspect.ahead_ns else "behind"
