"""When a run began that does not say so in run.json, from its traces."""

from __future__ import annotations

from hpcpace.core.errors import HpcpaceError
from hpcpace.core.rundir import Attempt
from hpcpace.runs.dates import is_to_come


def traced_begin(attempt: Attempt) -> int:
    """Return when the first rank with a trace began to record; 0 where no trace says it."""
    from hpcpace.trace.reader import stream_trace  # loads HDF5, which runs that say when they began do not need

    try:
        header = stream_trace(attempt.trace_file(next(iter(attempt.trace_files()), 0))).trace.header
    except (HpcpaceError, OSError, MemoryError):
        return 0
    return header.created_unix_ns if header.created_unix_ns > 0 and not is_to_come(header.created_unix_ns) else 0


def oldest_trace(attempt: Attempt) -> int:
    """Return when the trace file was changed that is the oldest; 0 without any.

    Nothing but recording, packing and copying changes trace files: the times of the folders above move with reports.
    """
    try:
        with attempt.open() as folder, folder.folder(attempt.trace_dir.name) as traces:
            return max(min((traces.status(name).st_mtime_ns for name in attempt.trace_sizes()), default=0), 0)
    except OSError:
        return 0
