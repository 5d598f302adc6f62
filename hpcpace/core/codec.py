"""JSON, YAML and pickles that were read from files, which may be missing, damaged, foreign, or made to do harm.

A pickle is a program: `pickle.load` calls any function that it names, with arguments that it brings. Here any name ends
the reading, as does an instruction that plain values do not need. The reader is the one in Python, because the one in C
allocates as much memory as a pickle asks for.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeVar

import msgspec
from msgspec import Meta

from hpcpace.core.compat import PythonUnpickler
from hpcpace.core.files import Folder
from hpcpace.core.text import printable, shown

MAX_BYTES = 1 << 24
"""Of run.json and trial.json: some hundred bytes for each rank, of 16,384. JSON takes 20 times that in memory."""
MIN_VALUE_BYTES = 32
"""Of the text of a value, in the mean: the smallest ones take 60 times their text in memory."""
MAX_LETTERS = 500
"""Of a `Text`; what is longer is cut."""
_MAX_REASON = 100
# Beyond these, numbers overflow in later arithmetic; no count or time of a job comes near.
_MAX_INTEGER, _MAX_NUMBER = 1 << 63, 1e18
FOREIGN_ERRORS = (ValueError, RecursionError, AttributeError, TypeError, KeyError, OverflowError, IndexError)
"""What code raises that takes values of any kind for what they should be."""

Whole = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""An integer of 64 bits."""
Count = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]
"""How many, how large, or when."""
Number = Annotated[float, Meta(ge=-1e19, le=1e19)]
"""A finite number."""
if TYPE_CHECKING:
    Text = str
else:

    class Text(str):
        """A text that is cut to `MAX_LETTERS` on reading."""

        __slots__ = ()


_Found = TypeVar("_Found")
_NAMES = {"str": "a text", "int": "an integer", "float": "a number", "bool": "true or false", "null": "null"}
_NAMES |= {"array": "a list", "object": "an object"}
_TYPES = {str: "str", int: "int", float: "float", bool: "bool", list: "array", dict: "object", type(None): "null"}
_ERROR = re.compile(r"(?P<reason>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?")
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<number>\d+|\.\.\.)\]")
_BOUND = re.compile(r"(?P<sign>[<>]=?) (?P<limit>[-+.\de]+)")


class WrongValue(ValueError):
    """A value is not what its format has there; the message names its place, the value, and what is expected."""


class HasFolder(Protocol):
    """What has files in a folder, such as a run or an attempt."""

    @property
    def path(self) -> Path:
        """What messages call the folder."""

    def open(self) -> Folder:
        """Open the folder.

        Raises:
            OSError: it cannot be read, or does not exist.
        """


def json_object(content: Any) -> dict[str, Any]:
    """Return values of JSON that are an object.

    Raises:
        TypeError: they are something else.
    """
    if not isinstance(content, dict):
        raise TypeError("it is no object of JSON")
    return content


def check_values(content: bytes, max_values: int) -> None:
    """Refuse JSON of so many values that they would take many times its bytes in memory.

    Raises:
        ValueError: it has more.
    """
    num_values = sum(content.count(sign) for sign in (b",", b"[", b"{"))
    if num_values > max_values:
        raise ValueError(f"it has {num_values} values, more than {max_values}")


def read_json(
    place: HasFolder,
    name: str,
    made_of: Callable[[Any], _Found],
    problems: list[str],
    *,
    most_bytes: int = MAX_BYTES,
) -> _Found | None:
    """Return what a JSON file of a run says; None if it is missing or cannot be used.

    Args:
        place: what has the file in its folder.
        name: of the file.
        made_of: makes what is returned of the file's content.
        problems: takes the sentence on why a file cannot be used.
        most_bytes: more are not read.
    """
    try:
        with place.open() as folder:
            content = folder.read(name, most_bytes=most_bytes)
        check_values(content, most_bytes // MIN_VALUE_BYTES)
        return made_of(json.loads(content))
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or str(error)
    except WrongValue as error:
        reason = str(error)
    except FOREIGN_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
    problems.append(f"{place.path / name} is left out ({printable(reason[:_MAX_REASON])[:_MAX_REASON]})")
    return None


def parse_json(content: str | bytes) -> Any:
    """Return the values of a JSON text by its strict rules, for `convert`.

    Raises:
        ValueError: it is truncated, nested too deeply, has NaN or Infinity, or a name twice in one object.
    """
    try:
        return json.loads(
            content, parse_constant=_no_constant, object_pairs_hook=_object, parse_int=_integer, parse_float=_number
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not complete JSON ({printable(str(error))[:_MAX_REASON]})") from None


def convert(value: Any, kind: type[_Found]) -> _Found:
    """Return JSON values as what a format has.

    Raises:
        WrongValue: one is missing, of another type, or out of its bounds.
    """
    try:
        return msgspec.convert(value, kind, dec_hook=_custom)
    except msgspec.ValidationError as error:
        raise WrongValue(_sentence(value, str(error))) from None
    except UnicodeEncodeError as error:
        raise WrongValue(f"it has {shown(error.object)}, which is not Unicode") from None
    except RecursionError:
        raise WrongValue("it is nested too deeply") from None


def decoder(kind: type[_Found]) -> Callable[[Any], _Found]:
    """Return what converts JSON values to a format, as `read_json` takes it."""
    return lambda value: convert(value, kind)


def as_text(value: Any) -> str:
    """Return a text, cut to `MAX_LETTERS`.

    Raises:
        WrongValue: the value is something else.
    """
    return str(convert(value, Text))


def as_count(value: Any) -> int:
    """Return an integer that is at least 0.

    Raises:
        WrongValue: the value is something else.
    """
    found: int = convert(value, Count)
    return found


def as_number(value: Any, lowest: float = -_MAX_NUMBER, highest: float = _MAX_NUMBER) -> float | None:
    """Return a number within bounds, or None.

    Raises:
        WrongValue: the value is something else.
    """
    if value is None:
        return None
    found: float = convert(value, Number)
    if not lowest <= found <= highest:
        raise WrongValue(f"{found!r} is not a number from {lowest:g} to {highest:g}")
    return found


def plain(value: Any) -> Any:
    """Return a dataclass, and everything in it, as JSON values."""
    return msgspec.to_builtins(value, enc_hook=str)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("an object has a name twice")
    return made


class _TooLarge(float):
    """A number that no measurement reaches and no format takes, so that `convert` names the field that has it."""

    __slots__ = ()


def _integer(text: str) -> float:
    value = int(text)
    return value if abs(value) < _MAX_INTEGER else _TooLarge(text)


def _number(text: str) -> float:
    value = float(text)
    return value if abs(value) < _MAX_NUMBER else _TooLarge(text)


def _custom(kind: type, value: Any) -> Any:
    if kind is not Text:
        raise TypeError(f"formats have no {kind.__name__}: msgspec knows the types that they may have, and Text")
    if not isinstance(value, str):
        raise ValueError(f"Expected `str`, got `{_TYPES.get(type(value), 'object')}`")
    return Text(value[:MAX_LETTERS])


def _sentence(content: Any, error: str) -> str:
    """Return what msgspec says about JSON values in a sentence that names the value and its exact place."""
    found = _ERROR.fullmatch(error)
    assert found is not None  # the pattern takes any line
    reason, steps = found["reason"], list(_STEP.finditer(found["path"] or ""))
    missing = re.fullmatch(r"Object missing required field `(.*)`", reason)
    places = list(_places(content, steps, ""))
    if missing:
        where = next((where for where, value in places if isinstance(value, dict) and missing[1] not in value), "")
        return f"{printable(where) or 'it'} has no {missing[1]!r}"
    where, value = next(((w, v) for w, v in places if _is_wrong(v, reason)), places[0] if places else ("", None))
    named = re.match(r"Expected (?P<kinds>`.*?`)(?P<bound>(?: of length)? [<>]=? \S+)?", reason)
    if found["key"]:
        return f"{printable(where) or 'it'} has a name that is wrong: {reason}"
    if named is None:
        return f"{printable(where) or 'it'} is {shown(value)}: {reason}"
    kinds = " or ".join(_NAMES.get(kind, kind) for kind in named["kinds"].strip("`").split(" | "))
    return f"{printable(where) or 'it'} is {shown(value)}: expected {kinds}{named['bound'] or ''}"


def _places(value: Any, steps: list[re.Match[str]], where: str) -> Iterator[tuple[str, Any]]:
    """Yield each place that a path may mean, and the value there; msgspec writes `[...]` for any entry of an object."""
    if not steps:
        yield where, value
    elif (name := steps[0]["name"]) is not None:
        if isinstance(value, dict) and name in value:
            yield from _places(value[name], steps[1:], f"{where}.{name}" if where else name)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, steps[1:], f"{where}.{key}"[:_MAX_REASON])
    elif isinstance(value, (list, tuple)) and steps[0]["number"] != "...":
        number = int(steps[0]["number"])
        yield from _places(value[number], steps[1:], f"{where}[{number}]")


def _is_wrong(value: Any, reason: str) -> bool:
    """Return whether a value is the one that msgspec refuses, by the type or the bound that it names."""
    _, _, got = reason.partition(", got ")
    if got:
        return _TYPES.get(type(value), type(value).__name__) == got.strip("`")
    bound = _BOUND.search(reason)
    if bound is None:
        return True
    size, limit = (len(value) if "of length" in reason else value), float(bound["limit"])
    signs = {"<": size < limit, "<=": size <= limit, ">": size > limit, ">=": size >= limit}
    return not signs[bound["sign"]]


MAX_VALUES = 1 << 21
"""Lists, tables, tuples, marks and entries of the memo: each takes up to 200 times its one byte in memory."""
_MAX_UNFOLDED_PER_BYTE = 2
"""A value may be in many places. Stacks of a dump share their frames, which makes it as large as its bytes at most."""
_FREE_UNFOLDED = 1 << 16
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
    *(pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL),
)
_MAKERS = (
    *(pickle.MARK, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINPERSID),
)


class _Table(dict[Any, Any]):
    """A dictionary of a pickle; to hash a tuple that holds itself many times over would take for ever."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str):
            raise pickle.UnpicklingError(f"a key is a {type(key).__name__}, not a text")
        super().__setitem__(key, value)


def _counted(carry_out: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return what carries out an instruction that sets aside memory, up to a number of times."""

    def count(unpickler: Any) -> None:
        unpickler.num_values += 1
        if unpickler.num_values > MAX_VALUES:
            raise pickle.UnpicklingError(f"it has more than {MAX_VALUES} lists and tables")
        carry_out(unpickler)

    return count


class _InertUnpickler(PythonUnpickler):
    """Makes plain values, and refuses every name and every instruction beyond these."""

    stack: list[Any]
    num_values = 0

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {shown(f'{module}.{name}')}, which no dump needs")

    def persistent_load(self, pid: Any) -> Any:
        self.find_class("pickle", "persistent id")

    def _empty_table(self) -> None:
        self.stack.append(_Table())

    dispatch: ClassVar[dict[int, Any]] = {
        **{code[0]: PythonUnpickler.dispatch[code[0]] for code in _OPCODES},
        **{code[0]: _counted(PythonUnpickler.dispatch[code[0]]) for code in _MAKERS},
        pickle.EMPTY_DICT[0]: _counted(_empty_table),
    }


def read_pickle(data: bytes) -> Any:
    """Return the dictionaries, lists, tuples, numbers and texts of a pickle.

    A walk through all of it, in whatever order, takes time that is linear in its bytes.

    Raises:
        ValueError: it is no pickle, is cut off, asks for anything else, or has values that are in too many places.
    """
    try:
        value = _InertUnpickler(io.BytesIO(data)).load()
        _check_unfolded(value, _MAX_UNFOLDED_PER_BYTE * len(data) + _FREE_UNFOLDED)
        return value
    except pickle.UnpicklingError as error:
        text = str(error)
        raise ValueError("it is cut off" if "truncated" in text or "exhausted" in text else text) from error
    except (EOFError, struct.error) as error:
        raise ValueError("it is cut off") from error
    except KeyError as error:  # an instruction that is not among those above
        raise ValueError(f"it has the instruction {shown(error.args[0])}, which no dump needs") from error
    except IndexError as error:
        # Bytes that are not there, or a value that is not on the stack.
        is_cut = "index out of range" in str(error)
        raise ValueError("it is cut off" if is_cut else "it is damaged, or no pickle of a dump") from error
    except Exception as error:  # whatever a stack without the right things on it leads to
        raise ValueError(f"it is damaged, or no pickle of a dump ({type(error).__name__})") from error


def _check_unfolded(value: Any, max_values: int) -> None:
    """Refuse values that hold others so many times over, or themselves, that no walk through them ends in time."""
    num_values, left = 1, [value]
    while left:
        parts = _parts(left.pop())
        num_values += len(parts)
        if num_values > max_values:
            raise pickle.UnpicklingError(f"its values hold each other more than {max_values} times")
        left.extend(part for part in parts if isinstance(part, (dict, list, tuple)))


def _parts(value: Any) -> Collection[Any]:
    """Return what a value holds directly."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


_MAX_DEPTH = 16
_MAX_YAML_REASON = 160
_NOTHING = ("", "~", "null")


def parse_yaml(content: str, *, max_values: int) -> Any:
    """Return the value of a text: None, texts, lists, and mappings with texts as keys.

    Args:
        content: of a file.
        max_values: more are refused.

    Raises:
        ImportError: PyYAML is not installed.
        ValueError: it is no YAML, or uses tags, aliases or depth that files of settings do not.
    """
    import yaml

    # libyaml compares each of these lines with all before.
    if re.search(r"^%TAG", content, re.MULTILINE):
        raise ValueError("it has YAML tags")
    try:
        # Without libyaml it takes ten times as long.
        return _built(yaml, yaml.parse(content, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader)), max_values)
    except yaml.YAMLError as error:
        reason = " ".join(str(error)[: 4 * _MAX_YAML_REASON].split())[:_MAX_YAML_REASON]
        raise ValueError(f"it is no YAML: {reason}") from None


def _built(yaml: Any, events: Iterable[Any], max_values: int) -> Any:
    """Return the value that the events of a text make."""
    top: list[Any] = []
    inside: list[_Open] = []
    for number, event in enumerate(events):
        if number > max_values:
            raise ValueError(f"it has more than {max_values} values")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ValueError("it has YAML aliases")
        if getattr(event, "tag", None) is not None:
            raise ValueError("it has YAML tags")
        if isinstance(event, yaml.CollectionEndEvent):
            inside.pop()
            continue
        if isinstance(event, yaml.ScalarEvent):
            value: Any = None if event.implicit[0] and event.value in _NOTHING else event.value
        elif isinstance(event, yaml.CollectionStartEvent):
            value = [] if isinstance(event, yaml.SequenceStartEvent) else {}
        else:
            continue
        if inside:
            inside[-1].take(value)
        else:
            top.append(value)
        if isinstance(value, (list, dict)):
            inside.append(_Open(value))
            if len(inside) > _MAX_DEPTH:
                raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
    if len(top) > 1:
        raise ValueError(f"it has {len(top)} documents: give each a file")
    return top[0] if top else None


class _Open:
    """A list or a mapping whose end has not come."""

    def __init__(self, value: list[Any] | dict[str, Any]) -> None:
        self._value = value
        self._key: str | None = None

    def take(self, value: Any) -> None:
        """Take what comes next in it: an entry, or by turns a key and its value."""
        if isinstance(self._value, list):
            self._value.append(value)
        elif self._key is not None:
            self._value[self._key], self._key = value, None
        elif not isinstance(value, str):
            raise ValueError(f"{shown(value)} is a key: a key must be a word")
        elif value in self._value:
            raise ValueError(f"it has the key {shown(value)} twice in one mapping")
        else:
            self._key = value
