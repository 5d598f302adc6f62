"""Which training options can be combined, decided before anything slow is loaded.

All rules concern one feature or a pair, so a combination is supported unless a rule excludes it; the tables in
docs/cli.md show these rules.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcpace.config import TrainConfig
from hpcpace.errors import ConfigError
from hpcpace.train.mesh import DIMENSIONS, Mesh


@dataclass(frozen=True, kw_only=True)
class Need:
    """A feature that needs a dimension of the mesh."""

    feature: str
    dimension: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Two features that exclude each other."""

    first: str
    second: str
    reason: str


ZERO_1, ZERO_3 = "--zero 1", "--zero 3"
GPIPE, INTERLEAVED = "--schedule gpipe", "--schedule interleaved"
FP16, BF16, INT8, POWERSGD = (f"--compress {name}" for name in ("fp16", "bf16", "int8", "powersgd"))
COMPRESS = (FP16, BF16, INT8, POWERSGD)
SYNC_EVERY, BUCKET_MB, NO_OVERLAP, COMPILE = "--sync-every", "--bucket-mb", "--no-overlap", "--compile"
BFLOAT16 = "--dtype bfloat16"
FEATURES = (
    *DIMENSIONS, ZERO_1, ZERO_3, GPIPE, INTERLEAVED, *COMPRESS, SYNC_EVERY, BUCKET_MB, NO_OVERLAP, COMPILE, BFLOAT16,
)  # fmt: skip

NEEDS = (
    *(
        Need(feature=feature, dimension="dp", reason="splits state between replicas, but there is only one")
        for feature in (ZERO_1, ZERO_3)
    ),
    *(
        Need(feature=feature, dimension="dp", reason="concerns messages between replicas, but there is only one")
        for feature in (*COMPRESS, SYNC_EVERY, BUCKET_MB, NO_OVERLAP)
    ),
    *(
        Need(feature=feature, dimension="pp", reason="orders the stages of a pipeline, but there is none")
        for feature in (GPIPE, INTERLEAVED)
    ),
)

CONFLICTS = (
    Conflict(first=ZERO_1, second=SYNC_EVERY, reason="the split state must see every replica's gradient"),
    Conflict(first=ZERO_3, second=SYNC_EVERY, reason="no replica holds all parameters, so none can step alone"),
    *(
        Conflict(first=ZERO_3, second=feature, reason="fully_shard averages gradients without DDP's hooks")
        for feature in COMPRESS
    ),
    *(
        Conflict(first=ZERO_3, second=feature, reason="fully_shard has no buckets: it sends block by block")
        for feature in (BUCKET_MB, NO_OVERLAP)
    ),
    *(
        Conflict(first=feature, second=SYNC_EVERY, reason="local SGD sends parameters, not gradients")
        for feature in (*COMPRESS, BUCKET_MB, NO_OVERLAP)
    ),
    Conflict(first=BUCKET_MB, second=NO_OVERLAP, reason="a single message has no buckets"),
    *(
        Conflict(first=feature, second=BUCKET_MB, reason="its messages depend on each other, so it needs one bucket")
        for feature in (INT8, POWERSGD)
    ),
)  # fmt: skip


def features(settings: TrainConfig, mesh: Mesh) -> frozenset[str]:
    """Return the features that a run uses, by their names in `FEATURES`."""
    used = {
        f"--zero {settings.zero}": settings.zero > 0,
        f"--schedule {settings.schedule}": settings.schedule != "1f1b",
        f"--compress {settings.compress}": settings.compress != "none",
        SYNC_EVERY: settings.sync_every > 1,
        BUCKET_MB: settings.bucket_mb is not None,
        NO_OVERLAP: not settings.overlap,
        COMPILE: settings.compile,
        BFLOAT16: settings.dtype == "bfloat16",
        **{name: size > 1 for name, size in mesh.as_dict().items()},
    }
    return frozenset(name for name, is_used in used.items() if is_used)


def refusal(used: frozenset[str]) -> str | None:
    """Return why features cannot be combined, or None if they can."""
    for need in NEEDS:
        if need.feature in used and need.dimension not in used:
            return f"{need.feature} {need.reason}: use a mesh with {need.dimension}=2 or more, or drop the option"
    for conflict in CONFLICTS:
        if conflict.first in used and conflict.second in used:
            return f"{conflict.first} and {conflict.second} cannot be combined: {conflict.reason}; drop one"
    return None


def check_support(settings: TrainConfig, mesh: Mesh) -> None:
    """Refuse settings that cannot be combined on a mesh.

    Raises:
        ConfigError: a feature lacks a dimension of the mesh, or two exclude each other.
    """
    reason = refusal(features(settings, mesh))
    if reason is not None:
        raise ConfigError(reason)


def support_matrix() -> str:
    """Return all pairs of features as a Markdown table, with the reason of each that is refused below it."""
    reasons = list(dict.fromkeys([*(n.reason for n in NEEDS), *(c.reason for c in CONFLICTS)]))
    cells = {frozenset((c.first, c.second)): str(reasons.index(c.reason) + 1) for c in CONFLICTS}
    needs = {n.feature: f"{n.dimension} ({reasons.index(n.reason) + 1})" for n in NEEDS}
    rows = [f for f in FEATURES if f not in DIMENSIONS]
    columns = [f for f in rows if f in {c.second for c in CONFLICTS} | {c.first for c in CONFLICTS}]
    lines = [f"| | needs | {' | '.join(f'`{c}`' for c in columns)} |", "|---" * (len(columns) + 2) + "|"]
    for row in rows:
        pairs = [_cell(row, column, cells) for column in columns]
        lines.append(f"| `{row}` | {needs.get(row, '')} | {' | '.join(pairs)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))])


def _cell(row: str, column: str, cells: dict[frozenset[str], str]) -> str:
    same_option = row.split()[0] == column.split()[0]
    return "-" if same_option else cells.get(frozenset((row, column)), "yes")
