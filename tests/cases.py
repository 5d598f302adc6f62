"""Tables of cases: many of them in one test, and the choice of them that each landing runs.

An item of pytest costs its fixtures, its report and a place in the plan of every worker. A table of hundreds of cases
that need no fixture of their own runs much faster as one item. Where each case takes seconds, a landing runs a choice,
and `make test-nightly` all of them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import pytest

ALL_SEEDS: ContextVar[bool] = ContextVar("all_seeds", default=False)
"""Whether pytest was started with --all-seeds."""
Ids = Iterable[str] | Callable[[Any], object] | None
MAX_NAME_CHARS = 200


def chosen(cases: Iterable[Any], num_chosen: int) -> list[Any]:
    """Return that many cases, evenly spread over a table and always the same; with --all-seeds all of them."""
    table = list(cases)
    assert 0 < num_chosen < len(table), f"{num_chosen} of {len(table)} cases are no choice"
    if ALL_SEEDS.get():
        return table
    return [table[number * len(table) // num_chosen] for number in range(num_chosen)]


def only_nightly(cases: Iterable[Any], rest: Iterable[Any]) -> list[Any]:
    """Return the cases that each landing runs, and with --all-seeds the rest of the table too."""
    return [*cases, *rest] if ALL_SEEDS.get() else list(cases)


def each_case(
    names: str | Sequence[str], cases: Iterable[Any], ids: Ids = None
) -> Callable[[Callable[..., None]], Any]:
    """Run a test for each case, as pytest.mark.parametrize does, but as one item that collects all failures.

    Each case has a tmp_path, a monkeypatch and a capsys of its own. Other fixtures are made once for all cases, so a
    test may only take those that no case changes.

    Args:
        names: arguments of the test, separated by commas, or a list of them.
        cases: their values, as parametrize takes them; pytest.param may name a case, but not mark it.
        ids: names of the cases, or a function that makes the name of a value.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [_values(case, len(arguments)) for case in cases]
    ids = ids if ids is None or callable(ids) else list(ids)
    labels = [given or _label(values, ids, number) for number, (values, given) in enumerate(table)]

    def decorate(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def loop(**fixtures: Any) -> None:
            assert table, "there are no cases"
            failures = []
            for number, (label, (values, _)) in enumerate(zip(labels, table, strict=True)):
                try:
                    with _fresh(fixtures, number) as own:
                        test(**own, **dict(zip(arguments, values, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(f"[{label}] {type(error).__name__}: {error}")
            assert not failures, f"{len(failures)} of {len(table)} cases failed:\n" + "\n".join(failures)

        kept = [one for name, one in inspect.signature(test).parameters.items() if name not in arguments]
        loop.__signature__ = inspect.Signature(kept)
        return loop

    return decorate


@contextlib.contextmanager
def _fresh(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Yield the fixtures for one case, with those replaced that a case changes."""
    own = dict(fixtures)
    if "tmp_path" in own:
        own["tmp_path"] = own["tmp_path"] / f"case-{number}"
        own["tmp_path"].mkdir()
    if "capsys" in own:
        own["capsys"].readouterr()
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in own:
            own["monkeypatch"] = patch
        yield own


def _values(case: Any, num_arguments: int) -> tuple[tuple[Any, ...], str | None]:
    given = None
    if isinstance(case, type(pytest.param())):
        assert not case.marks, "a case of a loop cannot be marked"
        values, given = tuple(case.values), case.id
    else:
        values = (case,) if num_arguments == 1 else tuple(case)
    assert len(values) == num_arguments, f"{values} are not {num_arguments} values"
    return values, given if isinstance(given, str) else None


def _label(values: tuple[Any, ...], ids: Ids, number: int) -> str:
    if ids is not None and not callable(ids):
        return str(list(ids)[number])
    shown = [ids(value) if ids is not None else None for value in values]
    return "-".join(str(one) if one is not None else repr(value) for one, value in zip(shown, values, strict=True))[
        :MAX_NAME_CHARS
    ]
