"""The state of a lab, asked for from outside of it."""

from __future__ import annotations

import json
import sys

from hpcpace.core.errors import HpcpaceError
from hpcpace.lab.fabric import LinkCounters
from hpcpace.lab.faults import FaultRecord
from hpcpace.lab.lab import HostStatus, Lab, LabStatus


def status_of(lab: Lab) -> LabStatus:
    """Return the state of a lab; called from outside the lab.

    Raises:
        HpcpaceError: the state cannot be read.
    """
    done = lab.run(sys.executable, "-P", "-m", "hpcpace", "lab", "status", "--json")
    if not done.stdout:
        raise HpcpaceError(f"cannot read the state of lab {lab.files.name}: {done.stderr.strip()}")
    values = json.loads(done.stdout)
    return LabStatus(
        **{
            **values,
            "hosts": tuple(HostStatus(**host) for host in values["hosts"]),
            "links": tuple(LinkCounters(**link) for link in values["links"]),
            "problems": tuple(values["problems"]),
            "jobs": tuple(values["jobs"]),
            "faults": tuple(FaultRecord(**fault) for fault in values["faults"]),
        }
    )
