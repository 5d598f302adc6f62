"""How often steps of known forms are inside the intervals of their law: `python -m experiments.scale_lab.forms`.

Series of 1, 2, 4 nodes and so on, one run of each, whose steps follow a formula, with noise on each run (and on each
part of its step). What is held against the intervals is one more run at 2 and at 4 times the largest size. Only
figures of runs are made, as a report would find them, and no traces.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hpcpace.core.text import NS_PER_MS
from hpcpace.runs.scaling.result import scaling_of
from hpcpace.runs.scaling.samples import PARTS, Sample

SIZES = ((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16))
# Expected maxima of up to 64 standard normal values, in the mean of draws.
_MAXIMA = np.maximum.accumulate(np.random.default_rng(0).standard_normal((20_000, 65)), axis=1).mean(axis=0)
_MAXIMA[0] = 0.0


@dataclass(frozen=True, kw_only=True)
class Form:
    """A job.

    Attributes:
        parts_ms: of a step on some nodes, by name of `PARTS`.
        is_strong: whether the work is divided among the nodes.
        is_alone: whether only the step time is known.
        ranks: of a node.
        jitter: of a rank's step, standard deviation as a share of its work.
    """

    parts_ms: Callable[[int], Mapping[str, float]]
    is_strong: bool = False
    is_alone: bool = False
    ranks: int = 1
    jitter: float = 0.02

    def parts(self, nodes: int) -> dict[str, float]:
        """Return the parts of a step, milliseconds."""
        given = {**dict.fromkeys(PARTS, 0.0), **self.parts_ms(nodes)}
        return given if self.is_alone else {**given, "jitter": self.jitter * given["work"] * float(_MAXIMA[nodes - 1])}

    def sample(self, nodes: int, noise: float, random: np.random.Generator) -> Sample:
        """Return a run."""
        parts_ns = {
            name: value * NS_PER_MS * float(np.exp(noise * random.standard_normal()))
            for name, value in self.parts(nodes).items()
        }
        step_ns, batch = sum(parts_ns.values()), 64.0 if self.is_strong else 64.0 * nodes
        found = Sample(
            name=f"n{nodes}",
            path=f"n{nodes}",
            num_nodes=nodes,
            num_ranks=nodes * self.ranks,
            step_ns=step_ns,
            samples_per_s=batch / step_ns * 1e9,
            batch=batch,
            parts_ns=parts_ns,
            growth=tuple((k, 1 + self.jitter * float(_MAXIMA[k - 1])) for k in range(1, nodes + 1)),
        )
        return replace(found, parts_ns=None, unknown="speeds alone") if self.is_alone else found


def _alone(step_ms: Callable[[int], float], *, is_strong: bool = False) -> Form:
    return Form(parts_ms=lambda nodes: {"work": float(step_ms(nodes))}, is_strong=is_strong, is_alone=True)


def _transfer(transfer_ms: Callable[[int], float], ranks: int = 1) -> Form:
    return Form(parts_ms=lambda nodes: {"work": 100.0, "transfer": float(transfer_ms(nodes))}, ranks=ranks)


FORMS: Mapping[str, Form] = {
    "step 5 + 95/n": _alone(lambda n: 5 + 95 / n, is_strong=True),
    "step 5 + 95/n + 5 log n": _alone(lambda n: 5 + 95 / n + 5 * np.log2(n), is_strong=True),
    "step 3 + 97/n + (n - 1)": _alone(lambda n: 3 + 97 / n + n - 1, is_strong=True),
    "step 100": _alone(lambda n: 100),
    "step 100 + 30 (n - 1)/n": _alone(lambda n: 100 + 30 * (n - 1) / n),
    "step 100 + 5 log n": _alone(lambda n: 100 + 5 * np.log2(n)),
    "step 100 + 10 (sqrt n - 1)": _alone(lambda n: 100 + 10 * (np.sqrt(n) - 1)),
    "step 100 + (n - 1)": _alone(lambda n: 100 + n - 1),
    "step 100 + 30 (n - 1)/n + (n - 1)": _alone(lambda n: 100 + 30 * (n - 1) / n + n - 1),
    "transfer 30 (n - 1)/n": _transfer(lambda n: 30 * (n - 1) / n),
    "transfer 15 (sqrt n - 1)": _transfer(lambda n: 15 * (np.sqrt(n) - 1)),
    "transfer 30 (n - 1)/n + (n - 1)": _transfer(lambda n: 30 * (n - 1) / n + n - 1),
    "8 ranks, transfer 10 + 20 (n - 1)/n": _transfer(lambda n: 10 + 20 * (n - 1) / n, 8),
    "8 ranks, transfer 40 (8n - 1)/8n": _transfer(lambda n: 40 * (8 * n - 1) / (8 * n), 8),
    "8 ranks, transfer 5 log 8n": _transfer(lambda n: 5 * np.log2(8 * n), 8),
    "other 4 (n - 1)": Form(parts_ms=lambda n: {"work": 100.0, "other": 4.0 * (n - 1)}),
    "work 100 + 8 log n": Form(parts_ms=lambda n: {"work": 100 + 8 * float(np.log2(n))}),
    "imbalance 15": Form(parts_ms=lambda n: {"work": 100.0, "imbalance": 15.0 * (n > 1)}),
    "work 100/n, jitter 20 % of it": Form(parts_ms=lambda n: {"work": 100 / n}, is_strong=True, jitter=0.2),
    "not a form of the law: step 100 + 0.3 n log n": _alone(lambda n: 100 + 0.3 * n * np.log2(n)),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.scale_lab.forms", description=__doc__)
    parser.add_argument("--series", type=int, default=20, help="of each form, number of sizes and noise")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.003, 0.01], help="of each run, relative")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random = np.random.default_rng(args.seed)
    print("sizes: inside at 2 times, at 4 times, and how many times the lower end the upper one is, median")
    for name, form in FORMS.items():
        rows = []
        for sizes in SIZES:
            found = np.array([_held(form, sizes, noise, random) for noise in args.noise for _ in range(args.series)])
            share, width = found[:, :, 0].mean(axis=0), np.median(found[:, :, 1], axis=0)
            rows.append(
                f"{len(sizes)}: {100 * share[0]:3.0f} % {100 * share[1]:3.0f} % ({width[0]:.2f}, {width[1]:.2f})"
            )
        print(f"{name:46}", *rows, sep="  ", flush=True)


def _held(form: Form, sizes: tuple[int, ...], noise: float, random: np.random.Generator) -> list[list[float]]:
    """Return for 2 and 4 times the largest size whether a run is inside, and the ratio of the ends of the interval."""
    found = scaling_of([form.sample(nodes, noise, random) for nodes in sizes])
    rows = []
    for size in found.predictions:
        step_ns, (low, high) = form.sample(size.num_units, noise, random).step_ns or 0.0, size.step_interval_ns
        rows.append([float(low <= step_ns <= high), high / low])
    return rows


if __name__ == "__main__":
    main()
