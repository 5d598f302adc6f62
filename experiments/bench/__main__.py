"""All benchmarks, one after the other: `make bench`. Each is a module with a main of its own and prints its figures."""

from __future__ import annotations

import subprocess
import sys

BENCHES = (
    ("startup",),
    ("recorder",),
    ("simulation",),
    ("trace_size",),
    ("collective",),
    ("overhead",),
    ("overhead", "--preset", "small", "--seq-len", "64", "--batch-size", "2", "--block-steps", "2", "--pairs", "20"),
    ("tokens",),
    ("compiled",),
    ("images",),
    ("report_speed", "--all", "--repeats", "1"),
    ("audit",),
)


def main() -> None:
    failed = []
    for name, *options in BENCHES:
        print(f"== python -m experiments.bench.{' '.join((name, *options))}", flush=True)
        if subprocess.run([sys.executable, "-m", f"experiments.bench.{name}", *options], check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
