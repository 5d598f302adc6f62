"""What `hpcpace plan` says: the best layout for each number of nodes, the next ones, and what would help."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hpcpace.core.records import dataclass
from hpcpace.core.text import format_bytes, format_count, format_duration, listed, percent, plural
from hpcpace.planning.answer import NOT_MEASURED, Choice, Plan, PlannedChange
from hpcpace.planning.engine import Job
from hpcpace.planning.layouts import Recompute
from hpcpace.planning.model import preset
from hpcpace.report.document import NONE, UNKNOWN, Cell, Document, Notes, Plot, Row, Section, Table, Verdict
from hpcpace.report.drawing import axis, plot_text

_MIN_FACTOR = 1.02  # display: of a change that is listed
_MIN_SHARE = 0.01  # display: of a part of a step that is named
_NAMES = {
    "pipeline": "waits and messages of the pipeline",
    "tensor": "exchange of tensor parallelism",
    "gradients": "exchange of gradients",
    "update": "the optimizer",
}


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What is asked about money, and how samples are called.

    Attributes:
        per_gpu_hour: None if it was not asked for.
        unit: `tokens` or `samples`.
        processor: `GPU` or `rank`.
    """

    per_gpu_hour: float | None
    unit: str
    processor: str = "GPU"

    @property
    def hours(self) -> str:
        """What a billion tokens take, in words."""
        return f"{self.processor} hours"


@dataclass(frozen=True, kw_only=True)
class Present:
    """What the traced run has now: its layout, as a row of `Layouts`, and samples a second as measured."""

    layout: Mapping[str, int]
    samples_per_s: float


def plan_document(
    plan: Plan,
    *,
    model: str,
    machine: str,
    remarks: Sequence[str],
    prices: Prices,
    present: Present | None = None,
    all_changes: bool = False,
) -> Document:
    """Return the document of a plan.

    Args:
        plan: what was found.
        model, machine: their names.
        remarks: what rests on no measurement, a sentence each.
        prices: of processors.
        present: of the run that was traced.
        all_changes: whether to list those that do not help, too, and those that cannot be tried.
    """
    best = max(plan.choices, key=lambda one: one.tokens_per_s)
    last_nodes = plan.choices[-1].nodes
    of_last = [choice for choice in plan.choices if choice.nodes == last_nodes]
    changes = [change for change in plan.changes if all_changes or change.factor >= _MIN_FACTOR]
    tried = [_change_words(change) for change in changes]
    if not (tried or all_changes):
        tried = ["none of the changes that were tried makes it 2 % faster"]
    headline = f"fastest: {layout_words(best)} on {plural(best.nodes, 'node')}: {_speed(best, prices.unit)}"
    too_large = f", of which {plan.num_too_large} do not fit into memory" if plan.num_too_large else ""
    return Document(
        heading="hpcpace plan",
        subject=f"{model} on {machine}",
        title="hpcpace plan",
        verdict=Verdict(
            headline=headline, tag="plan", lines=[("Why", _why(best)), *_now(present, prices.unit)], has_terms=False
        ),
        sections=[
            Section("Nodes", [_nodes_table(plan, prices)], lead="the best layout for each number of nodes"),
            Section("Time against cost", [_front_plot(plan, prices)], lead="each layout of the tables of this page"),
            Section(
                f"Layouts on {plural(last_nodes, 'node')}",
                [_layouts_table(of_last)],
                lead=f"the fastest; {plan.num_layouts} on all numbers of nodes{too_large}",
            ),
            Section(
                "What would help",
                [Notes([*tried, *(plan.untried if all_changes else ())])],
                lead=f"on {plural(last_nodes, 'node')}, each with the layout that is best with it",
            ),
            Section("", [Notes([*_remarks(best), *_unknown(plan), *remarks], is_folded=True, has_terms=False)]),
        ],
        rest="--verbose",
        data=json.dumps(as_json(plan, remarks=remarks, prices=prices)),
        has_glossary=False,
    )


def _change_words(change: PlannedChange) -> str:
    if not change.factor:
        return f"{change.name}: no layout fits"
    return f"{change.name}: {change.factor:.2f} times as fast"


def _now(present: Present | None, unit: str) -> list[tuple[str, list[str]]]:
    if present is None:
        return []
    speed = f"{format_count(present.samples_per_s)} {unit}/s as measured, by the median step"
    return [("Now", [f"{_words(present.layout)}: {speed}"])]


def layout_words(choice: Choice) -> str:
    """Return a layout in words: `dp=8 pp=2, microbatch 4, full recomputation`."""
    return _words(choice.layout)


def _words(layout: Mapping[str, int]) -> str:
    sizes = [f"{name}={layout[name]}" for name in ("dp", "pp", "tp") if layout[name] > 1]
    zero = [f"ZeRO {layout['zero']}"] if layout["zero"] else []
    again = [f"{Recompute(layout['recompute']).name.lower()} recomputation"] if layout["recompute"] else []
    return ", ".join([" ".join(sizes) or "one rank", *zero, f"microbatch {layout['micro_batch']}", *again])


def as_json(plan: Plan, *, remarks: Sequence[str], prices: Prices) -> dict[str, Any]:
    """Return a plan for `--json`: times in seconds, sizes in bytes."""
    front = {id(choice) for choice in plan.front}
    return {
        "unit": prices.unit,
        "num_layouts": plan.num_layouts,
        "num_too_large": plan.num_too_large,
        "layouts": [{**_choice_json(one, prices), "is_on_front": id(one) in front} for one in plan.choices],
        "changes": [
            {"kind": change.kind, "name": change.name, "speed_factor": change.factor} for change in plan.changes
        ],
        "remarks": [*remarks],
    }


def _choice_json(choice: Choice, prices: Prices) -> dict[str, Any]:
    price = prices.per_gpu_hour
    return {
        "nodes": choice.nodes,
        "ranks": choice.num_ranks,
        **choice.layout,
        "step_s": choice.step_s,
        "step_low_s": choice.low_s,
        "step_high_s": choice.high_s,
        "why_no_interval": choice.why_unknown or None,
        "samples_per_s": choice.tokens_per_s,
        "memory_bytes": choice.memory_bytes or None,
        "network_bytes_per_node": choice.network_bytes,
        "shares": {**choice.shares},
        "gpu_hours_per_billion": choice.gpu_hours_per_billion,
        "cost_per_billion": None if price is None else price * choice.gpu_hours_per_billion,
    }


def _speed(choice: Choice, unit: str) -> str:
    return f"{format_count(choice.tokens_per_s)} {unit}/s{_interval(choice)}"


def _interval(choice: Choice) -> str:
    if choice.low_s is None or choice.high_s is None:
        return ", error unknown"
    low, high = (format_count(choice.tokens / step_s) for step_s in (choice.high_s, choice.low_s))
    return f" [{low}, {high}]"


def _why(best: Choice) -> list[str]:
    parts = sorted(((best.shares[name], words) for name, words in _NAMES.items()), reverse=True)
    named = [f"{words} {percent(share)}" for share, words in parts if share >= _MIN_SHARE]
    computed = f"computation {percent(best.shares['compute'])}"
    return [f"a step takes {_seconds(best.step_s)}: {listed([computed, *named])}"]


def _unknown(plan: Plan) -> list[str]:
    """Return why layouts have no interval, once for each reason that no remark has."""
    reasons = dict.fromkeys(choice.why_unknown for choice in plan.choices)
    return [f"no interval: {reason}" for reason in reasons if reason not in ("", NOT_MEASURED)]


def _remarks(best: Choice) -> list[str]:
    return [] if best.memory_bytes else ["memory is not known, so that no layout was left out"]


def _memory(choice: Choice) -> str:
    return format_bytes(choice.memory_bytes) if choice.memory_bytes else UNKNOWN


def _nodes_table(plan: Plan, prices: Prices) -> Table:
    first = plan.best[0]
    cost = (Cell("cost per billion", "cost per\nbillion"),) if prices.per_gpu_hour is not None else ()
    ideal, hours = Cell("of ideal", "of\nideal"), Cell(f"{prices.hours} per billion", f"{prices.hours}\nper billion")
    return Table(
        ("nodes", "ranks", "best layout", f"{prices.unit}/s", ideal, hours, *cost),
        [_nodes_row(choice, first, prices, is_front=choice in plan.front) for choice in plan.best],
        text=(2,),
    )


def _nodes_row(choice: Choice, first: Choice, prices: Prices, *, is_front: bool) -> Row:
    ideal = choice.tokens_per_s / first.tokens_per_s / (choice.nodes / first.nodes)
    hours = choice.gpu_hours_per_billion
    cost = (f"{prices.per_gpu_hour * hours:,.0f}",) if prices.per_gpu_hour is not None else ()
    cells = (
        str(choice.nodes), str(choice.num_ranks), layout_words(choice), format_count(choice.tokens_per_s),
        f"{ideal:.2f}", f"{hours:,.0f}", *cost,
    )  # fmt: skip
    return Row(cells, style="" if is_front else "quiet")


def _front_plot(plan: Plan, prices: Prices) -> Plot:
    """Return time against cost of all layouts, with the Pareto front as a line."""
    price = prices.per_gpu_hour
    unit = f"{prices.hours} for a billion {prices.unit}" if price is None else f"cost of a billion {prices.unit}"
    return Plot(
        name="front",
        label=f"Hours and {unit} of each layout",
        caption="Down and left is better. The line joins those that none beats in both.",
        height_px=320,
        traces=[
            _points(plan.choices, price, "@other", "markers"),
            _points(plan.front, price, "@busy", "lines+markers"),
        ],
        layout={
            "xaxis": axis(f"hours for a billion {prices.unit}", rangemode="tozero"),
            "yaxis": axis(unit, rangemode="tozero"),
        },
        legend=[("no other is faster and cheaper", "@busy", ""), ("others", "@other", "")],
    )


def _points(choices: Sequence[Choice], price: float | None, color: str, mode: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": [choice.hours_per_billion for choice in choices],
        "y": [choice.gpu_hours_per_billion * (1.0 if price is None else price) for choice in choices],
        "text": [plot_text(f"{layout_words(choice)}, {plural(choice.nodes, 'node')}", 80) for choice in choices],
        "hovertemplate": "%{text}: %{x:.4~g} h, %{y:,.4~g}<extra></extra>",
        "mode": mode,
        "line": {"color": color, "width": 1},
        "marker": {"color": color, "size": 7},
    }


def _layouts_table(choices: Sequence[Choice]) -> Table:
    sent, lost = Cell("sent by a node", "sent by\na node"), Cell("waits and exchange", "waits and\nexchange")
    head = ("layout", "step", "low to high", "memory", sent, lost)
    return Table(head, [_layout_row(choice) for choice in choices], text=(0,))


def _layout_row(choice: Choice) -> Row:
    low_s, high_s = choice.low_s, choice.high_s
    span = NONE if low_s is None or high_s is None else f"{_seconds(low_s)} to {_seconds(high_s)}"
    lost = max(1 - choice.shares["compute"] - choice.shares["update"], 0.0)
    sent = format_bytes(choice.network_bytes) if choice.network_bytes else NONE
    return Row((layout_words(choice), _seconds(choice.step_s), span, _memory(choice), sent, percent(lost)))


def _seconds(time_s: float) -> str:
    return format_duration(time_s * 1e9)


def job_script_of(plan: Plan, job: Job, unit: str) -> str:
    """Return a job script of the fastest layout; it runs as it stands if hpcpace train has model and layout."""
    best = max(plan.choices, key=lambda one: one.tokens_per_s)
    layout = best.layout
    mesh = f"dp={layout['dp']},pp={layout['pp']},tp={layout['tp']}"
    batch = layout["dp"] * layout["micro_batch"] * layout["num_micro"]
    lines = [
        "#!/usr/bin/env bash",
        f"# {layout_words(best)}: {_speed(best, unit)} predicted by hpcpace plan.",
        f"#SBATCH --nodes={best.nodes}",
        f"#SBATCH --ntasks-per-node={best.num_ranks // best.nodes}",
        "set -euo pipefail",
        "",
    ]
    is_workload = job.model == preset(job.model.name) and not layout["recompute"]
    if is_workload and (layout["pp"] > 1 or layout["num_micro"] == 1):
        micro = f" --microbatches {layout['num_micro']}" if layout["pp"] > 1 else ""
        dtype = "bfloat16" if layout["element_bytes"] == 2 else "float32"
        zero = f" --zero {layout['zero']}" if layout["zero"] else ""
        lines.append(
            f"srun hpcpace train gpt2 --preset {job.model.name[5:]} --mesh {mesh} --batch-size {batch}{micro}{zero}"
            f" --dtype {dtype}"
        )
    else:
        lines += [
            f"# Let your script use {mesh}, {layout['num_micro']} microbatches of {layout['micro_batch']}, ZeRO"
            f" {layout['zero']}, recomputation: {Recompute(layout['recompute']).name.lower()}.",
            "srun hpcpace trace -- train.py",
        ]
    return "\n".join(lines) + "\n"
