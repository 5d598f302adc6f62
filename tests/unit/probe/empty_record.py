"""A probe that has measured nothing yet."""

from __future__ import annotations

from hpcpace.probe.record import ProbedHost, ProbeRecord


def empty_record(*, time_s: float = 9.0, hosts: tuple[ProbedHost, ...] = ()) -> ProbeRecord:
    """Return a record with neither measurements nor problems."""
    return ProbeRecord(
        versions={},
        cluster="",
        job_id="",
        started_unix_ns=0,
        device="cpu",
        device_name="",
        backend="gloo",
        time_s=time_s,
        part_s={},
        hosts=hosts,
    )
