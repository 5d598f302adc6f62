"""Calls of `hpcpace` in documents and help texts, parsed as the command line would parse them but not run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click

from hpcpace.cli import cli
from hpcpace.core.errors import HpcpaceError

_CALL = re.compile(r"(?:^|(?<=[\s/('\"`]))hpcpace (?=[a-z-])")
_ENDS = re.compile(r"\s#|[|;<>)]|&&|\$\?")
_SHELLS = ("", "bash", "sh", "console")
_LAUNCHERS = (
    "hpcpace",
    "sudo",
    "srun",
    "mpiexec",
    "mpirun",
    "torchrun",
    "eval",
    "python",
    "python3",
    "strace",
    "flock",
)


def calls_in(text: str) -> Iterator[str]:
    """Yield the calls of `hpcpace` in the code blocks of a document, from the first word after it."""
    for block in _blocks(text):
        lines = block.replace("\\\n", " ").splitlines()
        prompted = [line for line in lines if line.startswith("$ ")]  # what follows them is output
        for line in prompted or lines:
            word = line.lstrip(" $").partition(" ")[0]
            is_command = word.rpartition("/")[2] in _LAUNCHERS or re.match(r"[A-Z_]+=", word)
            if is_command and (call := call_in(line)) is not None:
                yield call


def spans_in(text: str) -> Iterator[str]:
    """Yield the calls of `hpcpace` in the sentences of a document, which may lack arguments."""
    for line in text.splitlines():
        yield from (span.strip() for span in re.findall(r"`hpcpace ([a-z][^`]*)`", line))


def _blocks(text: str) -> Iterator[str]:
    """Yield the code blocks that are of a shell."""
    lines: list[str] | None = None
    for line in text.splitlines():
        fence = re.match(r"\s*```(\w*)", line)
        if fence and lines is None:
            lines, language = [], fence[1]
        elif fence and lines is not None:
            if language in _SHELLS:
                yield "\n".join(lines)
            lines = None
        elif lines is not None:
            lines.append(line)


def call_in(line: str) -> str | None:
    """Return what a line of a shell gives to `hpcpace`; None if it does not call it."""
    found = _CALL.search(line)
    if found is None:
        return None
    quoted = re.sub(r"'[^']*'|\"[^\"]*\"", lambda text: "_" * len(text[0]), line[found.end() :])
    end = _ENDS.search(quoted)
    return line[found.end() :][: end.start() if end else None].strip().rstrip("\"'`")


def mistake_in(call: str) -> str:
    """Return what is wrong with a call; nothing if it can be parsed."""
    words = [word for word in shlex.split(call) if word != "..."]
    command: click.Command = cli
    context, path = None, "hpcpace"
    try:
        while True:
            context = command.make_context(path, words, parent=context)
            words = [*context._protected_args, *context.args]
            if not isinstance(command, click.Group) or (not words and command.invoke_without_command):
                return ""
            path, command, words = command.resolve_command(context, words)
    except click.exceptions.Exit:
        return ""
    except click.UsageError as error:
        return error.format_message()
    except HpcpaceError as error:
        return str(error)


def unknown_in(span: str) -> list[str]:
    """Return the words of a call, which may be incomplete, that are neither a command nor an option of it."""
    command: click.Command = cli
    words = re.split(r"[ =|>]+", span.partition(" -- ")[0])
    while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
        found = command.get_command(click.Context(command), words[0])
        if found is None:
            return [] if command.invoke_without_command else words[:1]
        command, words = found, words[1:]
    known = {"--help", *_options_of(command)}
    return [word for word in words if re.match(r"--[a-z]", word) and word not in known]


def _options_of(command: click.Command) -> Iterator[str]:
    yield from (name for param in command.params for name in (*param.opts, *param.secondary_opts))
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), name)
            assert found is not None
            yield from _options_of(found)
