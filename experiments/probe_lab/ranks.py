"""The ranks of one long job in the lab, which measure the pairs of its hosts again and again, whenever they are told.

python -P -m experiments.probe_lab.ranks FOLDER TIME_S

A file FOLDER/go-N starts measurement N, whose result becomes FOLDER/done-N.json; FOLDER/end ends the job. Starting
Python and torch on all hosts once saves most of the time of an experiment.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from hpcpace.core.codec import plain
from hpcpace.core.environment import process_environ, rank_info
from hpcpace.core.rundir import write_json
from hpcpace.probe.pairs import Pairs
from hpcpace.probe.start import begin_record, probe_world
from hpcpace.probe.world import ProbeWorld
from hpcpace.world.connection import connect
from hpcpace.world.deadline import Deadline
from hpcpace.world.messages import own_store
from hpcpace.world.process_group import init_process_group

_TIMEOUT_S = 20.0
_START_TIMEOUT_S = 200.0
_POLL_S = 0.2
_POLLS = 20
_WAIT, _GO, _END = "wait", "go", "end"


def main() -> None:
    """Run as one rank."""
    folder, time_s = Path(sys.argv[1]), float(sys.argv[2])
    environ = process_environ()
    info = rank_info(environ)
    place = connect(info, environ, coordination="torch", rendezvous=None, timeout_s=_START_TIMEOUT_S).rendezvous
    with init_process_group(
        info,
        None,
        device="cpu",
        backend="gloo",
        rendezvous=place,
        timeout_s=_TIMEOUT_S,
        start_timeout_s=_START_TIMEOUT_S,
    ) as device:
        store, _ = own_store(_TIMEOUT_S)
        world = probe_world(info, store, device=device, backend="gloo", timeout_s=_TIMEOUT_S)
        (folder / f"ready-{info.rank}").touch()
        number = 0
        while (order := world.agree(_order(folder, number))) != _END:
            if order == _GO:
                _measure(world, folder / f"done-{number}.json", time_s)
                number += 1


def _order(folder: Path, number: int) -> str:
    """Return what the experiment wants next, after a few seconds at most."""
    for _ in range(_POLLS):
        if (folder / "end").exists():
            return _END
        if (folder / f"go-{number}").exists():
            return _GO
        time.sleep(_POLL_S)
    return _WAIT


def _measure(world: ProbeWorld, file: Path, time_s: float) -> None:
    record = begin_record(world, process_environ(), time_s=time_s)
    record = Pairs().measure(world, Deadline(time_s), record)
    if world.is_first:
        write_json(file, plain(record.pairs))


if __name__ == "__main__":
    main()
