"""Sessions for training loops that frameworks own; each module imports its framework.

What fails in here is one warning, and never reaches the framework.

TensorBoard takes texts, W&B a summary of the run, MLflow tags; other loggers get the numbers alone.
"""

from __future__ import annotations

import atexit
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from hpcpace import Session
from hpcpace.core.environment import process_redaction
from hpcpace.observe.card import CardVerdict
from hpcpace.observe.ends import error_of_program
from hpcpace.observe.guest import replace
from hpcpace.trace.schema import StepFlag

_MARKS = {"eval": StepFlag.EVAL, "checkpoint": StepFlag.CHECKPOINT}
_DEEPEST_BATCH = 4


class TracedLoop:
    """Opens a session around a framework's loop and reports steps, samples, evaluations and checkpoints.

    Args:
        settings: the arguments of `hpcpace.session`.

    Attributes:
        log_verdict: logs the verdict on rank 0, which waits for its card; None where nobody logs it.

    Raises:
        TypeError: `hpcpace.session` has no such argument.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.log_verdict: Callable[[CardVerdict], None] | None = None
        inspect.signature(Session).bind(**settings)
        self._settings = dict(settings)
        self._session: Session | None = None
        self._phases: dict[str, AbstractContextManager[Any]] = {}
        self._replaced = ExitStack()
        self._flags = StepFlag.NONE
        self._samples = 0
        self._is_off = False
        self._has_warned = False

    def begin(self, model: Any = None) -> None:
        """Open the session; the ranks must be connected. Collective: every rank calls this."""
        with self.guarded():
            self.end()
            session = Session(**self._settings).__enter__()
            self._is_off = session.is_opted_out
            if self._is_off:
                return
            self._session = session
            atexit.register(self.abandon)
            if model is not None:
                self._session.watch(model)

    def add_samples(self, num_samples: int) -> None:
        """Count samples of this rank for the step that is running."""
        self._samples += num_samples

    def step(self) -> None:
        """End a step with the samples that were counted since the last one."""
        with self.guarded():
            samples, self._samples = self._samples, 0
            flags, self._flags = self._flags, StepFlag.NONE
            if self._session is not None:
                self._session.step(samples, flags=flags)

    def metrics(self) -> dict[str, float]:
        """Return the figures of the steps since the last call, see `Session.metrics`; nothing without a session."""
        return {} if self._session is None else self._session.metrics()

    def begin_phase(self, name: str) -> None:
        """Begin a phase that is not running yet; the names are those of `Session.phase`."""
        with self.guarded():
            if self._session is not None and name not in self._phases:
                phase = self._session.phase(name)
                phase.__enter__()
                self._phases[name] = phase
                self._flags |= _MARKS.get(name, StepFlag.NONE)

    def end_phase(self, name: str) -> None:
        """End a phase if it is running."""
        with self.guarded():
            phase = self._phases.pop(name, None)
            if phase is not None:
                phase.__exit__(None, None, None)

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace a method of an object until the loop ends.

        Args:
            owner: of the method.
            name: of the method.
            wrap: gets the method and returns what takes its place.
        """
        if self._is_off:
            return
        with self.guarded():
            replace(self._replaced, owner, name, wrap)

    def timed(self, name: str) -> Callable[[Any], Any]:
        """Return a wrapper of methods that are a phase, for `replace`."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **kwargs: Any) -> Any:
                self.begin_phase(name)
                try:
                    return original(*args, **kwargs)
                finally:
                    self.end_phase(name)

            return timed

        return wrap

    def end(self) -> None:
        """Close the session, and log the verdict once its card is made. Collective: every rank calls this."""
        session = self._session
        self._close(None)
        if self.log_verdict is not None and session is not None and session.card is not None:
            with self.guarded():
                verdict = session.card.verdict_in_time()
                if verdict is not None:
                    self.log_verdict(verdict)

    def abandon(self) -> None:
        """Close the session on this rank alone, because training failed or nobody closed it."""
        self._close(RuntimeError, error_of_program())

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn what fails in this block into one warning."""
        try:
            yield
        except Exception as error:  # the boundary to somebody else's training loop
            if not self._has_warned:
                self._has_warned = True
                what = process_redaction().text(str(error) or type(error).__name__)
                print(f"hpcpace: warning: the callback failed: {what}", file=sys.stderr, flush=True)

    def _close(self, kind: type[BaseException] | None, error: BaseException | None = None) -> None:
        with self.guarded():
            atexit.unregister(self.abandon)
            for name in list(self._phases):
                self.end_phase(name)
            self._replaced.close()
            session, self._session = self._session, None
            if session is not None:
                session.__exit__(kind, error, None)


@contextmanager
def traced(settings: Mapping[str, Any], attach: Callable[[TracedLoop], None]) -> Iterator[TracedLoop]:
    """Trace the loop in this block, which belongs to objects of a framework and not to callbacks.

    Args:
        settings: the arguments of `hpcpace.session`.
        attach: replaces methods of those objects.

    Raises:
        TypeError: `hpcpace.session` has no such argument.
    """
    loop = TracedLoop(settings)
    loop.begin()
    with loop.guarded():
        attach(loop)
    try:
        yield loop
    except BaseException:
        loop.abandon()
        raise
    loop.end()


def count_samples(batch: Any, depth: int = _DEEPEST_BATCH) -> int:
    """Return the first dimension of the first tensor in a batch, 0 if there is none."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 0
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for part in parts if depth and (size := count_samples(part, depth - 1))), 0)


@contextmanager
def needs(framework: str, package: str) -> Iterator[None]:
    """Say what to install if an import in this block finds nothing.

    Raises:
        ImportError: the package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(
            f"this callback needs {framework}, and Python finds no module {error.name}: pip install {package}"
        ) from error


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
