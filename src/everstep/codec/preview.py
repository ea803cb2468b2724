"""Bounded, harmless text of a payload, for histories, pages and terminals."""

import re
from typing import Any, Final

import msgspec

from everstep.codec.kinds import NOT_FIELDS

_split = msgspec.json.Decoder(list[msgspec.Raw]).decode


_UNSET: Final = re.compile(r',?"":\{"unset":\[[^\]]*\]\}')
_UNSET_AND_MORE: Final = re.compile(r'"":\{"unset":\[[^\]]*\],')
_CUT_OFF: Final = re.compile(r',"":?(?:(?<=:)\{(?:"[a-z]*(?:":?(?:\[[^\]]*\]?)?)?)?)?$')


def without_internals(text: str) -> str:
    """Return the JSON text of stored data as a person may see it: without the record of which fields of a model have
    their defaults. The text may be cut off.
    """
    if '""' not in text:
        return text
    return _CUT_OFF.sub("", _UNSET_AND_MORE.sub('"":{', _UNSET.sub("", text)))


def fields_only(value: Any) -> Any:
    """Return stored data as a person may see it: a record has its fields, and what else a person gave it."""
    if isinstance(value, list):
        return [fields_only(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {key: fields_only(one) for key, one in value.items() if key != NOT_FIELDS}
    rest = value.get(NOT_FIELDS)
    if NOT_FIELDS in value and not (isinstance(rest, dict) and rest):
        return {**kept, NOT_FIELDS: rest}  # data of a user
    if isinstance(rest, dict):
        is_model = rest.keys() <= {"unset", "extra", "private"}
        kept |= fields_only(rest.get("extra", {}) if is_model else rest)
    return kept


def harmless(text: str) -> str:
    """Return text without anything that a terminal or a page could interpret as a command."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def preview_of(payload: bytes, limit: int) -> str:
    """Return the beginning of the value in a payload as text of at most `limit` characters. Never raises."""
    try:
        data = bytes(_split(payload)[0])
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError, RecursionError):
        data = bytes(payload)
    if b'""' in data:
        data = without_internals(data[: 8 * limit].decode("utf-8", "replace")).encode()
    if len(data) <= limit and data.isascii():
        text = data.decode("ascii")
        if text.isprintable():
            return text
    # A character has at most four bytes, so this is always enough, and a huge payload is not decoded for one line.
    text = harmless(data[: 4 * limit].decode("utf-8", "replace"))
    return text if len(text) <= limit and len(data) <= 4 * limit else f"{text[: max(limit - 1, 0)]}…"
