"""Which ranks' waits are known: an operation without a counterpart does not say when its last member came."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.step_panels import StepPanels
from hpcpace.metrics.phases import EXPOSED_TRANSFER, EXPOSED_WAIT

_MOST_UNMATCHED, _LEAST_SHARE = 0.1, 0.001  # of blocked communication, and of the step


def unmatched_share(panels: StepPanels) -> NDArray[np.float64]:
    """Return the share of communication that has no counterpart on every member, float64, (num_ranks, num_steps).

    What seems to be its transfer may be waits for others.
    """
    share: NDArray[np.float64] = panels.unmatched_ns / np.maximum(panels.under_way_ns, 1.0)
    return share


def unknown_waits(panels: StepPanels) -> NDArray[np.bool_]:
    """Return the ranks whose waits are not told from transfers, bool, (num_ranks,).

    What blocks them without a counterpart is more than a tenth of all that blocks them, and a thousandth of the step.
    """
    return _is_unknown(*_blocked_ns(panels))


def are_waits_known(panels: StepPanels) -> bool:
    """Return whether waits are told from transfers in the means over all ranks, as `unknown_waits` judges one."""
    return not _is_unknown(*(values.sum() for values in _blocked_ns(panels)))


def _blocked_ns(panels: StepPanels) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return how long operations without a counterpart blocked each rank, all operations, and the steps."""
    parts_ns = panels.parts_ns
    transfer_ns = parts_ns[:, :, list(EXPOSED_TRANSFER)].sum(axis=2)
    unmatched_ns = (transfer_ns * unmatched_share(panels)).sum(axis=1)
    wait_ns = parts_ns[:, :, list(EXPOSED_WAIT)].sum(axis=(1, 2))
    return unmatched_ns, wait_ns + transfer_ns.sum(axis=1), parts_ns.sum(axis=(1, 2))


def _is_unknown(
    unmatched_ns: NDArray[np.float64], blocked_ns: NDArray[np.float64], step_ns: NDArray[np.float64]
) -> NDArray[np.bool_]:
    return np.asarray((unmatched_ns > _MOST_UNMATCHED * blocked_ns) & (unmatched_ns > _LEAST_SHARE * step_ns))
