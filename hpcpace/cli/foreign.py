"""The warning before files of another user are opened."""

from __future__ import annotations

import os
from pathlib import Path


def warn_of_old_hdf5(path: Path) -> None:
    """Warn if traces of another user are about to be read by an HDF5 with known vulnerabilities."""
    import h5py

    from hpcpace.trace.opening import MIN_HDF5

    try:
        owner = path.stat().st_uid
    except OSError:
        return  # whoever opens it says so
    if owner != os.geteuid() and h5py.version.hdf5_version_tuple < MIN_HDF5:
        from hpcpace.cli.options import warn

        least = ".".join(map(str, MIN_HDF5))
        known = f"HDF5 {h5py.version.hdf5_version} has known vulnerabilities"
        advice = f"update h5py to one with HDF5 {least} or newer"
        warn([f"{path} belongs to another user (uid {owner}), and {known}: {advice}"], is_verbose=False)
