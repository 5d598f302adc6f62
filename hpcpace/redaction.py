"""Remove secrets from what hpcpace writes: command lines, environment variables, settings, error messages.

The words of a name show that its value is a secret: `--wandb-key` and `HF_TOKEN` do, `--key-padding-mask` and
`--max-tokens` do not. Well-known token formats and passwords in URLs are found anywhere. docs/recorded-data.md has the
rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import PurePath
from typing import Any

MARK = "[redacted]"
"""Replaces a secret."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# One of these anywhere in a name makes its value a secret.
_SECRETS = _words(
    "password passwords passwd passphrase passcode secret secrets jwt bearer credential credentials cred creds "
    "authorization cookie cookies apikey apikeys accesskey secretkey privatekey authkey apitoken accesstoken authtoken "
    "refreshtoken sessiontoken"
)
# Two words that together mean one of the above, also in the plural.
_PAIRS = frozenset(
    [(first, "key") for first in ("api", "access", "auth", "private", "signing", "encryption")]
    + [(first, "token") for first in ("api", "access", "auth", "refresh", "session", "bearer")]
)
_MANY = ("keys", "tokens", "secrets", "passwords", "credentials", "creds", "cookies")
# A name that ends with one of these means something about a secret, like the file that it is in.
_ABOUT = _words(
    "file files path dir folder stdin prompt env type kind mode method policy length len size count num ttl timeout "
    "expiry expires age interval"
)
# Words that may follow the one that counts.
_AFTER = _words("value id string str text data pem prod dev test new old primary")
# These only count as the last word of a name, and not after any of the given words.
_HARMLESS_BEFORE = {
    "token": _words(
        "pad padding eos bos unk unknown sep cls mask image img video audio visual vision text special stop start end "
        "begin next prev previous last first num n max min per each every of total avg mean single class register "
        "local global dispatch drop word sub by input output target prompt newline decoder encoder multi route "
        "placeholder extra new added is use has no reserved fim think tool"
    ),
    "key": _words(
        "sort group primary foreign cache partition padding pad mask query host hash seq batch input output image img "
        "text label target index dict state model metric monitor column row map json config param parameter lookup by "
        "num n per public hot feature sample loss reward answer prompt question caption video audio dataset field "
        "shard bucket rng random prng seed is use has no order weight weights module layer attention"
    ),
    "auth": _words("no use with enable disable require requires required skip has is without"),
    "pass": _words(
        "forward backward first second third single two three multi num n one per each every low high band by fast "
        "slow is no last next optimizer full"
    ),
    "pat": _words("file name glob search"),
    "pwd": _words("old"),
    "api": _words(""),
}
# Words that mean something else on their own: PWD is a folder.
_NEVER_ALONE = _words("pwd pat")
_SWITCH = re.compile(r"|true|false|yes|no|on|off|none|null|auto|default", re.IGNORECASE)
_SMALL_NUMBER = re.compile(r"[-+]?\d{1,5}|[-+]?\d*\.\d*(e[-+]?\d+)?|[-+]?\d+e[-+]?\d+", re.IGNORECASE)
_LOOKS_RANDOM = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])[\w+=.~-][\w+/=.~-]{11,}")
_LEAST_KNOWN = 8

_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
# A password may itself contain an @. Without a password, only http has tokens as user names.
_URL_USER = re.compile(r"""(?P<scheme>(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://)(?P<user>[^\s/'"]*)@""")
_URL_PARAMETER = re.compile(r"""(?<=[?&])(?P<name>[\w.-]+)=(?P<value>[^&#\s'"]+)""")
_SIGNATURES = _words("sig signature x-amz-signature x-goog-signature")
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|sk-(?=[\w-]{0,200}\d)[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}|xox[abeoprs]-[\w-]{10,}|AIza[\w-]{30,}"
    r"|ya29\.[\w-]{16,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|(?:nvapi|gsk)[-_][\w-]{16,}|wandb_v\d_\w{16,}"
    r"|local-[0-9a-f]{40}|eyJ[\w-]{6,600}\.[\w-]{6,}(?:\.[\w-]*)?)"
)
_HEADER = re.compile(
    r"""(?i)\b(?P<before>bearer\s+(?=[^\s'",]{12})|authorization\\*['"]?\s*[:=]\s*\\*['"]?)"""
    r"""(?P<value>(?:\w+\s+)?[\w.~+/=:-]+)"""
)
_NAME = re.compile(
    r"""(?<![\w.-])(?P<name>-{0,2}[A-Za-z_][\w.-]*)(?P<between>\\*['"]?\]?(?:\s?:?=\s?|\s?:\s*)|['"]?,?\s+)"""
)
# The beginning of a bare value suffices; reading each to its end would take quadratic time for a long text.
_VALUE = re.compile(r"""(?P<quote>\\*["'])(?P<inner>.*?)(?P=quote)|\\*["']?(?P<bare>[^\s"']{1,1000})""", re.DOTALL)
_REST = re.compile(r"""[^\s"']*""")
_ASSIGNED = re.compile(r"(?P<name>[-+~\w./\[\]]+):?=")
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")


def is_secret(name: str, value: str = "...") -> bool:
    """Return whether a value is a secret, judging by its name.

    Args:
        name: name of an option, a variable or a key.
        value: its value; under most names, switches and small numbers are not secrets.
    """
    word, is_sure = _telling_word(name)
    if not word or _SWITCH.fullmatch(value) or (not is_sure and _SMALL_NUMBER.fullmatch(value)):
        return False
    return word != "api" or bool(_LOOKS_RANDOM.fullmatch(value))


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
        kept = [value for value in found if len(value) >= _LEAST_KNOWN and value not in MARK and value[0] != "/"]
        return cls(tuple(sorted(kept, key=lambda value: (-len(value), value))))

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        for secret in self.known:
            text = text.replace(secret, MARK)
        text = _URL_USER.sub(_without_user, _PEM.sub(MARK, text))
        text = _URL_PARAMETER.sub(_without_parameter, text)
        text = _SHAPES.sub(MARK, text)
        text = _HEADER.sub(lambda found: f"{found['before']}{MARK}", text)
        return _without_values(text)

    def command(self, words: Iterable[str]) -> list[str]:
        """Return the words of a command line without secrets, the same number of words."""
        return [MARK if is_value else self._word(word) for word, is_value in _marked(words)]

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables without secrets."""
        return {name: MARK if is_secret(name, value) else self.text(value) for name, value in environ.items()}

    def content(self, value: Any) -> Any:
        """Return a JSON value without secrets; a list of texts is treated as a command line."""
        if isinstance(value, (str, PurePath)):
            return self.text(str(value))
        if isinstance(value, dict):
            return {key: self._entry(key, entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            if value and all(isinstance(entry, str) for entry in value):
                return self.command(value)
            return [self.content(entry) for entry in value]
        return value

    def _entry(self, key: Any, value: Any) -> Any:
        word, is_sure = _telling_word(key) if isinstance(key, str) else ("", False)
        if not word or not value or isinstance(value, bool):
            return self.content(value)
        is_scalar = isinstance(value, (str, int, float))
        return MARK if (is_secret(key, str(value)) if is_scalar else is_sure) else self.content(value)

    def _word(self, word: str) -> str:
        secret = _assigned_secret(word)
        return word[:secret] + MARK if secret else self.text(word)


@lru_cache(maxsize=4096)
def _telling_word(name: str) -> tuple[str, bool]:
    """Return the word of a name that shows its value to be a secret, empty without any, and whether that is certain."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _ABOUT:
        return "", False
    sure = [word for word in words if word in _SECRETS]
    sure += [" ".join(pair) for pair in pairwise(words) if (pair[0], pair[1].removesuffix("s")) in _PAIRS]
    if sure:
        return sure[0], True
    while len(words) > 1 and words[-1] in _AFTER:
        words.pop()
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last not in _HARMLESS_BEFORE or before in _HARMLESS_BEFORE[last] or (not before and last in _NEVER_ALONE):
        return "", False
    return last, False


def _marked(words: Iterable[str]) -> list[tuple[str, bool]]:
    """Return the words of a command line, each with whether it is the secret value of an option before it."""
    marked, name, takes_many = [], "", False
    for word in words:
        is_option = word.startswith("--") or bool(re.fullmatch(r"-[A-Za-z]", word))
        is_value = bool(name) and not is_option and is_secret(name, word)
        marked.append((word, is_value))
        if is_option or not (is_value and takes_many):
            name = word if _OPTION.fullmatch(word) and not is_value else ""
            takes_many = name.lower().endswith(_MANY)
    return marked


def _assigned_secret(word: str) -> int:
    """Return where the value of `name=value` begins in a word if it is a secret, the first of `a=b=value`; else 0."""
    position = 0
    while found := _ASSIGNED.match(word, position):
        position = found.end()
        if _telling_word(found["name"])[0] and is_secret(found["name"], word[position:]):
            return position
    return 0


def _secret_values(command: Sequence[str]) -> list[str]:
    found = [word for word, is_value in _marked(command) if is_value]
    return found + [word[secret:] for word in command if (secret := _assigned_secret(word))]


def _without_user(found: re.Match[str]) -> str:
    is_secret_user = ":" in found["user"] or found["scheme"].lower() in ("http://", "https://")
    return f"{found['scheme']}{MARK}@" if is_secret_user else found[0]


def _without_parameter(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    return f"{name}={MARK}" if name.lower() in _SIGNATURES or is_secret(name, value) else found[0]


def _without_values(text: str) -> str:
    """Return a text without the values after names of secrets, as `name=value`, in JSON, or of an option."""
    pieces, position = [], 0
    for found in _NAME.finditer(text):
        if found.start() < position:
            continue
        value = _VALUE.match(text, found.end()) if _telling_word(found["name"])[0] else None
        if value is None:
            continue
        group = "inner" if value["inner"] is not None else "bare"
        if value[group].startswith(MARK) or not _is_assigned(found, value):
            continue
        pieces += [text[position : value.start(group)], MARK]
        position = value.end(group)
        if group == "bare" and (rest := _REST.match(text, position)):
            position = rest.end()
    return "".join((*pieces, text[position:]))


def _is_assigned(found: re.Match[str], value: re.Match[str]) -> bool:
    name, between, quoted = found["name"], found["between"], value["inner"] is not None
    content = value["inner"] if quoted else value["bare"].rstrip(",;)]}")
    if "=" not in between and ":" not in between:
        return name.startswith("-") and not content.startswith("-") and is_secret(name, content)
    if ":" in between and "=" not in between and not quoted and name.isalpha() and not _telling_word(name)[1]:
        # "unexpected token: end of file" is prose.
        return bool(_LOOKS_RANDOM.fullmatch(content))
    return is_secret(name, content)
