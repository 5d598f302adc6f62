"""Remove secrets from what hpcpace writes: command lines, environment variables, settings, error messages.

Names show that their values are secrets (`hpcpace.secret_names`), tokens have well-known formats
(`hpcpace.secret_formats`), and some programs take passwords by short options (`hpcpace.secret_options`). All of it
takes time in proportion to the length of a text. docs/recorded-data.md has the rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from hpcpace.secret_formats import without_formats
from hpcpace.secret_names import Certainty, is_pin, is_secret, looks_secret, telling_word
from hpcpace.secret_options import secret_spans, secret_words

__all__ = ["MARK", "Redaction", "is_secret"]

MARK = "[redacted]"
"""Replaces a secret."""

_MIN_KNOWN = 8
# Separates the words of a command line while it is read as a text: like a blank, and no word has one.
_BETWEEN_WORDS = "\x1f"
_MANY = ("keys", "tokens", "secrets", "passwords", "credentials", "creds", "cookies")

# A password may itself contain an @. Without a password, only http has tokens as user names.
_URL_USER = re.compile(r"""(?P<scheme>(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://)(?P<user>[^\s/'"]*)@""")
_URL_PARAMETER = re.compile(r"""(?<=[?&])(?P<name>[\w.-]+)=(?P<value>[^&#\s'"]+)""")
_SIGNATURES = frozenset(("sig", "signature", "x-amz-signature", "x-goog-signature"))
_HEADER = re.compile(
    r"""(?i)\b(?P<before>bearer\s+(?!authenti|authori|credential)(?=[^\s'",]{12})"""
    r"""|basic\s+(?=[a-z+/]{0,60}[\d=])(?=[a-z0-9+/]{10,}={0,2}(?:[\s'",;]|$))"""
    r"""|authorization\\*['"]?\s*[:=]\s*\\*['"]?)"""
    r"""(?P<value>(?:\w+\s+)?[\w.~+/=:-]+)"""
)
_NAME = re.compile(
    r"""(?<![\w.-])(?P<name>-{0,2}[A-Za-z_][\w.-]*)"""
    r"""(?P<between>\\*['"]?\]?(?:\s?:?=\s?|\s?:\s*)|\s+(?P<is>(?i:is|was|provided|given|received|rejected):?\s+)|>|['"]?,?\s+)"""
)
# The beginning of a bare value suffices; reading each to its end would take quadratic time for a long text.
_VALUE = re.compile(r"""(?P<quote>\\{0,8}["'])(?P<inner>.*?)(?P=quote)|\\*["']?(?P<bare>[^\s"']{1,300})""", re.DOTALL)
_REST = re.compile(r"""[^\s"']*""")
_ASSIGNED = re.compile(r"(?P<name>[-+~\w./\[\]]+):?=")
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
# `password.py:12` is a place in a program.
_FILE = re.compile(
    r".*\.(?:py|pyx|pyc|txt|jsonl?|ya?ml|toml|ini|cfg|conf|csv|md|html|log|sh|h5|hdf5|pt|pth|bin|npz?|so|cc?|cpp|cuh?|h|hpp)"
)
# "the password is required", "invalid credentials: check your login".
_PROSE = re.compile(
    r"(?:[a-z]{2,}(?:ed|ing|able|ible|ect|alid)|a|an|the|not?|too|in|on|at|of|by|to|as|for|from|with|without|and|or|only"
    r"|here|there|what|that|this|it|if|same|empty|wrong|unknown|bad|good|right|old|new|ok|set|unset|read|given|sent|kept"
    r"|taken|shown|hidden|written|blank|short|long|weak|strong|absent|present|optional|mandatory|safe|unsafe|public"
    r"|private|secret|never|always|still|now|used|try|choose|check|see|please|permission|access|enter|use|found|put|must"
    r"|may|can|cannot|could|should|will|would|has|have|are|is|was|were|be|longer|shorter|your|you|out|expected|got|end)",
)
_PUNCTUATION = ",;)]}"
# `key = key.transpose(1, 2)` is a line of a program.
_CODE = re.compile(r"[A-Za-z_][\w.]*[\[(]")
_MIN_BARE = {Certainty.SURE: 6, Certainty.LIKELY: 16, Certainty.POSSIBLE: 16}
_MIN_AFTER_COLON = {"token": 12, "key": 12}
# What follows has no bearing on whether a value is a secret.
_MAX_JUDGED = 200


@dataclass(frozen=True)
class Redaction:
    """Removes secrets from texts; doing so twice changes nothing more.

    Attributes:
        known: secrets that are removed wherever they occur.
    """

    known: tuple[str, ...] = ()

    @classmethod
    def of(cls, environ: Mapping[str, str], command: Sequence[str] = ()) -> Redaction:
        """Return a redaction that knows the secrets of an environment and of a command line."""
        found = {value for name, value in environ.items() if is_secret(name, value)} | set(_secret_values(command))
        # Short secrets would match inside other words, and a path leads to a secret but is not one.
        kept = [value for value in found if len(value) >= _MIN_KNOWN and value not in MARK and value[0] != "/"]
        return cls(tuple(sorted(kept, key=lambda value: (-len(value), value))))

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        for secret in self.known:
            text = text.replace(secret, MARK)
        text = _URL_USER.sub(_without_user, text)
        text = _URL_PARAMETER.sub(_without_parameter, text)
        text = without_formats(text, _mark)
        text = _HEADER.sub(lambda found: f"{found['before']}{_mark(found['value'])}", text)
        return _without_values(_without_options(text))

    def command(self, words: Iterable[str]) -> list[str]:
        """Return the words of a command line without secrets, the same number of words."""
        words = list(words)
        secret = _secrets_by_option(words)
        marked = [f"{word[: secret[i]]}{MARK}" if i in secret else word for i, word in enumerate(words)]
        # A header or a private key without quotes is several words.
        read = self.text(_BETWEEN_WORDS.join(marked)).split(_BETWEEN_WORDS)
        return [self._word(word) for word in (read if len(read) == len(marked) else marked)]

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables without secrets."""
        return {name: MARK if is_secret(name, value) else self.text(value) for name, value in environ.items()}

    def content(self, value: Any) -> Any:
        """Return a JSON value without secrets; a list of texts is treated as a command line."""
        if isinstance(value, (str, PurePath)):
            return self.text(str(value))
        if isinstance(value, dict):
            return {self._key(key): self._entry(key, entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            if value and all(isinstance(entry, str) for entry in value):
                return self.command(value)
            return [self.content(entry) for entry in value]
        return value

    def _key(self, key: Any) -> Any:
        return self.text(key) if isinstance(key, str) else key

    def _entry(self, key: Any, value: Any) -> Any:
        certainty = telling_word(key)[1] if isinstance(key, str) else Certainty.NONE
        if not certainty or not value or isinstance(value, bool):
            return self.content(value)
        is_scalar = isinstance(value, (str, int, float))
        is_hidden = is_secret(key, str(value)) if is_scalar else certainty == Certainty.SURE
        return MARK if is_hidden else self.content(value)

    def _word(self, word: str) -> str:
        secret = _assigned_secret(word)
        return word[:secret] + MARK if secret else self.text(word)


def _secrets_by_option(words: Sequence[str]) -> dict[int, int]:
    """Return the words of a command line that hold a secret because of a word before, and where it begins in each."""
    found = dict(secret_words(words))
    name, takes_many = "", False
    for index, word in enumerate(words):
        is_option = word.startswith("--") or bool(re.fullmatch(r"-[A-Za-z]", word))
        is_value = bool(name) and not is_option and is_secret(name, word)
        if is_value:
            found[index] = 0
        if is_option or not (is_value and takes_many):
            name = word if _OPTION.fullmatch(word) and not is_value else ""
            takes_many = name.lower().endswith(_MANY)
    return found


def _assigned_secret(word: str) -> int:
    """Return where the value of `name=value` begins in a word if it is a secret, the first of `a=b=value`; else 0."""
    position = 0
    while found := _ASSIGNED.match(word, position):
        position = found.end()
        name = found["name"]
        if telling_word(name)[1] and is_secret(name, word[position : position + _MAX_JUDGED].rstrip(_PUNCTUATION)):
            return position
    return 0


def _secret_values(command: Sequence[str]) -> list[str]:
    found = [command[index][start:] for index, start in _secrets_by_option(command).items()]
    return found + [word[secret:] for word in command if (secret := _assigned_secret(word))]


def _mark(secret: str) -> str:
    """Return what stands in place of a secret; as many words of a command line as it was."""
    return MARK + _BETWEEN_WORDS * secret.count(_BETWEEN_WORDS)


def _without_user(found: re.Match[str]) -> str:
    is_secret_user = ":" in found["user"] or found["scheme"].lower() in ("http://", "https://")
    return f"{found['scheme']}{MARK}@" if is_secret_user else found[0]


def _without_parameter(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    return f"{name}={MARK}" if name.lower() in _SIGNATURES or is_secret(name, value) else found[0]


def _without_options(text: str) -> str:
    """Return a text without the secrets of the command lines of known programs in it."""
    pieces, position = [], 0
    for begin, end in secret_spans(text):
        if text[begin - 1 : end] != MARK and not text.startswith(MARK, begin):
            pieces += [text[position:begin], _mark(text[begin:end])]
            position = end
    return "".join((*pieces, text[position:]))


def _without_values(text: str) -> str:
    """Return a text without the values after names of secrets, as `name=value`, in JSON, of an option, or in prose."""
    pieces, position = [], 0
    for found in _NAME.finditer(text):
        if found.start() < position:
            continue
        value = _VALUE.match(text, found.end()) if telling_word(found["name"])[1] else None
        if value is None:
            continue
        group = "inner" if value["inner"] is not None else "bare"
        if value[group].startswith(MARK) or not _is_value(found, value):
            continue
        pieces += [text[position : value.start(group)], _mark(value[group])]
        position = value.end(group)
        if group == "bare" and (rest := _REST.match(text, position)):
            position = rest.end()
    return "".join((*pieces, text[position:]))


def _is_value(found: re.Match[str], value: re.Match[str]) -> bool:
    """Return whether what follows a name of a secret is one."""
    name, between, quoted = found["name"], found["between"], value["inner"] is not None
    content = value["inner"] if quoted else value["bare"].rstrip(_PUNCTUATION)
    if name.startswith("-") and "=" not in between and ":" not in between and not found["is"]:
        return not content.startswith("-") and is_secret(name, content)
    certainty = telling_word(name)[1]
    before = found.string[found.start() - 1 : found.start()]
    if "=" in between:
        is_code = not quoted and between.strip() != between and certainty < Certainty.SURE and _CODE.match(content)
        return before not in ("?", "&") and not is_code and is_secret(name, content)
    if _FILE.fullmatch(name[-_MAX_JUDGED:]):
        return False
    if not quoted:
        content = content.rstrip(".!?:")
    if ":" in between and not found["is"]:
        # The end of a path or of a quotation is no key: "cannot read '/etc/passwd': permission denied".
        is_key = not (before == "/" or between[0] in "'\"\\")
        if quoted:
            return is_secret(name, content)
        if certainty == Certainty.SURE and is_key:
            return is_secret(name, content) and not _PROSE.fullmatch(content)
        if certainty == Certainty.SURE and content.isdecimal():
            return True
        min_length = _MIN_AFTER_COLON.get(telling_word(name)[0], _MIN_KNOWN)
        is_assignment = is_key and not name.replace(".", "").isalpha()
        return is_secret(name, content) if is_assignment else _looks_secret(name, content, min_length)
    if found["is"]:
        is_hidden = certainty == Certainty.SURE and is_secret(name, content) and not _PROSE.fullmatch(content)
        return is_hidden or (quoted and is_secret(name, content)) or _looks_secret(name, content, _MIN_KNOWN)
    if between == ">":
        return before == "<" and "</" in content and is_secret(name, content.partition("<")[0])
    if between.strip():  # the next of several names in quotes
        return False
    return (quoted and certainty == Certainty.SURE) or _looks_secret(name, content, _MIN_BARE[certainty])


def _looks_secret(name: str, content: str, min_length: int) -> bool:
    return is_secret(name, content) and (is_pin(name, content) or looks_secret(content[:_MAX_JUDGED], min_length))
