"""Which sends and receives of the what-if analysis are real, and between which pipeline stages.

With one model chunk a stage, stages have messages with their neighbours. With several, interleaved ones ("virtual"
stages: Narayanan et al. 2021, section 2.2), the last stage sends on to the first, too, and the recorder also listed
calls that sent nothing. Which those are follows from the work that a message belongs to: the n-th receive of a
direction comes before the n-th piece of its work, the n-th send after it.
"""

from __future__ import annotations

import pandas as pd

DIRECTIONS = {"forward": 1, "backward": -1}
"""What is added to a stage to get the one that its messages go to."""
_WORKER_STEP = ["worker", "step"]
_CLOCK_ERROR_NS = 50_000  # 5e-5 s, as the analysis has it: setup_pp_dependency of its dependency_model.py


def real_messages(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the messages of a trace.

    Args:
        rows: as of `WiaTrace.rows`.

    Returns:
        The rows that are messages, with `direction`, `is_send`, the stages `source` and `target`, and `is_known`:
        whether it shows which message of the other end it is. It does not where calls do not fit the work, or where one
        end of a channel has more of them than the other in that step: all that follows a lost one is shifted.
    """
    num_stages = int(rows.stage.max()) + 1
    num_chunks = max(int(rows.chunk.max()), 0) + 1  # none where chunks are not named
    parts = []
    for direction, delta in DIRECTIONS.items():
        for kind in ("send", "recv"):
            calls = rows[rows.optype == f"{direction}-{kind}"].assign(is_known=True)
            if num_chunks > 1:
                work = rows[rows.optype == f"{direction}-compute"]
                calls = _with_chunks(calls, work, is_send=kind == "send")
            towards = delta if kind == "send" else -delta
            place = calls.chunk.clip(lower=0) * num_stages + calls.stage + towards
            calls = calls[~calls.is_known | ((place >= 0) & (place < num_stages * num_chunks))]
            here, other = calls.stage, (calls.stage + towards) % num_stages
            source, target = (here, other) if kind == "send" else (other, here)
            parts.append(calls.assign(direction=direction, is_send=kind == "send", source=source, target=target))
    found = pd.concat(parts)
    of_channel = found.groupby(["direction", "dp", "source", "target", "step"])
    is_even = of_channel.is_send.transform("mean") == 0.5
    return found.assign(is_known=is_even & of_channel.is_known.transform("all"))


def _with_chunks(calls: pd.DataFrame, work: pd.DataFrame, *, is_send: bool) -> pd.DataFrame:
    """Return calls with the chunk of the work that each belongs to, without those before or after all work.

    `is_known` becomes false for the calls of a worker in a step in which they do not fit the work.
    """
    order = [*_WORKER_STEP, "begin_ns", "seq"]
    work = work.sort_values(order)
    work = work.assign(number=work.groupby(_WORKER_STEP).cumcount())
    of_step = work.groupby(_WORKER_STEP).agg(
        num_work=("seq", "size"), first_end_ns=("end_ns", "min"), last_begin_ns=("begin_ns", "max")
    )
    calls = calls.join(of_step, on=_WORKER_STEP)
    is_unused = (
        calls.end_ns < calls.first_end_ns - _CLOCK_ERROR_NS
        if is_send
        else calls.begin_ns > calls.last_begin_ns + _CLOCK_ERROR_NS
    )
    calls = calls[~is_unused].sort_values(order)
    of_calls = calls.groupby(_WORKER_STEP)
    missing = calls.num_work.fillna(0).astype(int) - of_calls.seq.transform("size")
    # Of the first receive, which is none, the call may not be listed, either.
    number = of_calls.cumcount() + (0 if is_send else missing)
    index = pd.MultiIndex.from_frame(calls.assign(number=number)[[*_WORKER_STEP, "number"]])
    chunks = work.set_index([*_WORKER_STEP, "number"]).chunk.reindex(index).fillna(-1).astype(int).to_numpy()
    return calls.assign(chunk=chunks, is_known=missing.isin([0, 1])).drop(columns=list(of_step.columns))
