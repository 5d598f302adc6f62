"""The verdict on a run for the loggers that the job has: numbers in the framework's way, words in the logger's.

TensorBoard takes texts, W&B a summary of the run, MLflow tags; other loggers get the numbers alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcpace.observe.card import CardVerdict


def numbers_of(verdict: CardVerdict) -> dict[str, float]:
    """Return what a verdict costs and how sure it is, in percent."""
    return {
        "hpcpace/cost_percent": round(100 * verdict.loss_share, 1),
        "hpcpace/confidence_percent": round(100 * verdict.confidence, 1),
    }


def words_of(verdict: CardVerdict) -> dict[str, str]:
    """Return a verdict as a sentence, and its mode."""
    return {"hpcpace/verdict": verdict.headline, "hpcpace/mode": verdict.mode}


def log_words(target: Any, words: Mapping[str, str], *, run_id: str = "") -> None:
    """Log texts where that is possible.

    Args:
        target: a SummaryWriter, a run of W&B, the module or a client of MLflow, or another logger, which takes none.
        words: texts by name.
        run_id: of the run, for a client of MLflow.
    """
    if callable(add := getattr(target, "add_text", None)):
        for name, text in words.items():
            add(name, text)
    elif callable(update := getattr(getattr(target, "summary", None), "update", None)):
        update(dict(words))
    elif callable(tag := getattr(target, "set_tag", None)):
        for name, text in words.items():
            tag(*([run_id] if run_id else []), name, text)
