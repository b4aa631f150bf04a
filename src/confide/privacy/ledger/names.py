"""Names of data sets and of their partitions: two names that look alike are one budget, or a refusal.

A name is a budget, so whoever can write the same name in fifteen ways has fifteen budgets. Three rules, from Unicode's
report on security (UTS 39), stop that:

    key_of       names that differ in case, width, composition, blanks or dashes only are ONE name
    check_name   characters that cannot be seen, and words that mix alphabets, are refused
    looks_like   a new name that merely looks like one the ledger knows (0 and O, 1, l and I, rn and m, a Cyrillic or a
                 Greek letter for a Latin one) is refused, and the refusal says which

Sharing a budget is always sound, so doubtful cases fall on that side. What is read from a ledger is never refused.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from confide.errors import Refusal

# Letters of other alphabets that are drawn like Latin ones, in lower case, then digits, signs and Latin letters.
_DRAWN_ALIKE = {
    other: latin
    for latin, others in {
        "a": "аɑα",  # noqa: RUF001 (looking alike is what this is about, here and below)
        "b": "вьβ",
        "c": "сϲ",  # noqa: RUF001
        "d": "ԁ",  # noqa: RUF001
        "e": "еєҽε",
        "g": "ɡց",  # noqa: RUF001
        "h": "һнհ",
        "j": "јϳ",  # noqa: RUF001
        "k": "ĸкκ",
        "l": "iıіїιӏ1|!",  # noqa: RUF001
        "m": "м",
        "n": "ոռпη",
        "o": "оοσօ0",  # noqa: RUF001
        "p": "рρ",  # noqa: RUF001
        "q": "ԛզ",  # noqa: RUF001
        "r": "г",  # noqa: RUF001
        "s": "ѕ",  # noqa: RUF001
        "t": "тτ",
        "u": "υսц",
        "v": "νѵ",  # noqa: RUF001
        "w": "ԝшω",
        "x": "хχ×",  # noqa: RUF001
        "y": "уγў",
        "z": "ᴢ",  # noqa: RUF001
    }.items()
    for other in others
}
_DRAWN_ALIKE |= {"ß": "b", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ħ": "h", "þ": "p", "ð": "d"}
_PAIRS_DRAWN_ALIKE = (("rn", "m"), ("vv", "w"), ("cl", "d"))
_DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u30fc\u2043\u02d7\u06d4\u2796"), "-")
_QUOTES = dict.fromkeys(map(ord, "\u2018\u2019\u201a\u201b\u02bc\u02b9\u2032\u0060\u00b4"), "'")
# Categories that are not seen, or whose look nobody knows: controls, formats, surrogates, private, unassigned.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# Letters that show nothing although they are letters or marks: fillers and variation selectors.
_BLANK = frozenset("\u115f\u1160\u3164\uffa0\u2800\u034f\u17b4\u17b5") | {chr(code) for code in range(0xFE00, 0xFE10)}
# Alphabets that are written together every day.
_TOGETHER = ({"HIRAGANA", "KATAKANA", "CJK", "HALFWIDTH", "FULLWIDTH"}, {"HANGUL", "CJK"}, {"BOPOMOFO", "CJK"})


@lru_cache(maxsize=4096)
def key_of(name: str) -> str:
    """The name that stands for all ways of writing it."""
    plain = unicodedata.normalize("NFKC", name).translate(_DASHES).translate(_QUOTES)
    seen = "".join(character for character in plain if not _is_unseen(character))
    return unicodedata.normalize("NFKC", " ".join(seen.split()).casefold())


def check_name(argument: str, name: str) -> None:
    """Refuses a name that could be taken for another one."""
    for character in name:
        if _is_unseen(character):
            raise Refusal(f"{argument}={name!r}: holds U+{ord(character):04X}, which cannot be seen; leave it out")
    if name and not key_of(name):
        raise Refusal(f"{argument}={name!r}: holds nothing that can be seen; give it a name")
    alphabets = _alphabets(unicodedata.normalize("NFKC", name))
    if len(alphabets) > 1 and not any(alphabets <= together for together in _TOGETHER):
        mixed = " and ".join(sorted(alphabets)).lower()
        raise Refusal(f"{argument}={name!r}: mixes {mixed} letters, some of which look alike; write it in one alphabet")


def looks_like(name: str, known: Iterable[str]) -> str | None:
    """The known name, not the same, that this one could be taken for."""
    key, look = key_of(name), _look(key_of(name))
    return next((other for other in known if key_of(other) != key and _look(key_of(other)) == look), None)


@lru_cache(maxsize=4096)
def _look(key: str) -> str:
    """What is left of a name at a glance: no accents, no punctuation between words, letters drawn alike made equal."""
    bare = "".join(c for c in unicodedata.normalize("NFKD", key) if not unicodedata.combining(c))
    drawn = "".join(_DRAWN_ALIKE.get(character, character) for character in bare)
    for pair, one in _PAIRS_DRAWN_ALIKE:
        drawn = drawn.replace(pair, one)
    return "".join(character for character in drawn if character.isalnum()) or drawn


def _is_unseen(character: str) -> bool:
    return unicodedata.category(character) in _UNSEEN or character in _BLANK


def _alphabets(name: str) -> set[str]:
    """The scripts of the letters, by the first word of their names in Unicode."""
    letters = (character for character in name if unicodedata.category(character)[0] == "L")
    return {unicodedata.name(letter, "UNKNOWN").split()[0].split("-")[0] for letter in letters}
