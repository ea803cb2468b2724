"""The URL of a PostgreSQL store: which parts are ours, and which are libpq's."""

import re
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode

from everstep.errors import Misuse

DEFAULT_SCHEMA: Final = "everstep"
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_PASSWORD: Final = re.compile(r"(://[^/@:]*):(.*)@")  # greedy: a password may have an @ that should have been %40
_CUT_SHORT: Final = re.compile(r"://[^/@:\[\]]*:(?!\d*$)[^/@\[\]]*$")
"""Matches a user and the beginning of a password with a `?`, which ends the part of a URL where a password may be."""
_PIECE_MIN: Final = 3
"""The minimum length of a piece of a password that is hidden. Shorter pieces occur in too many words."""
_TRUE: Final = {"on": True, "transaction": True, "off": False}


class Address(NamedTuple):
    """Where a store is."""

    server: str
    """The URL for libpq, with the password if it has one. Never shown."""
    schema: str
    pooler: bool
    """Whether a pooler between here and the server gives each transaction another session."""
    shown: str
    """The URL as people see it, without the password."""
    owner: str = ""
    """The role that owns the tables, if it would not be trusted otherwise."""


def address_of(url: str) -> Address:
    """Split a URL: `postgresql://…?schema=…&pooler=on&owner=…`, and anything else that libpq knows."""
    whole, _, query = url.partition("?")
    if "@" in query and _CUT_SHORT.search(whole):
        raise Misuse("The URL of a database has a ? in its password. Write it as %3F; @ is %40, / is %2F and % is %25.")
    asked = parse_qsl(query, keep_blank_values=True)
    ours = {name: value for name, value in asked if name in ("schema", "pooler", "owner")}
    rest = [(name, value) for name, value in asked if name not in ours]
    schema = ours.get("schema", DEFAULT_SCHEMA)
    if not _SCHEMA.fullmatch(schema) or schema.startswith("pg_"):
        raise Misuse(f"schema={schema}: small letters, digits and _ make the name of a schema; pg_… is the server's.")
    pooler = _TRUE.get(ours.get("pooler", "off"))
    if pooler is None:
        raise Misuse(f"pooler={ours['pooler']}: it is on (for one in transaction mode, as PgBouncer's) or off.")
    seen = [(name, value) for name, value in rest if name not in ("password", "sslpassword")]
    seen += [("schema", schema)] if schema != DEFAULT_SCHEMA else []
    shown = _joined(_PASSWORD.sub(r"\1@", whole), seen)
    return Address(_joined(whole, rest), schema, pooler, shown, ours.get("owner", ""))


def _joined(whole: str, query: list[tuple[str, str]]) -> str:
    return f"{whole}?{urlencode(query, quote_via=quote, safe='/')}" if query else whole


def without_password(text: str, url: str) -> str:
    """Return libpq's message about a URL without the password: libpq quotes what it cannot read."""
    secrets = [found[2] for found in _PASSWORD.finditer(url)]
    secrets += [value for name, value in parse_qsl(url.partition("?")[2]) if name in ("password", "sslpassword")]
    pieces = {piece for secret in secrets for piece in (secret, unquote(secret), *re.split(r"\W+", secret))}
    for piece in sorted(pieces, key=len, reverse=True):
        if len(piece) >= _PIECE_MIN:
            text = text.replace(piece, "…")
    return text
