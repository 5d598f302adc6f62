"""A job with a rank that never calls an operation, and a dump that NCCL's watchdog writes of one that never ends."""

from __future__ import annotations

import json
import os
import re
import sys

from experiments.gpu.place import Place, answer

_ABSENT = 1
_ANY_CODE = range(-64, 256)
_TIMEOUT_S = 3


def measure(place: Place) -> None:
    """Measure."""
    run = place.folder / "run"
    said = place.job(
        run,
        *("--steps", 40, "--width", 256, "--layers", 4, "--rows", 256, "--absent", _ABSENT),
        ranks=3,
        trace=("--on-hang", "stop"),
        environ={"HPCPACE_HANG_LEAST_S": "3", "HPCPACE_HANG_FACTOR": "3"},
        codes=_ANY_CODE,
    )
    ended = re.search(r"step \d+ has lasted .*; the job ends here", said)
    place.note(stopped=answer(ended is not None, ended[0] if ended else "it ended by itself"))
    place.note(absent=_judged(place, run, kinds=("never_called", "own_work"), culprits=[_ABSENT]))
    dumps = place.folder / "dumps"
    dumps.mkdir()
    place.run(
        *(sys.executable, "-m", "experiments.gpu.recorder", place.device, _TIMEOUT_S),
        environ={
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_FR_DUMP_TEMP_FILE": f"{dumps}/rank_",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        },
        codes=_ANY_CODE,
    )
    if not os.listdir(dumps):
        place.note(dump="NO: no dump was written")
        return
    words = _judged(place, dumps, kinds=("network", "unknown"), culprits=[])
    place.note(dump=f"left out: NCCL's watchdog; of gloo's record {words}" if place.is_rehearsal else words)


def _judged(place: Place, what: object, *, kinds: tuple[str, ...], culprits: list[int]) -> str:
    found = json.loads(place.hpcpace("hang", "--json", what, codes=(0, 1, 3), is_json=True))
    hang = found.get("hang") or {}
    is_right = hang.get("kind") in kinds and hang.get("culprits") == culprits
    return answer(is_right, f"{hang.get('kind', 'nothing hangs')}, culprits {hang.get('culprits', [])}")
