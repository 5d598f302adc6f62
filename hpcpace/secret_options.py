"""Options of well-known programs whose values are secrets although their names do not say so: `sshpass -p`."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator

from hpcpace.secret_names import looks_secret

_DATABASES = ("mysql", "mysqldump", "mysqladmin", "mysqlimport", "mysqlshow", "mariadb", "mariadb-dump")
_MONGO = ("mongo", "mongosh", "mongodump", "mongorestore", "mongoexport", "mongoimport")
_LDAP = ("ldapsearch", "ldapmodify", "ldapadd", "ldapwhoami", "ldapdelete")
# What may follow the option as the next word, and what may be attached to it.
_NEXT = {
    **dict.fromkeys(("curl",), ("-u", "--user", "-U", "--proxy-user")),
    **dict.fromkeys(("http", "https", "redis-cli"), ("-a", "--auth", "--pass")),
    **dict.fromkeys(("sshpass", *_MONGO), ("-p",)),
    **dict.fromkeys(("zip", "unzip", "ipmitool"), ("-P",)),
    **dict.fromkeys(_LDAP, ("-w",)),
    **dict.fromkeys(("smbclient", "rpcclient"), ("-U",)),
    "openssl": ("-passin", "-passout", "-pass", "-k", "-K"),
    # docker login, podman login, az login, helm registry login
    "login": ("-p",),
}
_ATTACHED = {
    **dict.fromkeys((*_DATABASES, "sshpass", "7z", "7za"), ("-p",)),
    **dict.fromkeys(("curl",), ("-u", "-U", "--user=", "--proxy-user=")),
    **dict.fromkeys(("zip", "unzip"), ("-P",)),
}
# Here only what has both a name and a password is secret, as `me:secret` or `me%secret`.
_WITH_NAME = {"curl": ":", "http": ":", "https": ":", "smbclient": "%", "rpcclient": "%"}
_PROGRAMS = frozenset((*_NEXT, *_ATTACHED, "wandb"))
# A cheap look whether any of them is in a text.
_ANY = re.compile(rf"\b(?:{'|'.join(sorted(map(re.escape, _PROGRAMS), key=len, reverse=True))})\b")
_TEXT_WORD = re.compile(r"""[^\s'",;|&()\[\]{}<>`\\]+|[;|&\n]""")
_REST = re.compile(r"""[^\s'"]*""")
_ENDS = ";|&\n"
_PORT = re.compile(r"\d{1,5}")
_MIN_WANDB_KEY = 20
# No program's name is longer, nor is what is looked at of a value.
_MAX_WORD = 1000


def secret_words(words: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield index and first secret character of each word of a command line that holds a secret of a known program."""
    program, option, is_login = "", "", False
    before: deque[str] = deque(maxlen=5)
    for index, word in enumerate(words):
        name = word[-_MAX_WORD:].rpartition("/")[2]
        is_value = bool(option) and not word.startswith("-") and _is_value(program, word)
        if is_value or (is_login and looks_secret(word[:_MAX_WORD], _MIN_WANDB_KEY)) or _is_netrc(before):
            yield index, 0
        elif attached := _attached(program, word):
            yield index, attached
        is_login = (name == "login" and program == "wandb") or (is_login and word.startswith("-"))
        if not word.strip(_ENDS):
            program, option = "", ""
            continue
        if not option and name in _PROGRAMS:
            program = name
        option = word if word in _NEXT.get(program, ()) else ""
        before.append(word)


def secret_spans(text: str) -> list[tuple[int, int]]:
    """Return begin and end of the secrets in a text that has command lines of known programs in it, in order."""
    if not _ANY.search(text):
        return []
    found = list(_TEXT_WORD.finditer(text))
    spans: list[tuple[int, int]] = []
    for index, start in secret_words(word[0] for word in found):
        begin = found[index].start() + start
        if (not spans or begin >= spans[-1][1]) and (rest := _REST.match(text, begin)):
            spans.append((begin, rest.end()))
    return spans


def _is_netrc(before: deque[str]) -> bool:
    """Return whether a password comes next: `machine HOST login NAME password`."""
    words = list(before)
    return (
        words[-1:] == ["password"]
        and words[-3:-2] == ["login"]
        and ("machine" in words[:1] or "default" in words[-4:-3])
    )


def _is_value(program: str, word: str) -> bool:
    separator = _WITH_NAME.get(program)
    if separator is not None:
        return separator in word[:-1]
    return not (program == "login" and _PORT.fullmatch(word))


def _attached(program: str, word: str) -> int:
    """Return where a value begins that is attached to an option; 0 without one."""
    for option in _ATTACHED.get(program, ()):
        if word.startswith(option) and len(word) > len(option) and _is_value(program, word[len(option) :]):
            return len(option)
    return 0
