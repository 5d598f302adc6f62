"""Which `srun --mpi` matches which MPI library, against a srun and an mpi4py that say what they are told to."""

from __future__ import annotations

import sys
from pathlib import Path

from cases import each_case

from hpcpace.batch.job import mpi_option, spoken_types

LISTED = (
    "MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n"
)


@each_case(
    ("library", "best"),
    [
        ("Open MPI v5.0.7, package: Open MPI", "pmix"),
        ("MPICH Version:      5.0.0", "pmi2"),
        ("MPI VERSION    : CRAY MPICH version 8.1.29 (ANL base 3.4a2)", "cray_shasta"),
        ("Intel(R) MPI Library 2021.13 for Linux* OS", "pmi2"),
        ("MVAPICH Version : 3.0", "pmi2"),
        ("Some MPI of the future", ""),
        ("", ""),
    ],
)
def test_a_library_speaks_a_type(library: str, best: str) -> None:
    assert (spoken_types(library) or ("",))[0] == best


@each_case(
    ("library", "default", "listed", "option"),
    [
        ("Open MPI v5.0.7", "pmi2", LISTED, "--mpi=pmix"),
        ("Open MPI v5.0.7", "pmix_v4", LISTED, ""),
        ("MPICH Version: 5.0.0", "none", LISTED, "--mpi=pmi2"),
        ("MPICH Version: 5.0.0", "pmi2", LISTED, ""),
        ("MPICH Version: 5.0.0", "cray_shasta", LISTED, ""),
        ("MPICH Version: 5.0.0", "pmix", "MPI plugin types are...\n\tnone\n\tpmix\n", ""),
        ("Open MPI v5.0.7", "pmi2", "", ""),
        ("", "none", LISTED, ""),
    ],
)
def test_takes_another_type_only_where_the_default_does_not_fit(
    library: str, default: str, listed: str, option: str, tmp_path: Path
) -> None:
    commands = {
        "srun": f"printf '%s' '{listed}'",
        "scontrol": f"echo 'MpiDefault              = {default}'",
        "python": f"echo '{library}'",
    }
    for name, line in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert mpi_option(environ, [str(tmp_path / "python")]) == (option, f"{library}\n" if listed else "")


def test_a_python_without_mpi_is_no_reason_to_choose(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/sh\nprintf '%s' '{LISTED}'\n")
    (tmp_path / "srun").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert mpi_option(environ, [sys.executable, "-c", "raise SystemExit(1)"]) == ("", "")
