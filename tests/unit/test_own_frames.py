"""Which line of a stack is the job's own."""

from __future__ import annotations

from cases import each_case

from hpcpace.core.text import own_frame, short_frame

OWN = "/home/me/train.py:12 in validate"
TORCH = "/opt/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:3252 in all_reduce"


@each_case(
    ("frames", "expected"),
    [
        ((), ""),
        ((OWN, "/home/me/data.py:3 in load", TORCH), "/home/me/data.py:3 in load"),
        ((OWN, "/usr/lib/python3.12/threading.py:655 in wait", "<string>:1 in <module>"), OWN),
        (("<frozen runpy>:1 in run", TORCH), TORCH),
    ],
)
def test_the_innermost_frame_that_is_of_no_library(frames: tuple[str, ...], expected: str) -> None:
    assert own_frame(frames) == expected


@each_case(("frame", "expected"), [(OWN, "train.py:12 in validate"), ("train.py:1 in f", "train.py:1 in f"), ("", "")])
def test_a_frame_without_its_folder(frame: str, expected: str) -> None:
    assert short_frame(frame) == expected
