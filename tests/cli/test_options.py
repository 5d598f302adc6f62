"""What holds for the options of all commands: headings, defaults and bounds in the help, and all mistakes at once."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from cases import each_case
from click.testing import CliRunner

from hpcpace.cli import cli
from hpcpace.cli.options import Option
from hpcpace.core.errors import HpcpaceError

MAX_WITHOUT_HEADINGS = 4
VERBS = """
Add Audit Average Begin Boot Call Check Compare Compile Compress Compute Connect Count Cut Divide Draw Drop End Evaluate
Fail Gather Give Hold Keep Lay Leave Let Look Lower Make Measure Name Open Order Oversubscribe Pack Place Print Put Read
Record Report Resume Run Say Seed Send Set Shape Shard Show Slow Start Take Train Try Undo Use Wait Watch Write
"""
NO_NUMBERS = ["nan", "inf", "-inf", "1e308", "-1", str(10**30), "one"]


def _commands(
    found: click.Command = cli, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, found
    if isinstance(found, click.Group):
        context = click.Context(found)
        for name in found.list_commands(context):
            command = found.get_command(context, name)
            assert command is not None
            yield from _commands(command, (*path, name))


COMMANDS = dict(_commands())
OPTIONS = [
    (path, param)
    for path, command in COMMANDS.items()
    for param in command.params
    if isinstance(param, click.Option) and param.name != "version"
]
PARAMETERS = [
    (" ".join((*path, str(param.name))), param)
    for path, command in COMMANDS.items()
    for param in command.params
    if isinstance(param.type, (click.types.IntParamType, click.types.FloatParamType))
]


def _said(words: list[str]) -> tuple[int, str]:
    """Return the exit code of a call, and what it says."""
    result = CliRunner().invoke(cli, words)
    if isinstance(result.exception, HpcpaceError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.output


@each_case("path", COMMANDS, ids=lambda path: " ".join(path) or "hpcpace")
def test_help_is_at_most_80_columns_wide(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(cli, [*path, "--help"], terminal_width=80).output
    assert [line for line in shown.splitlines() if len(line) > 80] == []


@each_case("path", COMMANDS, ids=lambda path: " ".join(path) or "hpcpace")
def test_a_command_of_many_options_has_all_of_them_below_headings(path: tuple[str, ...]) -> None:
    options = [param for param in COMMANDS[path].params if isinstance(param, Option)]
    headings = [option.heading for option in options]
    assert all(headings) or (len(options) <= MAX_WITHOUT_HEADINGS and not any(headings))
    shown = CliRunner().invoke(cli, [*path, "--help"]).output
    for heading in headings:
        assert f"\n{heading or 'Options'}:\n" in shown


def _wrong_help(path: tuple[str, ...], option: click.Option) -> str:
    """Return what is wrong with the help of an option; nothing if it is as it should be."""
    if not isinstance(option, Option):
        return "is not an option of hpcpace"
    if option.help is None or option.help.split()[0] not in VERBS.split() or not option.help.endswith((".", "...")):
        return f"has the help {option.help!r}"
    if option.is_flag and not option.secondary_opts:  # a switch is off where it is not given
        return ""
    if not option.default_words():
        return "has no default in words"
    record = option.get_help_record(click.Context(COMMANDS[path]))
    shown = f"[{'' if option.required else 'default: '}{option.default_words()}"
    return "" if record is not None and shown in record[1] else f"does not show {shown}"


def test_the_help_of_an_option_starts_with_a_verb_and_shows_its_default() -> None:
    assert OPTIONS
    wrong = {" ".join((*path, option.opts[0])): _wrong_help(path, option) for path, option in OPTIONS}
    assert {name: what for name, what in wrong.items() if what} == {}


@each_case(
    ("words", "shown"),
    [
        (["train", "gpt2"], "[default: the context of the preset; at least 2]"),
        (["train", "gpt2"], "[default: 0.0003; at least 0]"),
        (["train", "gpt2"], "[default: on]"),
        (["audit"], "[default: 0; 0 to 60]"),
        (["lab", "fault", "slow-host"], "[default: 0.25; above 0 and at most 1024]"),
        (["lab", "fault", "mtu"], "[required; 68 to 65535]"),
    ],
)
def test_help_shows_default_and_bounds(words: list[str], shown: str) -> None:
    output = CliRunner().invoke(cli, [*words, "--help"], terminal_width=80).output
    assert shown in " ".join(output.split())


def _wrong_refusal(param: click.Parameter, value: str) -> str:
    """Return what is wrong with the refusal of a value that is no number within bounds; nothing if all is right."""
    try:
        param.type_cast_value(click.Context(cli), (value,) if param.multiple else value)
    except click.BadParameter as error:
        message = error.format_message()
    else:
        return "is taken"
    is_range = isinstance(param.type, click.FloatRange) and value != "one"
    if f"{float(value) if is_range else value}" not in message:
        return f"is not named: {message}"
    return f"has no upper bound: {message}" if is_range and f"x<={param.type.max}" not in message else ""


def test_every_number_has_bounds() -> None:
    assert PARAMETERS
    wrong = {
        f"{name} {value}": _wrong_refusal(param, value)
        for name, param in PARAMETERS
        for value in NO_NUMBERS
        if not (value == "-1" and getattr(param.type, "min", 0) <= -1)  # a step of a clock may go back
    }
    assert {call: what for call, what in wrong.items() if what} == {}


# Texts with numbers in them, each in a call that can only go wrong in that number.
TEXTS = {
    "--mesh": [["train", "gpt2", "--mesh", f"dp={10**30}"], ["train", "resnet18", "--mesh", "dp=-1"]],
    "--inject": [
        ["train", "gpt2", "--inject", "rank=0,size=nan%"],
        ["train", "gpt2", "--inject", "rank=0,size=1e308%"],
        ["train", "gpt2", "--inject", "rank=0,size=infs"],
        ["train", "resnet18", "--inject", f"rank={10**30},size=30%"],
        ["train", "resnet18", "--inject", f"rank=0,size=30%,kind=periodic,period={10**30}"],
    ],
    "--step-from": [
        ["trace", "--step-from", f"optimizer:{10**30}", "x.py"],
        ["trace", "--step-from", "optimizer:0", "x"],
    ],
    "--steps": [
        ["report", "--steps", f"0:{10**30}"],
        ["report", "--steps", "-1:5"],
        ["trace", "--steps", f"0:{10**30}", "x.py"],
        ["switch", "--steps", "-1:5", "r"],
    ],
    "--trace-steps": [["train", "gpt2", "--trace-steps", f"0:{10**30}"], ["train", "gpt2", "--trace-steps", "-1:5"]],
    "--ranks": [["report", "--ranks", f"0-{10**30}"], ["report", "--ranks", "nan"]],
    "--memory": [
        ["report", "--memory", f"{10**400}"],
        ["report", "--memory", "-1"],
        ["dump", "f", "--memory", "infGB"],
        ["pack", "r", "--memory", f"{10**30}"],
    ],
    "--size": [["pack", "r", "--size", "1e308"], ["pack", "r", "--size", f"{10**30}"]],
    "--tmp-size": [["lab", "up", "--tmp-size", f"{10**30}"]],
    "--link": [["lab", "up", "--link", f"{10**400}gbit"], ["lab", "up", "--link", "nan"]],
    "--uplink": [["lab", "up", "--uplink", "-1"]],
    "--batches": [["study", "nano-cluster", "s", "--batches", f"1,{10**30}"]],
    "--image-batches": [["study", "nano-cluster", "s", "--image-batches", "0"]],
    "--layouts": [["study", "nano-cluster", "s", "--layouts", f"2x{10**30}"]],
    "--layout": [["study", "left", "s", "--layout", "-1x2"]],
    "--nodes": [
        ["study", "pacing", "s", "--nodes", f"{10**30}"],
        ["study", "scaling", "s", "--nodes", "nan"],
        ["plan", "--nodes", f"{10**30}"],
    ],
    "--network": [["plan", "--network", f"{10**30}gbit", "--model", "gpt2-xl", "--machine", "a100"]],
    "--only": [["plan", "--only", f"tp={10**30}"], ["plan", "--only", "zero=nan"]],
    "--oversubscriptions": [["study", "scaling", "s", "--oversubscriptions", "inf"]],
    "--listen": [["watch", "r", "--listen", f":{10**30}"], ["watch", "r", "--listen", "n1:nan"]],
    "--rate": [],  # needs a lab: tests/lab/test_faults.py
}
PLAIN_TEXTS = {
    *("--resume", "--interface", "--samples-unit", "--rules", "--ignore", "--show", "--fail-on", "--name", "--share"),
    *("--on", "--signal", "--placements", "--policies", "--host", "--job", "--model", "--machine", "--what"),
}


def test_it_is_known_of_every_text_whether_it_has_numbers() -> None:
    texts = {
        param.opts[0]
        for command in COMMANDS.values()
        for param in command.params
        if isinstance(param, Option) and isinstance(param.type, click.types.StringParamType)
    }
    assert texts == PLAIN_TEXTS | set(TEXTS)


@each_case("words", [words for calls in TEXTS.values() for words in calls], ids=lambda words: " ".join(words)[:60])
def test_numbers_in_texts_have_bounds(words: list[str], tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = _said(words)
    assert code == 2
    option = next(word for word in words if word.startswith("--"))
    value = words[words.index(option) + 1]
    assert option[2:].replace("-", "_") in said.replace("-", "_") or value in said


@each_case(
    ("words", "mistakes"),
    [
        (
            ["report", "--steps", "x", "--ranks", "y", "--attempt", "-1"],
            ["'--attempt': -1 is not in the range 0<=x<=1000000000", "'--steps': 'x' is", "'--ranks': 'y' is"],
        ),
        (
            ["audit", "--probe", "nan", "--nope", "--never=1"],
            ["No such option '--nope'", "No such option '--never'", "'--probe': nan is not in the range 0<=x<=60"],
        ),
        (
            ["train", "gpt2", "--steps", "1" + "0" * 22, "--batch-size", "0", "--dtype", "float99"],
            [f"'--steps': 1{'0' * 22} is not in the range", "'--batch-size': 0 is not", "'--dtype': 'float99' is not"],
        ),
        (
            ["study", "scaling", "--steps", "1", "--step-ms"],
            ["'--step-ms' requires an argument", "'--steps': 1 is not"],
        ),
        (["study", "scaling", "--steps", "1"], ["Missing argument 'STUDY'", "'--steps': 1 is not"]),
        (["lab", "up", "--hosts", "0", "--mtu", "3"], ["'--hosts': 0 is not in the range 1<=x<=250", "'--mtu': 3 is"]),
        (["dump", "a", "b", "--limit", "-1"], ["'--limit': -1 is not", "Got unexpected extra arguments (b)"]),
        (["audit", "--fail-on", "A01", "--show", "x.png"], ["--fail-on needs --prolog", "--show x.png: the name"]),
        (
            ["train", "gpt2", "--mesh", "bad", "--inject", "junk", "--inject", "rank=9,size=30%"],
            ["mesh 'bad'", "fault 'junk'", "no rank 9"],
        ),
        (
            ["trace", "--detail", "all", "--summary-foo", "--run-dir", "-m", "-q", "train.py", "--never"],
            [
                "No such option '--summary-foo'. (Did you mean one of: '--no-summary', ",
                "option '-q'",
                "'--detail': 'all'",
            ],
        ),
        (["lab", "up", "--name", "A", "--link", "fast"], ["lab.name is 'A'", "lab.link: 'fast' is not a rate"]),
    ],
    ids=lambda value: " ".join(value)[:50],
)
def test_all_mistakes_of_a_call_are_told_together(words: list[str], mistakes: list[str]) -> None:
    code, said = _said(words)
    assert code == 2
    assert [mistake for mistake in mistakes if mistake not in said] == []


def test_one_mistake_is_told_as_click_does() -> None:
    code, said = _said(["report", "--attempt", "-1"])
    assert code == 2
    assert said.endswith("\n\nError: Invalid value for '--attempt': -1 is not in the range 0<=x<=1000000000.\n")


def test_help_after_a_mistake_shows_the_mistake() -> None:
    code, said = _said(["report", "--bad", "--help"])
    assert (code, "No such option '--bad'" in said) == (2, True)
