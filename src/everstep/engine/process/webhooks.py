"""Webhooks: a server of yours is told of a hold by a signed request, and can tell that it is genuine.

    POST https://example.org/everstep
    Everstep-Delivery: h0123456789                  the hold's id: the same in every attempt
    Everstep-Attempt: 1
    Everstep-Timestamp: 1767225600                  seconds since 1970
    Everstep-Signature: v1=<hex>                    HMAC-SHA256 of the timestamp, a dot and the body, with the secret

Any answer of 2xx acknowledges it. Redirects are not followed, and the answer's body is not read.
"""

import hashlib
import hmac
import socket
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec

from everstep.engine.history.clock import wall_seconds
from everstep.errors import Misuse, NotGenuine
from everstep.model.durations import Duration
from everstep.model.options import checked_seconds, checked_text, refused
from everstep.model.untrusted import attempted, is_a

if TYPE_CHECKING:
    import http.client


DELIVERY: Final = "Everstep-Delivery"
ATTEMPT: Final = "Everstep-Attempt"
TIMESTAMP: Final = "Everstep-Timestamp"
SIGNATURE: Final = "Everstep-Signature"
_OURS: Final = frozenset({"content-length", "content-type", "host", "transfer-encoding"})


class Webhook:
    """Where to send holds: `everstep.open(on_hold=everstep.Webhook("https://…", secret="…"))`.

    url: an `https` or `http` address.
    secret: requests are signed with it; `everstep.verify_webhook` checks that where they arrive.
    headers: more headers to send, such as `{"Authorization": "Bearer …"}`.
    timeout: seconds that one request may take.
    name: what the store and `everstep holds` call it. Default: the address without credentials and query. Give one if
        the path itself is a secret.

    Only the name is stored. Address, headers and secret stay in the memory of the processes that are given them.
    """

    def __init__(
        self,
        url: str,
        *,
        secret: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: Duration = 10.0,
        name: str | None = None,
    ) -> None:
        parts = urlsplit(checked_text("url", url))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Misuse(f"A webhook is an http or https address, not {parts.scheme or 'nothing'!r}:….")
        if secret is not None and not checked_text("secret", secret):
            raise Misuse("secret='' would sign nothing: give a long random text, or leave it out.")
        if name is not None:
            checked_text("name", name)
        for header, value in _checked_headers(headers):
            if header.lower() in _OURS or header.lower().startswith("everstep-"):
                raise Misuse(f"The header {header} is set by Everstep itself.")
            if not (f"{header}{value}".isascii() and f"{header}{value}".isprintable()):
                raise Misuse(f"The header {header!r} has a character that headers cannot have.")
        address = parts.netloc.rpartition("@")[2]
        self.name = name or urlunsplit((parts.scheme, address, parts.path, "", ""))
        self.timeout = checked_seconds("timeout", timeout, above=True)
        self._url = urlunsplit(parts._replace(netloc=address, fragment=""))
        self._headers = dict(headers or {})
        self._secret = secret
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers.setdefault("Authorization", f"Basic {b64encode(login).decode()}")

    def __repr__(self) -> str:
        return f"<webhook {self.name}>"

    def request(self, body: bytes, *, delivery: str, attempt: int, timestamp: int) -> "Sending":
        """Return a request that is ready to be sent."""
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "everstep",
            **self._headers,
            DELIVERY: delivery,
            ATTEMPT: str(attempt),
            TIMESTAMP: str(timestamp),
        }
        if self._secret is not None:
            headers[SIGNATURE] = f"v1={signature_of(body, timestamp, self._secret)}"
        return Sending(self._url, body, headers, self.timeout)


def _checked_headers(headers: Any) -> list[tuple[str, str]]:
    if headers is None:
        return []
    pairs: list[tuple[str, str]] | None = attempted(lambda: list(headers.items()))
    if pairs is None or not all(is_a(text, str) for pair in pairs for text in pair):
        raise refused("headers", headers, 'it is a dict of texts, such as headers={"Authorization": "Bearer …"}')
    return pairs


class Answer(NamedTuple):
    """The answer to a request. `status` 0: there was none, and `error` says why."""

    status: int
    error: str = ""
    retry_after: float = 0.0

    @property
    def is_acknowledged(self) -> bool:
        """Whether the receiver has accepted it."""
        return 200 <= self.status < 300


class Sending:
    """One request, made on a thread. Another thread may interrupt it: its timeout alone does not stop a slow drip."""

    def __init__(self, url: str, body: bytes, headers: dict[str, str], timeout: float) -> None:
        self._url = url
        self._body = body
        self._headers = headers
        self._timeout = timeout
        self._connection: http.client.HTTPConnection | None = None
        self._is_cut_off = False

    def send(self) -> Answer:
        """Send it, and return how it was answered. Never raises."""
        import urllib.error
        import urllib.request

        request = urllib.request.Request(self._url, self._body, self._headers, method="POST")
        try:
            with self._opener().open(request, timeout=self._timeout) as response:
                return Answer(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, f"HTTP {error.code}", _seconds(error.headers.get("Retry-After")))
        except Exception as error:  # noqa: BLE001  # whatever it is, it did not arrive for sure
            if self._is_cut_off or isinstance(error, TimeoutError):
                return Answer(0, f"no answer within {self._timeout:g} s")
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                return Answer(0, f"no answer within {self._timeout:g} s")
            return Answer(0, f"{type(reason).__name__}: {reason}"[:300])

    def cut_off(self) -> None:
        """Interrupt it from another thread, whatever it waits for."""
        self._is_cut_off = True
        stream = self._connection.sock if self._connection is not None else None
        if stream is not None:
            try:
                stream.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has just ended by itself

    def _opener(self) -> Any:
        """Return an opener for http and https only, which follows no redirects and knows proxies."""
        import http.client
        import urllib.request

        sending = self

        class Plain(urllib.request.HTTPHandler):
            def http_open(self, req: urllib.request.Request) -> Any:
                return self.do_open(sending._kept(http.client.HTTPConnection), req)

        class Secure(urllib.request.HTTPSHandler):
            def https_open(self, req: urllib.request.Request) -> Any:
                return self.do_open(sending._kept(http.client.HTTPSConnection), req)

        opener = urllib.request.OpenerDirector()
        errors = (urllib.request.HTTPErrorProcessor(), urllib.request.HTTPDefaultErrorHandler())
        for handler in (urllib.request.ProxyHandler(), Plain(), Secure(), *errors):
            opener.add_handler(handler)
        return opener

    def _kept(self, connection: Any) -> Any:
        """Make connections that can be interrupted."""

        def make(*args: Any, **options: Any) -> Any:
            self._connection = connection(*args, **options)
            return self._connection

        return make


def _seconds(retry_after: str | None) -> float:
    """Return the number in `Retry-After`; None for a date, which is not believed because clocks differ."""
    return float(retry_after) if retry_after is not None and retry_after.strip().isdigit() else 0.0


def signature_of(body: bytes, timestamp: int | str, secret: str) -> str:
    """Return the signature of a request."""
    return hmac.new(secret.encode(), f"{timestamp}.".encode() + body, hashlib.sha256).hexdigest()


def verify_webhook(
    body: bytes,
    headers: Mapping[str, str],
    secret: str | Sequence[str],
    *,
    within: float = 300.0,
    now: float | None = None,
) -> dict[str, Any]:
    """Return what a request to your webhook says, if it is genuine; else raise `errors.NotGenuine`.

    body: the bytes as they arrived, not parsed and encoded again.
    headers: the request's; their case does not matter.
    secret: the one that the webhook has; several while you change it.
    within: seconds. An older request is refused, so that it cannot be replayed later.
    now: the time in seconds since 1970, for tests; default: this machine's.

    The same hold may arrive more than once: its `id` tells.
    """
    if not isinstance(body, bytes):
        raise Misuse("verify_webhook() needs the body as the bytes that arrived.")
    given = {name.lower(): value for name, value in headers.items()}
    timestamp = given.get(TIMESTAMP.lower(), "")
    if not (timestamp.isascii() and timestamp.isdigit()):
        raise NotGenuine(f"The request has no {TIMESTAMP}.")
    signatures = [one.strip().encode() for one in given.get(SIGNATURE.lower(), "").split(",")]
    secrets = [secret] if isinstance(secret, str) else list(secret)
    wanted = [f"v1={signature_of(body, timestamp, one)}".encode() for one in secrets if one]
    # Each is compared, and in constant time: how long it takes tells nothing.
    matches = [hmac.compare_digest(one, right) for one in signatures for right in wanted]
    if not any(matches):
        raise NotGenuine("The request is not signed with this secret.")
    age = (wall_seconds() if now is None else now) - int(timestamp)
    if abs(age) > within:
        raise NotGenuine(f"The request was signed {age:.0f} s ago: it is too old, or a clock is wrong.")
    facts = msgspec.json.decode(body)
    return facts if isinstance(facts, dict) else {}
