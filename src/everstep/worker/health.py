"""An HTTP port that reports the state of a worker: `/healthz` (does it work?) and `/readyz` (should it get more?), as
JSON.

It is for the system that starts and stops processes. It reveals nothing about runs, and listens on this machine only
unless it is configured otherwise.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import msgspec

from everstep.errors import Misuse
from everstep.model.untrusted import logger

log = logger("everstep.worker")

LOCAL: Final = "127.0.0.1"
REQUEST_SECONDS: Final = 5.0
LINE_BYTES_MAX: Final = 8192
PHRASES: Final = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class Health(NamedTuple):
    """The state of a worker."""

    healthy: bool
    ready: bool
    facts: dict[str, Any]


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of `8080` or `0.0.0.0:8080`."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise Misuse(f"--health {text}: it is a port such as 8080, or an address and a port such as 0.0.0.0:8080.")
    return host.strip("[]") or LOCAL, int(port)


async def answer_on(address: tuple[str, int], how: Callable[[], Awaitable[Health]]) -> asyncio.Server:
    """Start to answer requests on a port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                words = (await reader.readline()).split()
                while (await reader.readline()).strip():
                    pass
                writer.write(await _response(words, how))
                await writer.drain()
        except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError):
            pass  # the client has gone, or does not speak HTTP
        finally:
            writer.close()

    try:
        return await asyncio.start_server(answer, *address, limit=LINE_BYTES_MAX)
    except OSError as error:
        place = f"{address[0]}:{address[1]}"
        raise Misuse(f"--health: cannot listen on {place} ({error.strerror or error}).") from error


async def _response(words: list[bytes], how: Callable[[], Awaitable[Health]]) -> bytes:
    method, path = (words[0], words[1].partition(b"?")[0]) if len(words) >= 2 else (b"", b"")
    status = 404
    facts: dict[str, Any] = {"error": "there are /healthz and /readyz"}
    if method not in (b"GET", b"HEAD"):
        status, facts = 405, {"error": "only GET"}
    elif path in (b"/healthz", b"/readyz"):
        health = await how()
        good = health.healthy if path == b"/healthz" else health.ready
        status, facts = 200 if good else 503, {"ok": good, **health.facts}
    body = msgspec.json.encode(facts) + b"\n"
    head = f"HTTP/1.1 {status} {PHRASES[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    head += "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    return head.encode() + (b"" if method == b"HEAD" else body)
