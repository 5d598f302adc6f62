"""Measures GPT-2 tokens/s in one process with and without `--compile`: the same weights, optimizer, data and threads.

It needs a C++ compiler. Blocks are compiled before anything is timed; equal losses and gradients are checked first.
`python -m experiments.bench.compiled`
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from experiments.bench.models import check_same_gradients, compare, training_step
from hpcpace.train.data import open_text
from hpcpace.train.data_parallel import build_optimizer
from hpcpace.train.models import build_gpt2
from hpcpace.train.parallel import compile_pieces
from hpcpace.train.presets import GPT2_PRESETS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--preset", choices=tuple(GPT2_PRESETS), default="small")
    args = parser.parse_args()
    text = open_text(None, args.seq_len)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        rows = text.batch(step, seed=0, batch_size=args.batch_size, seq_len=args.seq_len, rows=slice(None))
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1], tokens[:, 1:].contiguous()

    models = [build_gpt2(GPT2_PRESETS[args.preset], seed=0) for _ in range(2)]
    compiled, plain = models
    compile_pieces(compiled)
    begin_s = time.perf_counter()
    mine = compiled(*batch(0))
    mine.backward()
    print(f"the first step with --compile took {time.perf_counter() - begin_s:.1f} s")
    theirs = plain(*batch(0))
    theirs.backward()
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0)
    check_same_gradients(compiled, dict(plain.named_parameters()), tolerance=1e-3)
    for model in models:
        model.zero_grad()
    print(f"same work: both losses {float(mine.detach()):.6f}, gradients agree")
    print(f"GPT-2 {args.preset}, float32, batch {args.batch_size} x {args.seq_len}")
    steps = [training_step(model, build_optimizer(model.parameters(), learning_rate=3e-4)) for model in models]
    compare(
        {"--compile": steps[0], "without": steps[1]},
        batch,
        num_pairs=args.pairs,
        samples_per_step=args.batch_size * args.seq_len,
        unit="tokens",
    )


if __name__ == "__main__":
    main()
