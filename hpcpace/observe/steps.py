"""Where steps end in a job that never says so: found from optimizers and backward passes.

An *update* is what optimizers do between two backward passes. The updates of a job repeat: one of Adam, or one of the
discriminator's optimizer and then one of the generator's. One period of that sequence is a step. Until it is known,
each optimizer leaves a mark; the marks are then assigned to steps, and the rows between them get their numbers. After
that a step ends when the last optimizer of a period returns, at the same place on all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, starmap
from operator import eq
from typing import TYPE_CHECKING

from hpcpace.core.errors import UsageError
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S
from hpcpace.observe.update_patterns import (
    By,
    Mark,
    Pattern,
    StepSource,
    common_updates,
    identity_of,
    period_of,
    repeats,
)
from hpcpace.trace.schema import StepFlag

if TYPE_CHECKING:
    from hpcpace.observe.recording import Recording

_FORM = re.compile(r"(auto)|(optimizer|backward)(?::([1-9][0-9]{0,5}))?")
# A period that has not shown itself after so many updates is not awaited any longer.
_MAX_UPDATES = 64
# The same without any backward pass, where each step of an optimizer counts: a server steps for whoever asks first, and
# a script that prepares its optimizers steps each of them once.
_MAX_MARKS_WITHOUT_BACKWARD = 256
# As many optimizers as a model may have parameters, twice; after that no further backward pass is awaited.
_MAX_MARKS = 8_192
# Rows wait in memory for the numbers of their steps: a few minutes of a job with many small operations, some 10 MB.
_MAX_HELD_ROWS = 50_000
# So many backward passes more than a step has are no last step that was cut off.
_BACKWARD_LEFT = 4
# Optimizers that exist and have not stepped are awaited this long: a generator may step in every fifth iteration only.
_UPDATES_FOR_IDLE = 8
# A pattern of which so many updates come out of order, and more than this part of them, has shown itself by chance.
_MIN_IRREGULAR, _MAX_IRREGULAR = 4, 0.25
# So many updates without any backward pass are no preparation: the gradients come from elsewhere.
_UPDATES_WITHOUT_BACKWARD = 4
# So many backward passes, of which none shows whether it updates parameters, are a step each.
_BACKWARD_UNSEEN = 4
# So many backward passes without the end of a step, and this long, are worth a warning while the job runs.
_MANY_BACKWARD = 512
_LONG_NS = 60 * NS_PER_S
_NEVER_UPDATED = "gradients add up, and nothing was seen to update parameters"
# The key of a backward pass after which parameters may have been updated, in a job whose optimizers have not stepped.
_MAYBE = "backward"


@dataclass(frozen=True)
class StepFrom:
    """What ends a step.

    Attributes:
        kind: auto, optimizer or backward.
        count: how many of them end a step.
    """

    kind: str = "auto"
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> StepFrom:
        """Return what a text like `auto`, `backward` or `optimizer:2` means.

        Raises:
            UsageError: it means nothing.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise UsageError(f"step_from is {text!r}: use auto, optimizer, backward, optimizer:N or backward:N")
        return cls(match[1] or match[2], int(match[3] or 1))

    @property
    def is_auto(self) -> bool:
        """Whether the job shows what ends a step."""
        return self.kind == "auto"

    @property
    def evidence(self) -> str:
        """The choice in words."""
        one, end = ("backward pass", "es") if self.kind == "backward" else ("optimizer step", "s")
        return f"every {one if self.count == 1 else f'{self.count} {one}{end}'}, as asked for"


class StepFinder:
    """Finds where steps end, from what optimizers and backward passes do.

    Args:
        step_from: what ends a step; by default the job shows it.
        warn: takes a warning.

    Attributes:
        count_idle: returns how many optimizers exist that have not stepped.
        has_changed: returns whether parameters or their gradients have changed since the last backward pass; otherwise
            the next one adds to its gradients; or None if it cannot know.
        sink: takes steps.
        follows_updates: whether no optimizer steps, so that `work_begins` wants to know of changed parameters.
    """

    def __init__(self, step_from: StepFrom, *, warn: Callable[[str], object] = str) -> None:
        self.count_idle: Callable[[], int] = int
        self.has_changed: Callable[[], bool | None] = lambda: None
        self._warn = warn
        self.sink: InferredSteps | None = None
        self.follows_updates = step_from.is_auto
        self._awaits_names = False
        self._source = StepSource(kind="unknown", evidence="no optimizer has stepped and no backward pass was seen")
        self._num_steps = 0
        self._step_from = step_from
        self._marks: list[Mark] = []
        self._pattern: Pattern | None = None
        self._position = 0
        self._has_backward = self._ever_backward = self._is_open = False
        self._num_backward = self._num_counted = self._num_irregular = 0
        self._num_followed = self._num_excused = 0  # updates, and those out of order, when the pattern was found
        self._num_ended = 0  # backward passes before the end of the last step
        # Updates that must repeat before a pattern is believed: more each time one has proved wrong.
        self._num_wanted = 0
        self._is_blind = False  # the pattern was given up without any backward pass
        self._past: set[Hashable] = set()  # the optimizers of earlier patterns
        self._others: dict[str, None] = {}  # classes of optimizers that are not in the pattern
        self._last_backward_ns = self._ended_ns = 0

    @property
    def is_auto(self) -> bool:
        """Whether the job shows what ends a step."""
        return self._step_from.is_auto

    @property
    def source(self) -> StepSource:
        """How steps are found, as far as known."""
        return replace(self._source, num_steps=self._num_steps)

    def backward_ended(self, end_ns: int) -> None:
        """Note the end of a backward pass that is not part of another."""
        self._has_backward = self._ever_backward = self._is_open = True
        self._num_backward += 1
        self._last_backward_ns = end_ns
        if self._num_backward - self._num_ended >= _MANY_BACKWARD:
            self._warn_of_no_end(end_ns)
        if self._step_from.kind == "backward":
            self._count(end_ns)

    def optimizer_ended(
        self, key: Hashable, name: str, end_ns: int, *, kind: Hashable = None, parameters: Hashable = None
    ) -> None:
        """Note the end of an optimizer's step that is not part of another's.

        Args:
            key: which optimizer, or which ones at once, inside a backward pass.
            name: its class.
            kind, parameters: the same for all optimizers like it, and of the same parameters; by default no others are.
        """
        if self._step_from.kind == "optimizer":
            self._count(end_ns)
        if not self._step_from.is_auto:
            return
        if self._has_backward:
            self.follows_updates = False
        kind, parameters = key if kind is None else kind, key if parameters is None else parameters
        mark = Mark(key, kind, parameters, name, end_ns, self._has_backward, self._num_backward)
        self._has_backward = False
        if self._pattern is None or self._pattern.is_by_backward:
            self._learn(mark)
        else:
            self._follow(mark, self._pattern)

    def work_begins(self, now_ns: int) -> None:
        """Note that the next batch, forward or backward pass begins, in a job without optimizers."""
        if not self._is_open or (changed := self.has_changed()) is False:
            return
        if self._pattern is None:
            self._is_open = False
            self._learn_without_optimizer(now_ns, is_seen=changed is not None)
        elif changed is not None or not self._pattern.is_regular:
            self._is_open = False
            self._end_step(now_ns)

    def _learn_without_optimizer(self, now_ns: int, *, is_seen: bool) -> None:
        """Note that parameters may have changed; optimizers that exist and have not stepped are awaited."""
        mark = Mark(_MAYBE, _MAYBE, _MAYBE, "", now_ns, True, self._num_backward, is_seen)
        self._add_mark(mark)
        pattern, num_marks = self._pattern_without_optimizer(), sum(mark.key == _MAYBE for mark in self._marks)
        is_early = self._awaits_names or self.count_idle()
        if num_marks >= (_MAX_UPDATES if is_early else 1 if pattern.is_regular else _BACKWARD_UNSEEN):
            self._settle(pattern)

    def _pattern_without_optimizer(self, *, is_seen: bool = False) -> Pattern:
        is_seen = is_seen or any(mark.is_seen for mark in self._marks if mark.key == _MAYBE)
        return Pattern(updates=(), is_regular=is_seen)

    def rows_wait(self) -> None:
        """Decide now if more rows wait for the numbers of their steps than memory should hold."""
        if self._marks and self.sink is not None and self.sink.num_held > _MAX_HELD_ROWS:
            self._settle_likely()

    def finish(self) -> None:
        """Decide what is still open, at the end of the job."""
        if self.follows_updates and self._ever_backward:
            self._finish_without_optimizer()
        elif self._marks:
            self._settle_likely()
        usual = 1 if self._pattern is None else self._pattern.num_backward * max(len(self._pattern.updates), 1)
        num_left = self._num_backward - self._num_ended
        if num_left > _BACKWARD_LEFT * max(usual, 1):
            self._source = replace(self._source, num_left=num_left)
        self._tell()

    def await_names(self, is_awaited: bool = True) -> None:
        """End no step for 64 updates, where the job is about to say where they end; or go on."""
        self._awaits_names = is_awaited
        if is_awaited:
            self._pattern = None

    def give_up(self) -> StepFlag:
        """End no step any more; return the marks of the step that is running."""
        num_marks, self._marks = len(self._marks), []
        if self.sink is None:
            return StepFlag.NONE
        if num_marks:
            self.sink.settle([0] * (num_marks + 1), [])
        return self.sink.carried_flags

    def _finish_without_optimizer(self) -> None:
        changed = self.has_changed() if self._is_open else False
        if self._pattern is None and (self._marks or changed is not False):
            self._settle(self._pattern_without_optimizer(is_seen=bool(changed)))
        if self._pattern is None:
            self._source = replace(self._source, evidence=_NEVER_UPDATED)
        elif changed is not False:  # else the last step is cut off
            self._end_step(self._last_backward_ns)

    def _warn_of_no_end(self, now_ns: int) -> None:
        """Say it while the job runs, once a step has lasted long: someone may wait for its steps."""
        num_left = self._num_backward - self._num_ended
        self._ended_ns = self._ended_ns or now_ns
        if now_ns - self._ended_ns >= _LONG_NS:
            why = f": {_NEVER_UPDATED}" if self._pattern is None and not self._marks else ""
            self._warn(
                f"no step was seen to end in the last {num_left} backward passes{why}; "
                "`hpcpace trace --step-from backward:N` ends one after every N of them"
            )

    def _settle_likely(self) -> None:
        has_optimizer = any(mark.key != _MAYBE for mark in self._marks)
        self._settle(self._likely_pattern() if has_optimizer else self._pattern_without_optimizer())

    def _count(self, end_ns: int) -> None:
        self._num_counted += 1
        if self._num_counted % self._step_from.count == 0:
            self._end_step(end_ns)

    def _add_mark(self, mark: Mark) -> None:
        self._marks.append(mark)
        if self.sink is not None:
            self.sink.mark()

    def _learn(self, mark: Mark) -> None:
        self._add_mark(mark)
        pattern = self._found_pattern()
        if pattern is not None:
            self._settle(pattern)

    def _updates(self, by: By = "key") -> list[tuple[Hashable, ...]]:
        """Return the optimizers of each update so far; steps before the first backward pass belong to none."""
        updates: list[list[Hashable]] = []
        counts_all = not self._ever_backward or len(self._marks) >= _MAX_MARKS
        for mark in self._marks:
            if mark.key == _MAYBE:
                continue
            identity = identity_of(mark, by)
            if mark.begins_update or counts_all:
                updates.append([identity])
            elif updates:
                updates[-1].append(identity)
        return [tuple(update) for update in updates]

    def _found_pattern(self) -> Pattern | None:
        updates = self._updates()
        num_wanted = self._num_wanted if self._ever_backward else _UPDATES_WITHOUT_BACKWARD
        if len(updates) < (_MAX_UPDATES if self._awaits_names else num_wanted):
            return None
        length = period_of(updates)
        if length:
            if len(updates) < _UPDATES_FOR_IDLE and self.count_idle():
                return None
            return self._pattern_of_period(updates[:length])
        if len(updates) < (_MAX_UPDATES if self._ever_backward else _MAX_MARKS_WITHOUT_BACKWARD):
            return None
        self._is_blind = not self._ever_backward
        return self._likely_pattern()

    def _pattern_of_period(self, period: Sequence[tuple[Hashable, ...]]) -> Pattern:
        """Return the pattern of a period that has shown itself.

        An update is a step where models of one kind train one after the other, several updates each, and where
        optimizers of the same parameters take turns.
        """
        common, length = common_updates(period), len(period)
        if len(common) == 1:
            return self._pattern_of(common)
        parameters = {update[0] for update in self._updates("parameters")[:length]}
        if len(parameters) == 1 and self._ever_backward:
            return self._pattern_of([tuple(parameters)], by="parameters")
        kinds, is_in_runs = self._updates("kind")[:length], any(starmap(eq, pairwise(period)))
        return self._pattern_of(kinds[:1], by="kind") if is_in_runs and len({*kinds}) == 1 else self._pattern_of(common)

    def _likely_pattern(self) -> Pattern:
        """Return the best guess where no period shows.

        All until the first optimizer returns; what repeats if optimizers of a kind are taken for one; the commonest.
        """
        updates = self._updates()
        if not updates:
            return self._pattern_of([(next(mark.key for mark in self._marks if mark.key != _MAYBE),)])
        length = next((i for i in range(1, len(updates)) if updates[i] == updates[0]), len(updates))
        if len(updates) < _MAX_UPDATES and repeats(updates, length):
            return self._pattern_of(updates[:length])
        kinds = self._updates("kind")
        if length := period_of(kinds):
            return self._pattern_of(kinds[:length], by="kind")
        return self._pattern_of([max(kinds, key=kinds.count)], by="kind", is_regular=False)

    def _pattern_of(
        self, updates: Sequence[tuple[Hashable, ...]], *, by: By = "key", is_regular: bool = True
    ) -> Pattern:
        names = {identity_of(mark, by): mark.name for mark in reversed(self._marks)}
        num_updates, num_backward = len(self._updates()), self._marks[-1].num_backward - self._num_ended
        return Pattern(
            updates=tuple(updates),
            names=tuple(tuple(names[key] for key in update) for update in updates),
            by=by,
            is_regular=is_regular,
            num_backward=round(num_backward / num_updates) if num_updates else 0,
        )

    def _settle(self, pattern: Pattern) -> None:
        """Assign all marks to steps, as if the pattern had been known from the first of them on."""
        marks, self._marks = self._marks, []
        if self._pattern is not None:
            self._others |= dict.fromkeys(self._pattern.classes)
            self._past.update(self._pattern.keys)
        self._pattern, self._position = pattern, 0
        begins_all = not self._ever_backward
        steps, ends_ns, is_begun = [0], [], False
        for mark in marks:
            if mark.key == _MAYBE:
                is_end = pattern.is_by_backward and (mark.is_seen or not pattern.is_regular)
            else:
                is_begun = is_begun or mark.begins_update or begins_all
                is_end = is_begun and not pattern.is_by_backward and self._advance(mark, pattern)
            if is_end:
                ends_ns.append(mark.end_ns)
                self._num_ended = mark.num_backward
            steps.append(len(ends_ns))
        if self.sink is not None and marks:
            self.sink.settle(steps, ends_ns)
        self._num_steps += len(ends_ns)
        self._num_followed, self._num_excused = 0, self._num_irregular
        self._tell()

    def _follow(self, mark: Mark, pattern: Pattern) -> None:
        is_new = pattern.identity_of(mark) not in pattern.keys and pattern.is_regular
        is_by_chance = self._is_by_chance(mark)
        if mark.begins_update and (is_new or is_by_chance or self._is_blind) and not self._marks:
            # Else it may go on like this: phases, trials.
            has_returned = is_by_chance or pattern.identity_of(mark) in self._past
            num_wanted = 2 * self._num_wanted if has_returned else self._num_wanted
            self._num_wanted = min(max(num_wanted, _UPDATES_FOR_IDLE), _MAX_UPDATES)
            self._is_blind = False
            self._learn(mark)  # the sequence is found anew from here on
        elif self._marks:
            self._learn(mark)
        elif self._advance(mark, pattern):
            self._end_step(mark.end_ns)

    def _is_by_chance(self, mark: Mark) -> bool:
        """Return whether the pattern has proved to be none."""
        self._num_followed += mark.begins_update
        num_irregular = self._num_irregular - self._num_excused
        return num_irregular >= _MIN_IRREGULAR and num_irregular > _MAX_IRREGULAR * self._num_followed

    def _advance(self, mark: Mark, pattern: Pattern) -> bool:
        """Go on in the pattern; return whether that ends a step."""
        keys, identity = pattern.keys, pattern.identity_of(mark)
        if not pattern.may_advance(mark):
            return False
        if keys[self._position] != identity:
            if not mark.begins_update or identity not in keys:
                return False
            self._num_irregular += pattern.is_regular
            ahead = (*range(self._position, len(keys)), *range(self._position))
            self._position = next(i for i in ahead if keys[i] == identity)
        if mark.name not in pattern.classes:  # it has taken the place of another
            self._others[mark.name] = None
        self._position = (self._position + 1) % len(keys)
        return self._position == 0

    def _end_step(self, end_ns: int) -> None:
        self._num_ended, self._ended_ns = self._num_backward, end_ns
        self._num_steps += 1
        if self.sink is not None:
            self.sink.end_step(end_ns)

    def _tell(self) -> None:
        kind, evidence = self._step_from.kind, self._step_from.evidence
        if self._pattern is not None:
            kind, evidence = self._pattern.kind, self._pattern.evidence
        if kind != "auto":
            others = () if self._pattern is None else self._pattern.others_of(self._others)
            found = replace(self._source, kind=kind, evidence=evidence)
            self._source = replace(found, num_irregular=self._num_irregular, others=others)
        if self.sink is not None:
            self.sink.tell_source(self.source)


class InferredSteps:
    """Ends the steps of a session as a StepFinder finds them; see there for `mark`, `settle` and the others.

    Args:
        recording: of the session.
        failed: takes an error of the recording, which must not reach the job.
    """

    def __init__(self, recording: Recording, *, failed: Callable[[Exception], None]) -> None:
        self._recording, self._failed = recording, failed
        self._marked: list[tuple[int, StepFlag]] = []  # samples and marks of the rows before each mark
        self._first = 0
        self._carried = (0, StepFlag.NONE)

    @property
    def num_held(self) -> int:
        """How many rows are in memory while some of them wait for the numbers of their steps."""
        return self._recording.recorder.num_held

    @property
    def carried_flags(self) -> StepFlag:
        """The marks that are known already of the step that is running."""
        return self._carried[1]

    def mark(self) -> None:
        """Number rows provisionally: a step may have ended here."""
        with self._boundary():
            if not self._marked:
                self._first = self._recording.step
                self._recording.recorder.hold_steps_after(self._first)
            self._recording.number_rows(self._first + len(self._marked) + 1)
            self._marked.append(self._take())

    def settle(self, steps: Sequence[int], ends_ns: Sequence[int]) -> None:
        """Number the rows between marks, and record the steps that are over."""
        with self._boundary():
            marked, self._marked = self._marked, []
            numbers = {self._first + mark: self._first + step for mark, step in enumerate(steps)}
            self._recording.settle_steps(numbers, self._first + steps[-1])
            totals = [(0, StepFlag.NONE)] * (len(ends_ns) + 1)
            totals[0] = self._carried
            for step, (samples, flags) in zip(steps, marked, strict=False):
                totals[step] = (totals[step][0] + samples, totals[step][1] | flags)
            for end_ns, (samples, flags) in zip(ends_ns, totals, strict=False):
                self._recording.end_step(end_ns, samples, flags)
                self._recording.begin_step(end_ns)
            self._carried = totals[-1]

    def end_step(self, end_ns: int) -> None:
        """End the step that is running."""
        try:  # for each step a context manager would cost more
            samples, flags = self._take()
            (carried, marks), self._carried = self._carried, (0, StepFlag.NONE)
            self._recording.end_step(end_ns, samples + carried, flags | marks if marks else flags)
            self._recording.begin_step()
        except Exception as error:  # the boundary to somebody else's job
            self._failed(error)

    def tell_source(self, source: StepSource) -> None:
        """Record how steps are found from here on."""
        with self._boundary():
            self._recording.add_step_source(source)

    def _take(self) -> tuple[int, StepFlag]:
        phases = self._recording.phases
        return phases.samples.take(), phases.end_step()

    @contextmanager
    def _boundary(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the boundary to somebody else's job
            self._failed(error)
