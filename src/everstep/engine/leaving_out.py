"""Runs without what is secret in them, for exports.

Events stay in their places with their digests, so that the chain can be followed, and say that something was left out.
What only helps a run to go on, and may have secrets in it, is left out whole: checkpoints, markers, the archive.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from everstep.engine.history import refs_of
from everstep.model.events import BODIES, EventRow, decode_body
from everstep.model.secrets import has_secrets, is_left_out, without_secrets
from everstep.stores.moving import RunDump
from everstep.stores.protocol import Delivery

NO_OUTCOME: Final = b'{"status":"failed","outcome":null}'
"""What is delivered of the end of another run, without its error."""


def secretive(dumps: Sequence[RunDump]) -> list[str]:
    """Return the ids of those runs of a family that have something secret, or have it from another one."""
    hidden = _failed_in_secret(dumps)
    return [dump.row.id for dump in dumps if _is_secretive(dump, hidden)]


def lacking(dumps: Sequence[RunDump]) -> list[str]:
    """Return the ids of those runs whose secrets were left out."""
    return [dump.row.id for dump in dumps if any(is_left_out(event.body) for _, event in dump.events)]


def without(dumps: Sequence[RunDump]) -> list[RunDump]:
    """Return a family with nothing in it that is secret."""
    hidden = _failed_in_secret(dumps)
    return [_without(dump, hidden) if _is_secretive(dump, hidden) else dump for dump in dumps]


def _failed_in_secret(dumps: Sequence[RunDump]) -> set[str]:
    """Return the runs whose error is secret: whoever follows one was told of it."""
    return {dump.row.id for dump in dumps if dump.events and has_secrets(dump.events[-1][1].body)}


def _is_secretive(dump: RunDump, hidden: set[str]) -> bool:
    return (
        any(has_secrets(event.body) for _, event in dump.events)
        or any(b'"secret":true' in row.row for row in dump.archive)
        or any(entry.secret and entry.value for entry in dump.entries)
        or any(effect.secret and effect.outcome is not None for effect in dump.effects)
        or any(_is_told(one, hidden) for one in dump.deliveries)
    )


def _is_told(one: Delivery, hidden: set[str]) -> bool:
    return one.kind == "child" and one.name in hidden


def _without(dump: RunDump, hidden: set[str]) -> RunDump:
    events = [(generation, event._replace(body=without_secrets(event.body))) for generation, event in dump.events]
    needed = {ref for _, event in events for ref in _refs(event)}
    row, last = dump.row, events[-1][1]
    if row.id in hidden:
        row = msgspec.structs.replace(row, outcome=bytes(decode_body(last.kind, last.body).error))
    return RunDump(
        row,
        events,
        [payload for payload in dump.payloads if payload[0] in needed],
        [],
        [msgspec.structs.replace(one, value=NO_OUTCOME) if _is_told(one, hidden) else one for one in dump.deliveries],
        dump.followers,
        dump.holds,
        [msgspec.structs.replace(one, outcome=None, digest="") if one.secret else one for one in dump.effects],
        dump.waits,
        answers=dump.answers,
        entries=[one._replace(value=b"") if one.secret else one for one in dump.entries],
    )


def _refs(event: EventRow) -> list[str]:
    return refs_of(decode_body(event.kind, event.body)) if event.kind in BODIES else []
