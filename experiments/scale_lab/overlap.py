"""How often jobs that hide their communication are inside the intervals of the law: `... scale_lab.overlap`.

Each job is replayed layer by layer and bucket by bucket, for all nodes: layers of unequal length, rings with bandwidth
and latency, one queue of communication, noise of each layer on each node. Nothing of the law is used. Series of nodes
are held against one more run at 2, 4 and 16 times the largest size, with what reports know of hidden transfers, and
without that.

Options:
  --jobs N                draw this many jobs for each series of sizes [20]
  --seed N  [0]
  --kind ddp|fsdp|tensor  make all jobs of this kind
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experiments.options import command_line
from hpcpace.diagnosis.summary import Overlap
from hpcpace.metrics.growth import maximum_weights
from hpcpace.runs.scaling.result import predict
from hpcpace.runs.scaling.samples import Sample
from hpcpace.runs.scaling.sizes import series_of

Floats = NDArray[np.float64]
SIZES = ((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16), (2, 4, 8, 16))
FACTORS = (2, 4, 16)
_NUM_STEPS = 24
_OPTIMIZER = 0.03  # of the work
_RUN_NOISE = 0.007  # of a whole run, relative


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job in milliseconds, one rank on each node.

    Attributes:
        kind: ddp, fsdp, or both of tensor parallelism within nodes and ddp (tensor).
        layer: forward work of each layer on one node, (num_layers,); backward takes twice that.
        volume: transfer of each layer's weights once around a large ring, (num_layers,).
        hop: latency of one hop.
        inside: blocking transfers within a node for each layer.
        noise: of a layer on a node, relative; tail is the chance of an event of a whole layer's length.
        is_strong: whether the work is divided among the nodes.
        growth: of the transfers with each doubling, relative, as of congestion.
    """

    kind: str
    layer: Floats
    volume: Floats
    hop: float
    inside: float
    noise: float
    tail: float
    is_strong: bool
    growth: float

    @classmethod
    def drawn(cls, random: np.random.Generator) -> Job:
        """Return any job."""
        num_layers = int(random.integers(6, 40))
        work = float(np.exp(random.uniform(np.log(3.0), np.log(600.0))))
        layer = random.gamma(8.0, size=num_layers)
        volume = random.gamma(random.choice([2.0, 8.0]), size=num_layers)
        ratio = random.uniform(0.1, 1.2)  # of all transfers in a large ring to the work that may hide them
        layer *= work / layer.sum() / 3
        volume *= ratio * work / volume.sum()
        return cls(
            kind=str(random.choice(["ddp", "ddp", "fsdp", "tensor"])),
            layer=layer,
            volume=volume,
            hop=float(random.choice([0.0, 0.001, 0.004])) * work / num_layers * random.uniform(0.3, 1.0),
            inside=float(random.uniform(0.0, 0.05)) * work / num_layers,
            noise=float(random.uniform(0.002, 0.05)),
            tail=float(random.choice([0.0, 0.0, 0.002])),
            is_strong=bool(random.random() < 0.3),
            growth=float(random.choice([0.0, 0.0, 0.05])),
        )

    def once(self, num_nodes: int, part: float) -> Floats:
        """Return how long each layer's operation takes, (num_layers,): `part` of its volume."""
        if num_nodes == 1:
            return np.zeros(len(self.layer))
        steps = (num_nodes - 1) / num_nodes
        return (self.volume * steps * part + self.hop * (num_nodes - 1)) * (1 + self.growth * np.log2(num_nodes))

    def run(self, num_nodes: int, random: np.random.Generator) -> Sample:
        """Return a run as a report measures it."""
        shape = (_NUM_STEPS, 3, len(self.layer), num_nodes)
        factor = 1 + self.noise * random.standard_normal(shape) + (random.random(shape) < self.tail)
        work = self.layer[:, np.newaxis] / (num_nodes if self.is_strong else 1) * np.maximum(factor, 0.1)
        steps = _Replay(self, num_nodes, random)
        for step in range(_NUM_STEPS):
            steps.add(work[step, 0], work[step, 1] + work[step, 2])
        return steps.sample()


class _Queue:
    """The operations of one step in their order: when they begin, end, and how long each node waits for them."""

    def __init__(self) -> None:
        self.free = 0.0
        self.rows: list[tuple[str, Floats, float, float]] = []

    def issue(self, phase: str, at: Floats, length: float) -> float:
        """Return when an operation ends that nodes are ready for at some times."""
        begin = max(float(at.max()), self.free)
        self.free = begin + length
        self.rows.append((phase, at, begin, self.free))
        return self.free


class _Replay:
    def __init__(self, job: Job, num_nodes: int, random: np.random.Generator) -> None:
        self.job, self.num_nodes, self.random = job, num_nodes, random
        self.steps: list[float] = []
        self.own: list[Floats] = []
        self.waits: list[float] = []
        self.transfers: list[float] = []
        self.of_phase = {"forward": np.zeros(3), "backward": np.zeros(3)}

    def add(self, forward: Floats, backward: Floats) -> None:
        """Replay a step; work of each layer on each node, (num_layers, num_nodes)."""
        job, queue, is_alone = self.job, _Queue(), self.num_nodes == 1
        now, blocked = np.zeros(self.num_nodes), []
        reduced = job.once(self.num_nodes, 1.0 if job.kind != "fsdp" else 1 / 3) * self._jitter()
        gathered = job.once(self.num_nodes, 1 / 3) * self._jitter()
        layers = len(job.layer)
        ends = {}
        for phase, work, order in (("forward", forward, range(layers)), ("backward", backward, range(layers)[::-1])):
            begun, first = now.copy(), None
            done = queue.issue(phase, now, gathered[order[0]]) if job.kind == "fsdp" and not is_alone else 0.0
            for place, layer in enumerate(order):
                if job.kind == "fsdp" and not is_alone:
                    blocked.append((phase, now.copy(), max(done, 0.0)))
                    now = np.maximum(now, done)
                    if place + 1 < layers:
                        done = queue.issue(phase, now, gathered[order[place + 1]])
                now = now + work[layer]
                if job.kind == "tensor":
                    now = now + job.inside
                if phase == "backward" and not is_alone:
                    ends[layer] = queue.issue(phase, now, reduced[layer])
                    first = now.copy() if first is None else first
            window = now - (begun if job.kind == "fsdp" else first if first is not None else now)
            self.of_phase[phase][2] += 0.0 if is_alone else float(window.mean())
        if not is_alone:
            last = max(ends.values())
            blocked.append(("backward", now.copy(), last))
            now = np.maximum(now, last)
        self._account(queue, blocked, now, forward.sum(axis=0) + backward.sum(axis=0))

    def _jitter(self) -> Floats:
        return np.asarray(1 + 0.03 * self.random.standard_normal(len(self.job.layer)))

    def _account(self, queue: _Queue, blocked: list[tuple[str, Floats, float]], now: Floats, own: Floats) -> None:
        """Divide what blocked each node into waits for the last one and transfers, operation by operation."""
        waited = transferred = 0.0
        start, end = (np.array([row[place] for row in queue.rows]) for place in (2, 3))
        is_backward = np.array([row[0] == "backward" for row in queue.rows], np.bool_)
        for phase, at, until in blocked:
            begin = np.minimum(at, until)[:, np.newaxis]
            moving = np.maximum(np.minimum(end, until) - np.maximum(start, begin), 0.0).mean(axis=0)
            covered = float(moving.sum())
            transferred += covered
            held = float((until - begin).mean())
            waited += held - covered
            self.of_phase["forward"][1] += float(moving[~is_backward].sum())
            self.of_phase["backward"][1] += float(moving[is_backward].sum())
            if self.job.kind == "fsdp" and until != blocked[-1][2]:
                self.of_phase[phase][2] -= held  # what is blocked inside a pass is no window
        self.of_phase["forward"][0] += float((end - start)[~is_backward].sum())
        self.of_phase["backward"][0] += float((end - start)[is_backward].sum())
        optimizer = _OPTIMIZER * float(own.mean())
        self.steps.append(float(now.max()) + optimizer)
        self.own.append(own + optimizer)
        self.waits.append(waited)
        self.transfers.append(transferred)

    def sample(self) -> Sample:
        """Return the figures of the run, times in nanoseconds."""
        job, num_steps = self.job, len(self.steps)
        ms = 1e6 * float(np.exp(_RUN_NOISE * self.random.standard_normal()))
        own = np.array(self.own)
        inside = job.inside * 2 * len(job.layer) if job.kind == "tensor" else 0.0
        step, work = float(np.mean(self.steps)), float(own.mean())
        means = own.mean(axis=0)
        noise = own.std(axis=0, ddof=1).mean() / np.sqrt(num_steps) if num_steps > 1 else 0.0
        variance = float(np.var(means, ddof=1)) if len(means) > 1 else 0.0
        kept = np.sqrt(max(1 - noise**2 / variance, 0.0)) if variance else 0.0
        wait, transfer = float(np.mean(self.waits)), float(np.mean(self.transfers)) + inside
        imbalance = min(max(float(means.max() - means.mean()) - 2 * noise, 0.0), wait)
        parts = {"work": work, "imbalance": imbalance, "jitter": wait - imbalance, "transfer": transfer}
        parts["other"] = max(step - sum(parts.values()), 0.0)
        counts = np.arange(1, self.num_nodes + 1)
        ordered = np.sort(own, axis=1)
        lasting = maximum_weights(self.num_nodes, counts) @ np.sort(work + kept * (means - means.mean())) / work
        amplified = (maximum_weights(self.num_nodes, counts) @ ordered.mean(axis=0)) / work
        growth = tuple((int(k), float(a - b + 1)) for k, a, b in zip(counts, amplified, lasting, strict=True))
        rows = [
            Overlap(
                phase=phase,
                op="all_reduce",
                is_across=True,
                transfer_ns=sums[0] / num_steps * ms,
                exposed_ns=sums[1] / num_steps * ms,
                window_ns=max(sums[2] / num_steps, 0.0) * ms,
            )
            for phase, sums in self.of_phase.items()
            if sums[0]
        ]
        if inside:
            blocks = {"transfer_ns": inside * ms, "exposed_ns": inside * ms, "window_ns": 0.0}
            rows.append(Overlap(phase="backward", op="all_gather", is_across=False, **blocks))
        batch = 64.0 if job.is_strong else 64.0 * self.num_nodes
        return Sample(
            name=f"n{self.num_nodes}",
            path=f"n{self.num_nodes}-{self.random.integers(1 << 40)}",
            num_nodes=self.num_nodes,
            num_ranks=self.num_nodes,
            step_ns=step * ms,
            samples_per_s=batch / (step * ms) * 1e9,
            batch=batch,
            parts_ns={name: value * ms for name, value in parts.items()},
            growth=growth,
            least_work=float((work + kept * (means - work)).min() / work),
            overlap=tuple(rows),
        )


def main() -> None:
    args = command_line(__doc__)
    print("inside at 2, 4 and 16 times, and the upper over the lower end, median | without what is hidden")
    for sizes in SIZES:
        rows: dict[bool, list[list[tuple[float, float]]]] = {True: [], False: []}
        for number in range(args.jobs):
            random = np.random.default_rng([args.seed, number])
            job = Job.drawn(random)
            for is_known, found in held(replace(job, kind=args.kind or job.kind), sizes, random).items():
                rows[is_known].append(found)
        print(f"{', '.join(map(str, sizes)):16}", _line(rows[True]), "|", _line(rows[False]), flush=True)


def held(job: Job, sizes: Sequence[int], random: np.random.Generator) -> dict[bool, list[tuple[float, float]]]:
    """Return whether runs of `FACTORS` times the largest size are inside, and the ratio of the interval's ends.

    By whether it is known what is hidden.
    """
    samples = [job.run(size, random) for size in sizes]
    targets = [factor * sizes[-1] for factor in FACTORS]
    truth = [job.run(size, random).step_ns or 0.0 for size in targets]
    found = {}
    for is_known in (True, False):
        used = samples if is_known else [replace(sample, overlap=None) for sample in samples]
        predicted = predict(series_of(used), targets)
        ends = zip(truth, predicted.low_ns.tolist(), predicted.high_ns.tolist(), strict=True)
        found[is_known] = [(float(low <= step_ns <= high), high / low) for step_ns, low, high in ends]
    return found


def _line(rows: list[list[tuple[float, float]]]) -> str:
    table = np.array(rows)
    inside, width = table[:, :, 0].mean(axis=0), np.median(table[:, :, 1], axis=0)
    return "  ".join(f"{100 * share:3.0f} % ({ratio:.2f})" for share, ratio in zip(inside, width, strict=True))


if __name__ == "__main__":
    main()
