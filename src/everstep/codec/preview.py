"""Bounded, harmless text of a payload, for histories, pages and terminals."""

import msgspec

_split = msgspec.json.Decoder(list[msgspec.Raw]).decode


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
    if len(data) <= limit and data.isascii():
        text = data.decode("ascii")
        if text.isprintable():
            return text
    # A character has at most four bytes, so this is always enough, and a huge payload is not decoded for one line.
    text = harmless(data[: 4 * limit].decode("utf-8", "replace"))
    return text if len(text) <= limit and len(data) <= 4 * limit else f"{text[: max(limit - 1, 0)]}…"
