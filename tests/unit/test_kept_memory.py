from __future__ import annotations

import ctypes
import subprocess
import sys

from hpcpace.core.pool import keep_freed_memory

PROGRAM = """
import resource, sys
import numpy as np
from hpcpace.core.pool import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for _ in range(20):
    arrays = [np.ones(1 << 18) for _ in range(64)]
    del arrays
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def _num_faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_freed_arrays_make_room_for_the_next_ones():
    assert 4 * _num_faults("keep") < _num_faults("leave")


def test_another_c_library_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    keep_freed_memory()
