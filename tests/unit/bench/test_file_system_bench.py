"""How the log of strace is read: which calls count, and in which part of the job."""

from __future__ import annotations

from experiments.bench.file_system import Call, read_calls

_LOG = """\
7  100.0 openat(AT_FDCWD</w>, "/w/shared/run/a.h5", O_RDWR) = 5</w/shared/run/a.h5>
7  100.5 newfstatat(AT_FDCWD</w>, "/mark/begin", 0x7ffe, 0) = -1 ENOENT (No such file or directory)
12 101.0 pwrite64(5</w/shared/run/a.h5>, "x"..., 4096, 0) = 4096
12 101.1 write(6</w/local/a.h5>, "x"..., 10) = 10
12 101.2 fcntl(5</w/shared/run/a.h5>, F_GETFD) = 0
12 101.3 fcntl(5</w/shared/run/a.h5>, F_SETLK, {l_type=F_WRLCK}) = 0
12 101.4 fsync(5</w/shared/run/a.h5> <unfinished ...>
7  102.5 newfstatat(AT_FDCWD</w>, "/mark/end", 0x7ffe, 0) = -1 ENOENT (No such file or directory)
7  103.0 unlink("/w/shared/run/a.journal") = 0
12 103.1 <... fsync resumed>) = 0
"""


def test_calls_are_counted_by_folder_and_part() -> None:
    assert read_calls(_LOG, "/w/shared") == (
        [
            Call("start", "opens", 5),
            Call("training", "writes", 4096),
            Call("training", "locks", 0),
            Call("training", "syncs", 0),
            Call("end", "removes, renames", 0),
        ],
        2.0,
    )
    assert read_calls(_LOG, "/w/local")[0] == [Call("training", "writes", 10)]
