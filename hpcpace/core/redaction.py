"""Remove secrets from what hpcpace writes: values whose names, or whose looks, are those of secrets.

The words of a name decide: `--wandb-key` and `HF_TOKEN` name secrets, `--key-padding-mask` and `--max-tokens` do not.
docs/recorded-data.md has the rules.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from hpcpace.core.records import dataclass


class Certainty(IntEnum):
    """Which values of a name are secrets."""

    NONE = 0
    POSSIBLE = 1
    """Those that look like one: `--tokens`, `--pin`."""
    LIKELY = 2
    """All but switches and small numbers: `--token`, `--key`."""
    SURE = 3
    """All but switches: `--password`."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# One of these anywhere in a name makes its value a secret.
_SECRETS = _words(
    "passcode passwort sshpass jwt bearer credential credentials cred creds authorization cookie cookies accesskey "
    "secretkey privatekey authkey apitoken accesstoken authtoken refreshtoken sessiontoken"
)
# So does a word with such an end: PGPASSWORD.
_SECRET_ENDS = ("password", "passwd", "passphrase", "secret", "apikey", "passwords", "secrets", "apikeys")
# sudo's NOPASSWD.
_NO_SECRETS = _words("nopasswd nopassword")
# Two words that together mean one of the above, also in the plural.
_PAIRS = frozenset(
    [(first, "key") for first in ("api", "access", "auth", "private", "signing", "encryption", "account")]
    + [(first, "token") for first in ("api", "access", "auth", "refresh", "session", "bearer")]
)
# A name that ends with one of these means something about a secret, like the file that it is in.
_ABOUT = _words(
    "file files path dir folder stdin prompt env type kind mode method policy length len size count num ttl timeout "
    "expiry expires age interval"
)
# Words that may follow the one that counts.
_AFTER = _words("value id string str text data pem prod dev test new old primary")
_BEFORE_TOKEN = _words(
    "pad padding eos bos unk unknown sep cls mask image img video audio visual vision text special stop start end "
    "begin next prev previous last first num n max min per each every of total avg mean single class register "
    "local global dispatch drop word sub by input output target prompt newline decoder encoder multi route "
    "placeholder extra new added is use has no reserved fim think tool eod eot eom speech unconditional null page"
)
# These only count as the last word of a name, and not after any of the given words.
_HARMLESS_BEFORE = {
    "token": _BEFORE_TOKEN,
    "key": _words(
        "sort group primary foreign cache partition padding pad mask query host hash seq batch input output image img "
        "text label target index dict state model metric monitor column row map json config param parameter lookup by "
        "num n per public hot feature sample loss reward answer prompt question caption video audio dataset field "
        "shard bucket rng random prng seed is use has no order weight weights module layer attention missing "
        "unexpected duplicate unknown bad value data rel pos checkpoint ckpt teacher student ema proj split class "
        "category score time lang source "
        "src tgt part"
    ),
    "auth": _words("no use with enable disable require requires required skip has is without"),
    "pass": _words(
        "forward backward first second third single two three multi num n one per each every low high band by fast "
        "slow is no last next optimizer full"
    ),
    "pw": frozenset(),
    "pswd": frozenset(),
    "psk": frozenset(),
    "otp": frozenset(),
    "pat": _words("file name glob search"),
    "pwd": _words("old"),
    "api": frozenset(),
    "tokens": _BEFORE_TOKEN,
    "tk": frozenset(),
    "tok": frozenset(),
    "pin": _words("cpu gpu core thread numa"),
    "sig": frozenset(),
}
# Words that mean something else on their own: PWD is a folder.
_NEVER_ALONE = _words("pwd pat")
# The fewest characters of a value that these words make a secret: `--api rest-v1` is none.
_POSSIBLE = {"api": 12, "tokens": 8, "tk": 8, "tok": 16, "pin": 8, "sig": 8}
_MIN_PIN = 4
# Some of these are written as options far more often for a secret than for anything but these values.
_HARMLESS_VALUES = {
    "tokens": _words("all bpe byte bytes char chars character unigram word words subword sentencepiece"),
    "tk": frozenset[str](),
    "pin": _words(
        "all close compact core cores cpu cpus device gpu gpus host memory node nodes numa scatter socket "
        "sockets spread strict thread threads"
    ),
}
_NUMBERS_OR_MARKERS = re.compile(r"[\d.,:;_eE+-]+|<.*>|\[.*\]|'<.*>'")
# Or nothing that could be one: `key=[]`, `token=%s`.
_SWITCH = re.compile(r"[\W_]*|%[a-z]|true|false|yes|no|on|off|none|null|auto|default", re.IGNORECASE)
_AUTH_METHODS = _words("basic digest kerberos gssapi ldap munge oauth oauth2 oidc saml ssh ssl tls x509 token jwt key")
_SMALL_NUMBER = re.compile(r"[-+]?\d{1,5}|[-+]?\d*\.\d*(e[-+]?\d+)?|[-+]?\d+e[-+]?\d+", re.IGNORECASE)
# `model.layers.0.weight` is a parameter.
_PARAMETER = re.compile(r"[A-Za-z_]\w*(?:\.\w+){2,}")
_MIXED = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])[\w+=~@!^&#$%*?-][\w+/=.~@!^&#$%*?-]*")
_PATH_OR_QUANTITY = re.compile(r"\.{1,2}/.*|[\d_,.]+[A-Za-z]{1,3}|.*\.[a-z]{1,5}\d?|(?=.{,31}\Z)[^/]*/.*")
_MAX_NAME = 300
# What follows has no bearing on whether a value is a switch, a number or random.
_MAX_VALUE = 200


def is_secret(name: str, value: str = "secret") -> bool:
    """Return whether a value is a secret, judging by its name.

    Args:
        name: name of an option, a variable or a key.
        value: its value; under most names, switches and small numbers are not secrets.
    """
    word, certainty = telling_word(name)
    value = value[:_MAX_VALUE]
    if certainty == Certainty.NONE or _SWITCH.fullmatch(value):
        return False
    if certainty == Certainty.SURE:
        return True
    if certainty == Certainty.POSSIBLE:
        if is_pin(name, value) or looks_secret(value, _POSSIBLE[word]):
            return True
        return name.startswith("-") and word in _HARMLESS_VALUES and not _is_harmless(word, value)
    is_parameter = word in ("key", "token") and _PARAMETER.fullmatch(value)
    is_method = word == "auth" and value.lower() in _AUTH_METHODS
    return not (_SMALL_NUMBER.fullmatch(value) or is_parameter or is_method)


def is_pin(name: str, value: str) -> bool:
    """Return whether a value is that of a PIN, of digits only."""
    return len(value) >= _MIN_PIN and value[:_MAX_VALUE].isdecimal() and telling_word(name)[0] == "pin"


def _is_harmless(word: str, value: str) -> bool:
    is_known = value.lower() in _HARMLESS_VALUES[word]
    return bool(is_known or _NUMBERS_OR_MARKERS.fullmatch(value) or _PATH_OR_QUANTITY.fullmatch(value))


def telling_word(name: str) -> tuple[str, Certainty]:
    """Return the word of a name that shows its value to be a secret, empty without any, and how certain that is."""
    return _telling_word(name[-_MAX_NAME:])


def looks_secret(value: str, min_length: int) -> bool:
    """Return whether a value looks like a secret: letters and digits mixed, and no path, quantity or parameter."""
    return (
        len(value) >= min_length
        and bool(_MIXED.fullmatch(value))
        and not _PATH_OR_QUANTITY.fullmatch(value)
        and not _PARAMETER.fullmatch(value)
        and value.lower() not in _AUTH_METHODS
    )


@lru_cache(maxsize=4096)
def _telling_word(name: str) -> tuple[str, Certainty]:
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _ABOUT:
        return "", Certainty.NONE
    sure = [word for word in words if word in _SECRETS or (_ends_as_secret(word) and word not in _NO_SECRETS)]
    sure += [" ".join(pair) for pair in pairwise(words) if (pair[0], pair[1].removesuffix("s")) in _PAIRS]
    if sure:
        return sure[0], Certainty.SURE
    while len(words) > 1 and words[-1] in _AFTER:
        words.pop()
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last not in _HARMLESS_BEFORE or before in _HARMLESS_BEFORE[last] or (not before and last in _NEVER_ALONE):
        return "", Certainty.NONE
    return last, Certainty.POSSIBLE if last in _POSSIBLE else Certainty.LIKELY


def _ends_as_secret(word: str) -> bool:
    return word.endswith(_SECRET_ENDS) or (word.endswith("pw") and len(word) > len("bpw"))  # bits per weight


# Prefixes of tokens, as the services and secret scanners document them; behind these come letters and digits only.
_PLAIN = (
    "hf|api_org|gh[pousr]|npm|do[opr]_v1|shp(?:at|ca|pa|ss)|[sprk]k_(?:live|test)|whsec|r8|tgp_v1|nfp|ntn|sbp|lin_api"
    "|figd|rubygems|sntry[su]|ph[xs]|fw"
)
# Behind these come dashes and underscores, too.
_DASHED = (
    "github_pat_|gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct|wt)-|dckr_[po]at_|pypi-|nvapi[-_]|gsk[-_]|sk-"
    "|(?:xai|pplx|csk|tskey|pul|NRAK|PMAK|CFPAT|GOCSPX)-|xapp-|sq0csp-|ATATT|ATCTT|ATBB|hv[sbr]\\.|ya29\\.|1//0|AIza"
    "|wandb_v\\d_|glsa_|ops_"
)
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    rf"(?:{_PLAIN})_(?=[A-Za-z]{{0,200}}\d)[A-Za-z0-9]{{16,}}"
    rf"|(?:{_DASHED})(?=[A-Za-z_-]{{0,200}}\d)[\w-]{{16,}}(?:\.[\w-]+){{0,3}}"
    r"|(?:AKIA|ASIA|ABIA)[A-Z0-9]{16}(?:[\s:,;=/|'\"]{1,4}[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/]))?"
    r"|xox[abceoprs]-[\w-]{10,}|SG\.[\w-]{16,}\.[\w-]{16,}|local-[0-9a-f]{40}|AGE-SECRET-KEY-1[A-Z0-9]{20,}"
    r"|(?:SK|key-|dapi)[0-9a-f]{32}"
    # Telegram and Discord.
    r"|(?:bot)?\d{6,12}:AA[\w-]{20,}|[MNO][A-Za-z0-9]{23,27}\.[\w-]{6}\.[\w-]{27,}"
    r"|eyJ[\w-]{6,600}\.[\w-]{6,}(?:\.[\w-]*)?"
    r")"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN\s[A-Z0-9\s]{0,40}PRIVATE\sKEY[A-Z\s]{0,10}-----.*?"
    r"(?:-----END\s[A-Z0-9\s]{0,40}PRIVATE\sKEY[A-Z\s]{0,10}-----|\Z)"
    r"|PuTTY-User-Key-File-\d.*?(?:Private-MAC:\s\w*|\Z)",
    re.DOTALL,
)
# Whoever knows the path behind `hooks` can post.
_HOOK = re.compile(r"""(?i)(?P<before>(?:web)?hooks?\w{0,4}(?:\.[\w.-]{1,100})?(?::\d{1,5})?/)(?P<path>[^\s'"<>?#]+)""")
_HAS_DIGIT = re.compile(r"\D{0,300}\d")
_MAX_URL = 300
_MIN_HOOK = 8


def without_formats(text: str, mark: Callable[[str], str]) -> str:
    """Return a text without tokens, private keys and webhooks of well-known format.

    Args:
        text: the text.
        mark: returns what stands in place of a secret.
    """
    text = _PRIVATE_KEY.sub(lambda found: mark(found[0]), text)
    text = _HOOK.sub(lambda found: f"{found['before']}{mark(found['path'])}" if _is_hook(found) else found[0], text)
    return _TOKEN.sub(lambda found: mark(found[0]), text)


def _is_hook(found: re.Match[str]) -> bool:
    """Return whether this is in a URL, and not like .git/hooks/pre-commit or a page about webhooks."""
    before = found.string[max(0, found.start() - _MAX_URL) : found.start()]
    is_url = "://" in before and not re.search(r"[\s'\"]", before[before.rindex("://") :])
    return is_url and len(found["path"]) >= _MIN_HOOK and bool(_HAS_DIGIT.match(found["path"]))


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
        is_value = bool(option) and not word.startswith("-") and _is_option_value(program, word)
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


def _is_option_value(program: str, word: str) -> bool:
    separator = _WITH_NAME.get(program)
    if separator is not None:
        return separator in word[:-1]
    return not (program == "login" and _PORT.fullmatch(word))


def _attached(program: str, word: str) -> int:
    """Return where a value begins that is attached to an option; 0 without one."""
    for option in _ATTACHED.get(program, ()):
        if word.startswith(option) and len(word) > len(option) and _is_option_value(program, word[len(option) :]):
            return len(option)
    return 0


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
        return self._content(value, {})

    def _content(self, value: Any, texts: dict[str, str]) -> Any:
        """Do so, and remember in `texts` what becomes of each: thousands of ranks have the same names and hosts."""
        if isinstance(value, (str, PurePath)):
            return self._text_of(str(value), texts)
        if isinstance(value, dict):
            return {
                self._text_of(key, texts) if isinstance(key, str) else key: self._entry(key, entry, texts)
                for key, entry in value.items()
            }
        if isinstance(value, (list, tuple)):
            if value and all(isinstance(entry, str) for entry in value):
                return self.command(value)
            return [self._content(entry, texts) for entry in value]
        return value

    def _text_of(self, text: str, texts: dict[str, str]) -> str:
        if text not in texts:
            texts[text] = self.text(text)
        return texts[text]

    def _entry(self, key: Any, value: Any, texts: dict[str, str]) -> Any:
        certainty = telling_word(key)[1] if isinstance(key, str) else Certainty.NONE
        if not certainty or not value or isinstance(value, bool):
            return self._content(value, texts)
        is_scalar = isinstance(value, (str, int, float))
        is_hidden = is_secret(key, str(value)) if is_scalar else certainty == Certainty.SURE
        return MARK if is_hidden else self._content(value, texts)

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
        if value[group].startswith(MARK) or not _follows_secret_name(found, value):
            continue
        pieces += [text[position : value.start(group)], _mark(value[group])]
        position = value.end(group)
        if group == "bare" and (rest := _REST.match(text, position)):
            position = rest.end()
    return "".join((*pieces, text[position:]))


def _follows_secret_name(found: re.Match[str], value: re.Match[str]) -> bool:
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
