from __future__ import annotations

import pytest

from hpcpace.train.progress import Bar, Lines, Silence, progress_view


def test_a_log_gets_a_line_when_losses_have_become_known(capsys):
    with progress_view("auto", num_steps=20) as view:
        view.show(4, losses=[], tokens_per_s=1234.0)
        view.show(6, losses=[5.0, 4.5, 4.4, 4.3, 4.25], tokens_per_s=1234.0)
        view.show(7, losses=[5.0, 4.5, 4.4, 4.3, 4.25], tokens_per_s=1234.0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("step 5/20  loss 4.2500  1.23k tokens/s  ETA ")


def test_a_bar_shows_step_loss_and_rate(capsys):
    with progress_view("bar", num_steps=20) as view:
        view.show(7, losses=[5.0], tokens_per_s=1234.0)
    last = capsys.readouterr().err
    assert "7/20" in last
    assert "loss 5.0000  1.23k tokens/s" in last


@pytest.mark.parametrize(("style", "kind"), [("auto", Lines), ("lines", Lines), ("bar", Bar), ("off", Silence)])
def test_the_style_chooses_the_view(style, kind):
    assert isinstance(progress_view(style, num_steps=1), kind)
