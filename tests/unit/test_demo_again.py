from __future__ import annotations

from cases import each_case

from experiments.demo.__main__ import DemoRun, row

STRAGGLER = "persistent straggler"


@each_case(
    ("name", "exit_code", "mode", "first", "is_right"),
    [
        ("clean", 0, "healthy", "", True),
        ("clean", 1, "healthy", "", False),  # something else is wrong with it
        ("clean", 1, "ranks share cores", "", False),
        ("clean", 3, "cannot tell", "", False),
        ("slow-rank-2", 1, STRAGGLER, "rank 2", True),
        ("slow-rank-2", 1, STRAGGLER, "rank 1", False),
        ("slow-rank-2", 1, "communication-bound", "rank 2", False),
        ("slow-rank-2", 0, "healthy", "", False),
    ],
)
def test_the_clean_run_has_to_be_healthy_and_the_slow_one_to_name_rank_2_first(name, exit_code, mode, first, is_right):
    run = DemoRun(
        name=name,
        beside="nothing",
        load=2.0,
        duration_s=30.0,
        exit_code=exit_code,
        mode=mode,
        first=first,
        share=0.2 if first else 0.0,
        also=(),
    )
    assert run.is_right == is_right
    assert row(7, run).endswith(f"| {exit_code} | {'yes' if is_right else 'NO'} |")
