"""Writes the golden file that freezes today's version of the trace format. Run it only when the version changes.

python tests/golden/make_trace.py [PATH]
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "unit" / "trace"))

from rows import add_one_of_each, header  # noqa: E402

from hpcpace.trace.recorder import Recorder  # noqa: E402
from hpcpace.trace.schema import FORMAT_VERSION  # noqa: E402


def write(path: Path) -> None:
    """Write one row of every table, and a full chunk of phases."""
    path.unlink(missing_ok=True)
    with Recorder(path, header(), warn=print, clock=lambda: 5_000_000_000) as recorder:
        add_one_of_each(recorder)
        for step in range(1, 9000):
            recorder.add_phase(step, step % 10, step * 1_000_000, step * 1_000_000 + 999, step % 4)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name(f"trace-{FORMAT_VERSION}.h5"))
