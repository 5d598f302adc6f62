"""Ways to send less or less often: what each saves on three links, and what it costs in loss.

`python -m experiments.techniques [--folder FOLDER] [--write]` trains GPT-2 tiny on the sources of Python over four
ranks. Losses come from plain runs with five seeds each, times and bytes from a lab of two hosts with two ranks each,
whose computation is emulated. It needs root and Slurm, about an hour on two cores, and goes on where it stopped. See
docs/results/techniques.md.

Options:
  --folder PATH        keep runs here [/var/tmp/hpcpace-techniques]
  --only losses|times  run these alone
  --write              write docs/results/techniques.md at the end
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from analysis.library.figures import RunFigures, attempt_figures
from experiments.labs import ALONE, JobQueue
from experiments.options import command_line
from experiments.pages import RESULTS, cases_of, command, read_toml, table, write_page
from experiments.studies.lab_set_up import study_lab
from hpcpace.core.rundir import RunDirectory
from hpcpace.studies.setups import Setup, parse_layout

SEEDS = range(3)
_BATCH, _SEQ_LEN, _STEPS, _EVAL_EVERY = 8, 128, 240, 12
_LAYOUT = parse_layout("2x2")
_COMPUTE_MS = 150.0
"""Of a sequence: two of them take a rank 300 ms a step, of which it really computes a tenth."""
LINKS_MBIT = (25, 125, 625)
_TIMED_STEPS, _WARMUP, _TIMEOUT_S = 16, 3, 400.0
_BUDGET_STEPS = 48
"""Equal time is that of so many plain steps."""
_T_95 = 4.303
"""Student's t of three values, 95 % on both sides."""


@dataclass(frozen=True, kw_only=True)
class Technique:
    """A way to train, by options of `hpcpace train gpt2`.

    Attributes:
        name: in the tables.
        options: in addition to those of all.
        same_loss: whether it computes what the plain run computes, so that its losses are that run's.
        batch: sequences a step over all ranks.
    """

    name: str
    options: tuple[str, ...] = ()
    same_loss: bool = False
    batch: int = _BATCH

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return "-".join(self.name.replace(",", "").split())

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.batch * _SEQ_LEN


TECHNIQUES = cases_of(Technique, read_toml(__file__)["technique"])
PLAIN = TECHNIQUES[0]


def main() -> None:
    args = command_line(__doc__)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.only != "times":
        run_losses(args.folder / "losses")
    if args.only != "losses":
        run_times(args.folder / "times")
    if args.only is None:
        tables = results(args.folder)
        print("\n\n".join(tables.values()))
        if args.write:
            draw(args.folder, RESULTS / "techniques" / "loss_over_time.svg")
            write_page(
                "techniques", command=command("experiments.techniques"), budget=_BUDGET_STEPS, steps=_STEPS,
                compute_ms=_COMPUTE_MS, tables=tables, seeds=len(SEEDS), links=", ".join(map(str, LINKS_MBIT)),
            )  # fmt: skip


def _words(technique: Technique, run_dir: Path, *, steps: int, more: Sequence[str]) -> list[str]:
    return [
        *("train", "gpt2", "--preset", "tiny", "--steps", str(steps), "--batch-size", str(_BATCH)),
        *("--progress", "off", "--no-summary", "--resume", "never", *technique.options, *more),
        *("--run-dir", str(run_dir)),
    ]


def is_done(run_dir: Path) -> bool:
    """Return whether a run has a result."""
    return bool(_result(run_dir))


def _result(run_dir: Path) -> dict[str, Any]:
    run = RunDirectory(run_dir)
    attempts = run.attempts() if run_dir.exists() else []
    path = attempts[-1].result_json if attempts else run_dir / "none"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


def run_losses(folder: Path) -> None:
    """Train with each technique that has losses of its own, with each seed, on this machine alone."""
    for seed in SEEDS:
        for technique in TECHNIQUES:
            run_dir = folder / f"{technique.folder}-{seed}"
            if technique.same_loss or is_done(run_dir):
                continue
            more = ["--seed", str(seed), "--ranks", "4", "--learning-rate", "0.001", "--trace-detail", "steps"]
            more += ["--eval-every", str(_EVAL_EVERY), "--eval-batches", "4"]
            words = _words(technique, run_dir, steps=_STEPS, more=more)
            subprocess.run([sys.executable, "-m", "hpcpace", *words], env={**os.environ, **ALONE}, check=True)
            print(f"  {technique.name}, seed {seed}: {_result(run_dir)['evaluations'][-1]['loss']:.4f}", flush=True)


def run_times(folder: Path) -> None:
    """Train some steps with each technique on each link of the lab."""
    folder.mkdir(exist_ok=True)
    for mbit in LINKS_MBIT:
        left = [one for one in TECHNIQUES if not is_done(folder / f"{one.folder}-{mbit}")]
        if left:
            with study_lab("techniques", link_bps=mbit * 1e6) as lab:
                for technique in left:
                    _time(JobQueue(lab), folder, technique, mbit)


def _time(queue: JobQueue, folder: Path, technique: Technique, mbit: int) -> None:
    run_dir = folder / f"{technique.folder}-{mbit}"
    more = ["--compute-ms", f"{_COMPUTE_MS:g}", "--warmup-steps", str(_WARMUP)]
    words = _words(technique, run_dir, steps=_WARMUP + _TIMED_STEPS, more=more)
    size = {"nodes": _LAYOUT.servers, "per_node": _LAYOUT.ranks_per_server}
    job = queue.run_ranks(f"hpcpace {' '.join(words)}", cwd=folder, timeout_s=_TIMEOUT_S, **size)
    print(f"  {technique.name}, {mbit} Mb/s: {job.state}", flush=True)


def timed(folder: Path, technique: Technique, mbit: int) -> RunFigures:
    """Return the figures of a technique on a link."""
    run_dir = folder / "times" / f"{technique.folder}-{mbit}"
    setup = Setup(
        model="gpt2", preset="tiny", layout=_LAYOUT, parallelism="data", batch=technique.batch // _LAYOUT.num_ranks
    )
    return attempt_figures(RunDirectory(run_dir).last_attempt(), setup, _result(run_dir))


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Held-out losses of a technique: tokens, (num_evaluations,), and losses, (num_seeds, num_evaluations)."""

    tokens: Any
    losses: Any

    def at(self, tokens: float) -> Any:
        """Return the loss of each seed after a number of tokens, at most those trained: (num_seeds,)."""
        return np.array([np.interp(tokens, self.tokens, losses) for losses in self.losses])


def curve(folder: Path, technique: Technique) -> Curve:
    """Return the losses of a technique, which are the plain ones where it computes the same."""
    source = PLAIN if technique.same_loss else technique
    found = [_result(folder / "losses" / f"{source.folder}-{seed}")["evaluations"] for seed in SEEDS]
    steps = np.array([evaluation["num_steps"] for evaluation in found[0]])
    losses = np.array([[evaluation["loss"] for evaluation in evaluations] for evaluations in found])
    return Curve(tokens=steps * source.tokens_per_step, losses=losses)


def results(folder: Path) -> Mapping[int, str]:
    """Return a table for each link, by its rate in Mb/s."""
    plain = curve(folder, PLAIN)
    found = {}
    for mbit in LINKS_MBIT:
        base = timed(folder, PLAIN, mbit)
        rows = [_row(folder, technique, mbit, plain, base) for technique in TECHNIQUES]
        head = ("technique", "step", "tokens/s", "bytes a token", "loss, equal tokens", "loss, equal time", "pays")
        found[mbit] = table(head, rows)
    return found


def _row(folder: Path, technique: Technique, mbit: int, plain: Curve, base: RunFigures) -> tuple[str, ...]:
    figures, own = timed(folder, technique, mbit), curve(folder, technique)
    assert figures.samples_per_s and base.samples_per_s and figures.step_ms
    speed = figures.samples_per_s / base.samples_per_s
    volume = (figures.network_bytes_per_sample or 0.0) / (base.network_bytes_per_sample or math.inf)
    all_tokens, budget = _STEPS * PLAIN.tokens_per_step, _BUDGET_STEPS * PLAIN.tokens_per_step
    by_tokens = own.at(all_tokens) - plain.at(all_tokens)
    by_time = own.at(speed * budget) - plain.at(budget)
    return (
        technique.name,
        f"{1e3 * technique.tokens_per_step / figures.samples_per_s:.0f} ms",
        f"{speed:.2f}",
        f"{volume:.2f}",
        "same" if technique.same_loss else _difference(by_tokens),
        _difference(by_time),
        "" if technique is PLAIN else pays(by_time),
    )


_LEAST_GAIN = 0.005
"""Difference in loss below which two runs count as equal."""


def pays(differences: Any) -> str:
    """Return whether losses after equal time are better, by their differences from the plain run, (num_seeds,)."""
    low, high = interval(differences)
    return "yes" if high < -_LEAST_GAIN else "no" if low > _LEAST_GAIN else "no difference"


def interval(differences: Any) -> tuple[float, float]:
    """Return the 95 % interval of the mean of paired differences."""
    half = _T_95 * float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    return float(np.mean(differences)) - half, float(np.mean(differences)) + half


def _difference(differences: Any) -> str:
    low, high = interval(differences)
    return f"{np.mean(differences):+.3f} [{low:+.3f}, {high:+.3f}]"


def draw(folder: Path, path: Path) -> None:
    """Draw the mean loss over time on each link."""
    figure, axes = plt.subplots(1, len(LINKS_MBIT), figsize=(12, 4), sharey=True, constrained_layout=True)
    for mbit, ax in zip(LINKS_MBIT, axes, strict=True):
        base = timed(folder, PLAIN, mbit).samples_per_s or 1.0
        for technique in TECHNIQUES:
            own, speed = curve(folder, technique), timed(folder, technique, mbit).samples_per_s or 1.0
            is_plain = technique is PLAIN
            ax.plot(
                own.tokens / speed, own.losses.mean(axis=0), label=technique.name,
                color="black" if is_plain else None, linewidth=2.5 if is_plain else 1.2,
            )  # fmt: skip
        ax.set_xlim(0, _STEPS * PLAIN.tokens_per_step / base)
        ax.set_xlabel("seconds of training")
        ax.set_title(f"{mbit} Mb/s")
    axes[0].set_ylabel("held-out loss, mean of seeds")
    axes[-1].legend(fontsize="x-small")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
