from __future__ import annotations

import pytest
from cases import each_case

from hpcpace.train.result import Bar, Lines, ProgressView, progress_view


def test_a_log_gets_a_line_when_losses_have_become_known(capsys):
    with progress_view("auto", num_steps=20) as view:
        view.show(4, losses=[], samples_per_s=1234.0)
        view.show(6, losses=[5.0, 4.5, 4.4, 4.3, 4.25], samples_per_s=1234.0)
        view.show(7, losses=[5.0, 4.5, 4.4, 4.3, 4.25], samples_per_s=1234.0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("step 5/20  loss 4.2500  1.23k tokens/s  ETA ")


def test_a_bar_shows_step_loss_and_rate(capsys):
    with progress_view("bar", num_steps=20) as view:
        view.show(7, losses=[5.0], samples_per_s=1234.0)
    last = capsys.readouterr().err
    assert "7/20" in last
    assert "loss 5.0000  1.23k tokens/s" in last


@each_case(("style", "kind"), [("auto", Lines), ("lines", Lines), ("bar", Bar), ("off", ProgressView)])
def test_the_style_chooses_the_view(style, kind):
    assert type(progress_view(style, num_steps=1)) is kind


def test_a_resumed_run_counts_its_own_steps_for_the_time_left(capsys, monkeypatch):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr("hpcpace.train.result.time.monotonic", lambda: next(clock))
    with progress_view("lines", num_steps=20, first_step=10, unit="images") as view:
        view.show(10, losses=[1.0] * 10, samples_per_s=5.0)
        view.show(15, losses=[1.0] * 15, samples_per_s=5.0)
    assert capsys.readouterr().err == "step 15/20  loss 1.0000  5 images/s  ETA 10.0 s\n"


def test_the_last_step_has_no_time_left(capsys):
    with progress_view("lines", num_steps=2) as view:
        view.show(2, losses=[1.0, 0.5], samples_per_s=5.0)
    assert capsys.readouterr().err == "step 2/2  loss 0.5000  5 tokens/s\n"


@pytest.mark.parametrize("style", ["bar", "lines"])
def test_a_note_is_shown(style, capsys):
    with progress_view(style, num_steps=20) as view:
        view.note("after 5 steps  accuracy 12.0 %")
    assert "after 5 steps  accuracy 12.0 %" in capsys.readouterr().err


def test_the_other_ranks_show_nothing(capsys):
    with progress_view("off", num_steps=20) as view:
        view.note("news")
    assert capsys.readouterr().err == ""
