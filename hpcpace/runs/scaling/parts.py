"""Parts of the step at a size."""

from __future__ import annotations

from hpcpace.runs.scaling.sizes import Size


def parts_at(size: Size) -> dict[str, float]:
    """Return the parts of a measured size; `total` alone where they are not known."""
    return dict(size.parts_ns or {"total": size.mean("step_ns") or 0.0})


def parts_of_all(size: Size) -> dict[str, float]:
    """Return the parts of a size, with the work that its fastest rank has, too, and the rest of it as imbalance."""
    parts = parts_at(size)
    beyond_ns = parts["work"] * (1 - (size.mean("least_work") or 1.0))
    return {**parts, "work": parts["work"] - beyond_ns, "imbalance": parts["imbalance"] + beyond_ns}
