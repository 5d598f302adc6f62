"""Callbacks hand rank 0's figures to the loggers that a job has, at the job's own times, and change nothing else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcpace.callbacks import TracedLoop, accelerate, deepspeed
from hpcpace.core.settings import OPTED_OUT_LINE
from hpcpace.observe.card import CardVerdict


class _Logger:
    """Keeps what it is given to log."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], Any]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((metrics, step))


def _steps(logged: list[tuple[dict[str, float], Any]]) -> list[tuple[Any, float]]:
    return [(step, values["hpcpace/steps"]) for values, step in logged if "hpcpace/steps" in values]


@pytest.mark.parametrize(
    ("log", "is_first", "expected"), [(True, True, [(1, 2.0), (3, 2.0)]), (False, True, []), (True, False, [])]
)
def test_lightning_logs_at_its_own_interval_with_all_its_loggers(
    framework: Callable[..., None], tmp_path: Path, log: bool, is_first: bool, expected: list[tuple[int, float]]
) -> None:
    framework("lightning.pytorch", Callback=type("Callback", (), {}))
    callback = importlib.import_module("hpcpace.callbacks.lightning").TraceCallback(run_dir=tmp_path, log=log)
    epoch, connector, loggers = SimpleNamespace(_batches_that_stepped=0), SimpleNamespace(), [_Logger(), _Logger()]
    trainer = SimpleNamespace(
        global_step=0,
        is_global_zero=is_first,
        loggers=loggers,
        _logger_connector=connector,
        fit_loop=SimpleNamespace(epoch_loop=epoch),
        save_checkpoint=print,
    )
    callback.on_fit_start(trainer, torch.nn.Linear(2, 2))
    for number in range(4):
        trainer.global_step, epoch._batches_that_stepped = number + 1, number
        connector.should_update_logs = (number + 1) % 2 == 0
        callback.on_train_batch_end(trainer, None, None, [torch.zeros(4, 2)], number)
    callback.on_fit_end(trainer, None)
    assert [_steps(logger.logged) for logger in loggers] == [expected] * 2


class _Handler:
    """Calls callbacks as the Trainer's own does."""

    def __init__(self, callbacks: list[Any]) -> None:
        self.callbacks = callbacks

    def call_event(self, event: str, state: Any, **kwargs: Any) -> None:
        for callback in self.callbacks:
            if hasattr(callback, event):
                control = SimpleNamespace(should_evaluate=False, should_save=False)
                getattr(callback, event)(SimpleNamespace(train_batch_size=4), state, control, model=None, **kwargs)


class _Integration(_Logger):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append((dict(logs), state.global_step))


class _Closing(_Integration):
    def __init__(self, close: Callable[[], None]) -> None:
        super().__init__()
        self._close = close

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close()


class _Printer(_Integration):
    """Is no integration, and shows what is logged on the terminal."""


@pytest.mark.parametrize(("log", "expected"), [(True, [(2, 2.0), (4, 2.0)]), (False, [])])
def test_integrations_of_the_trainer_get_them_and_its_own_output_does_not(
    framework: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: bool,
    expected: list[tuple[int, float]],
) -> None:
    framework("transformers", TrainerCallback=type("TrainerCallback", (), {}))
    monkeypatch.setattr(_Integration, "__module__", "transformers.integrations.integration_utils")
    ours = importlib.import_module("hpcpace.callbacks.transformers").TraceCallback(run_dir=tmp_path, log=log)
    loggers, printer = [_Integration(), _Integration()], _Printer()
    handler, state = _Handler([*loggers, ours, printer]), SimpleNamespace(global_step=0, is_world_process_zero=True)
    handler.call_event("on_train_begin", state)
    for number in range(4):
        state.global_step = number + 1
        handler.call_event("on_step_end", state)
        if (number + 1) % 2 == 0:
            given = {"loss": 0.5}
            handler.call_event("on_log", state, logs=given)
            assert given == {"loss": 0.5}
    handler.call_event("on_log", state, logs={"train_runtime": 1.0})
    handler.call_event("on_train_end", state)
    assert [_steps(logger.logged) for logger in loggers] == [expected] * 2
    assert printer.logged == [({"loss": 0.5}, 2), ({"loss": 0.5}, 4), ({"train_runtime": 1.0}, 4)]
    assert all("on_log" not in vars(logger) for logger in loggers)


class _Accelerator(_Logger):
    is_main_process, sync_gradients, num_processes = True, True, 1

    def __init__(self) -> None:
        super().__init__()
        self._optimizers = [SimpleNamespace(step=lambda: None)]
        self.gradient_state = SimpleNamespace(active_dataloader=None)

    def backward(self, loss: float) -> None:
        pass

    def end_training(self) -> None:
        pass

    def save_state(self, folder: str) -> None:
        pass

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.logged.append((values, step))


@pytest.mark.parametrize(("log", "expected"), [(True, [(7, 3.0)]), (False, [])])
def test_accelerate_gets_them_with_the_jobs_own_values(
    tmp_path: Path, log: bool, expected: list[tuple[int, float]]
) -> None:
    accelerator, given = _Accelerator(), {"loss": 0.5}
    with accelerate.trace(accelerator, run_dir=tmp_path, log=log):
        for _ in range(3):
            accelerator._optimizers[0].step()
        accelerator.log(given, step=7)
        accelerator.log({"note": 1.0})
    assert _steps(accelerator.logged) == expected
    assert given == {"loss": 0.5} and accelerator.logged[-1] == ({"note": 1.0}, None)


class _Engine:
    global_rank = 0

    def __init__(self, interval: int | None) -> None:
        self.events: list[list[tuple[str, float, int]]] = []
        self.monitor = SimpleNamespace(enabled=True, write_events=self.events.append)
        self.global_steps = self.global_samples = 0
        self._interval = interval

    def steps_per_print(self) -> int | None:
        return self._interval

    def gradient_accumulation_steps(self) -> int:
        return 1

    def train_micro_batch_size_per_gpu(self) -> int:
        return 4

    def is_gradient_accumulation_boundary(self) -> bool:
        return True

    def step(self) -> None:
        self.global_steps += 1
        self.global_samples += 8

    def save_checkpoint(self, folder: str) -> None:
        pass


@pytest.mark.parametrize(("interval", "expected"), [(2, [(16, 2.0), (32, 2.0)]), (0, []), (None, [])])
def test_deepspeeds_monitor_gets_them_at_its_own_samples(
    tmp_path: Path, interval: int | None, expected: list[tuple[int, float]]
) -> None:
    engine = _Engine(interval)
    with deepspeed.trace(engine, run_dir=tmp_path):
        for _ in range(5):
            engine.step()
    assert _steps([({name: value}, at) for events in engine.events for name, value, at in events]) == expected


VERDICT = CardVerdict(
    headline="persistent straggler: rank 5", mode="persistent straggler", loss_share=0.123, confidence=0.9
)
NUMBERS = {"hpcpace/cost_percent": 12.3, "hpcpace/confidence_percent": 90.0}
WORDS = {"hpcpace/verdict": VERDICT.headline, "hpcpace/mode": VERDICT.mode}


class _Texts:
    """Takes texts as TensorBoard, W&B and MLflow do, in an object for each."""

    def __init__(self) -> None:
        self.board, self.run, self.tags = dict[str, str](), dict[str, str](), dict[str, str]()
        self.writer = SimpleNamespace(add_text=self.board.__setitem__)
        self.wandb = SimpleNamespace(run=SimpleNamespace(summary=self.run))
        self.mlflow = SimpleNamespace(set_tag=self.tags.__setitem__, run=print)
        self.client = SimpleNamespace(
            set_tag=lambda run_id, name, text: self.tags.__setitem__(f"{run_id} {name}", text)
        )


@pytest.fixture
def made_card(monkeypatch: pytest.MonkeyPatch) -> list[CardVerdict | None]:
    """Let cards have the last verdict of this list."""
    verdicts: list[CardVerdict | None] = [VERDICT]
    card = SimpleNamespace(start=lambda: None, verdict_in_time=lambda: verdicts[-1])
    monkeypatch.setattr("hpcpace.observe.session.Card", lambda *args, **kwargs: card)
    monkeypatch.setenv("HPCPACE_TRACE_SUMMARY", "true")
    return verdicts


def test_lightnings_loggers_get_the_verdict_each_in_its_way(
    framework: Callable[..., None], made_card: list[CardVerdict | None], tmp_path: Path
) -> None:
    framework("lightning.pytorch", Callback=type("Callback", (), {}))
    module, texts = importlib.import_module("hpcpace.callbacks.lightning"), _Texts()
    for number, (options, is_first, verdict, expected) in enumerate(
        (
            ({}, True, VERDICT, True),
            ({"log": False}, True, VERDICT, False),
            ({}, False, VERDICT, False),
            ({}, True, None, False),
        )
    ):
        made_card.append(verdict)
        loggers = [_Logger() for _ in range(5)]
        for logger, experiment in zip(
            loggers, (print, texts.writer, texts.wandb.run, texts.client, texts.mlflow), strict=True
        ):
            logger.experiment = experiment
        loggers[0].log_metrics = lambda *args, **kwargs: 1 / 0
        loggers[3].run_id = "r1"
        trainer = SimpleNamespace(
            global_step=0,
            is_global_zero=is_first,
            loggers=loggers,
            save_checkpoint=print,
            fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=7)),
        )
        callback = module.TraceCallback(run_dir=tmp_path / str(number), **options)
        callback.on_fit_start(trainer, None)
        callback.on_fit_end(trainer, None)
        assert [logger.logged for logger in loggers[1:]] == [[(NUMBERS, 7)] * expected] * 4
        logged = WORDS if expected else {}
        assert (texts.board, texts.run) == (logged, logged)
        assert texts.tags == {**logged, **{f"r1 {name}": text for name, text in logged.items()}}
        for taken in (texts.board, texts.run, texts.tags):
            taken.clear()


def test_the_trainers_integrations_get_the_verdict_before_they_close(
    framework: Callable[..., None], made_card: list[CardVerdict | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework("transformers", TrainerCallback=type("TrainerCallback", (), {}))
    monkeypatch.setattr(_Integration, "__module__", "transformers.integrations.integration_utils")
    monkeypatch.setattr(_Closing, "__module__", _Integration.__module__)
    ours = importlib.import_module("hpcpace.callbacks.transformers").TraceCallback(run_dir=tmp_path)
    texts, closed = _Texts(), list[dict[str, str]]()
    loggers = [_Closing(lambda: closed.append({**texts.board, **texts.run})) for _ in range(3)]
    loggers[0].tb_writer, loggers[1]._wandb, loggers[2]._ml_flow = texts.writer, texts.wandb, texts.mlflow
    handler, state = _Handler([*loggers, ours]), SimpleNamespace(global_step=4, is_world_process_zero=True)
    handler.call_event("on_train_begin", state)
    handler.call_event("on_train_end", state)
    assert [logger.logged for logger in loggers] == [[(NUMBERS, 4)]] * 3
    assert (texts.board, texts.run, texts.tags, closed) == (WORDS, WORDS, WORDS, [WORDS] * 3)
    assert all("on_train_end" not in vars(logger) for logger in loggers)


def test_accelerates_trackers_get_the_verdict_at_the_last_step_before_they_close(
    made_card: list[CardVerdict | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, texts, closed = _Accelerator(), _Texts(), list[dict[str, str]]()
    accelerator.trackers = []
    for name, target in (("tensorboard", texts.writer), ("wandb", texts.wandb.run), ("mlflow", print)):
        logged = _Logger()
        tracker = SimpleNamespace(name=name, tracker=target, log=logged.log_metrics, logged=logged.logged)
        accelerator.trackers.append(tracker)
    monkeypatch.setitem(sys.modules, "mlflow", texts.mlflow)
    accelerator.end_training = lambda: closed.append(dict(texts.board))
    with accelerate.trace(accelerator, run_dir=tmp_path):
        accelerator.log({"loss": 0.5}, step=7)
        accelerator.end_training()
    assert [tracker.logged for tracker in accelerator.trackers] == [[(NUMBERS, 7)]] * 3
    assert (texts.board, texts.run, texts.tags, closed) == (WORDS, WORDS, WORDS, [WORDS])


def test_deepspeeds_monitor_gets_the_verdict_at_its_samples(
    made_card: list[CardVerdict | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, texts = _Engine(None), _Texts()
    engine.monitor.tb_monitor = SimpleNamespace(summary_writer=texts.writer)
    engine.monitor.wandb_monitor = SimpleNamespace(enabled=True)
    monkeypatch.setitem(sys.modules, "wandb", texts.wandb)
    with deepspeed.trace(engine, run_dir=tmp_path):
        engine.step()
    assert engine.events == [[(name, value, 8) for name, value in NUMBERS.items()]]
    assert (texts.board, texts.run) == (WORDS, WORDS)
    with pytest.raises(ZeroDivisionError), deepspeed.trace(engine, run_dir=tmp_path / "failed"):
        raise ZeroDivisionError
    assert len(engine.events) == 1


def test_a_logger_that_fails_costs_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = _Engine(1)
    engine.monitor.write_events = lambda events: 1 / 0
    with deepspeed.trace(engine, run_dir=tmp_path):
        for _ in range(3):
            engine.step()
    assert capsys.readouterr().err.count("hpcpace: warning: the callback failed: division by zero") == 1


def test_a_user_who_opts_out_has_loops_without_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCPACE_OPT_OUT", "1")
    engine = _Engine(1)
    with deepspeed.trace(engine, run_dir=tmp_path / "run"):
        assert "step" not in vars(engine)
        engine.step()
    loop = TracedLoop({"run_dir": tmp_path / "run"})
    loop.begin()
    with loop.guarded():
        loop.step()
    loop.begin_phase("eval")
    loop.end()
    assert capsys.readouterr().err.splitlines() == [f"hpcpace: {OPTED_OUT_LINE}"] * 2
    assert (engine.events, list(tmp_path.iterdir())) == ([], [])
