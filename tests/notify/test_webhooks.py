"""Webhooks: what is sent and signed, what is believed where it arrives, and what cannot happen to the sender."""

import time
from typing import Any

import pytest

import everstep
from everstep import Webhook, verify_webhook
from everstep.engine.process.webhooks import Answer, signature_of
from everstep.engine.run.holds import MESSAGE_BYTES_MAX, example_of, hold_message, shareable_url
from everstep.errors import Misuse, NotGenuine
from everstep.stores.protocol import HoldRow
from tests.notify.conftest import SECRET, Receiver

BODY = b'{"id":"h1"}'


def headers(body: bytes = BODY, secret: str = SECRET, timestamp: int = 1000) -> dict[str, str]:
    return {
        "Everstep-Timestamp": str(timestamp),
        "Everstep-Signature": f"v1={signature_of(body, timestamp, secret)}",
    }


def send(webhook: Webhook, body: bytes = BODY) -> Answer:
    return webhook.request(body, delivery="h1", attempt=2, timestamp=1000).send()


# -- signatures --------------------------------------------------------------------------------------------------------
def test_what_is_signed_with_the_secret_is_believed() -> None:
    assert verify_webhook(BODY, headers(), SECRET, now=1000) == {"id": "h1"}
    assert verify_webhook(BODY, headers(), ["another", SECRET], now=1000) == {"id": "h1"}
    shouted = {name.upper(): value for name, value in headers().items()}
    assert verify_webhook(BODY, shouted, SECRET, now=1000) == {"id": "h1"}


def test_a_signature_is_what_anybody_can_make_with_the_standard_library() -> None:
    """The five lines that the documentation shows."""
    import hashlib
    import hmac

    given = headers()
    signed = given["Everstep-Timestamp"].encode() + b"." + BODY
    right = "v1=" + hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()
    assert hmac.compare_digest(given["Everstep-Signature"], right)


@pytest.mark.parametrize(
    ("body", "given", "secret"),
    [
        (BODY + b" ", headers(), SECRET),
        (BODY, headers(), "another secret"),
        (BODY, headers(), ""),
        (BODY, headers(), []),
        (BODY, headers(secret="another secret"), SECRET),
        (BODY, {**headers(), "Everstep-Timestamp": "1001"}, SECRET),
        (BODY, {**headers(), "Everstep-Timestamp": ""}, SECRET),
        (BODY, {**headers(), "Everstep-Timestamp": "-1000"}, SECRET),
        (BODY, {**headers(), "Everstep-Timestamp": "1e3"}, SECRET),
        (BODY, {**headers(), "Everstep-Timestamp": "١٠٠٠"}, SECRET),
        (BODY, {**headers(), "Everstep-Signature": ""}, SECRET),
        (BODY, {**headers(), "Everstep-Signature": "v1="}, SECRET),
        (BODY, {**headers(), "Everstep-Signature": "v1=ü"}, SECRET),
        (BODY, {}, SECRET),
    ],
)
def test_anything_else_is_not(body: bytes, given: dict[str, str], secret: Any) -> None:
    with pytest.raises(NotGenuine):
        verify_webhook(body, given, secret, now=1000)


@pytest.mark.parametrize(("now", "believed"), [(1000, True), (1300, True), (1301, False), (700, True), (699, False)])
def test_a_request_can_be_sent_again_by_nobody_after_its_time(now: float, believed: bool) -> None:
    if believed:
        assert verify_webhook(BODY, headers(), SECRET, now=now)
        return
    with pytest.raises(NotGenuine, match="too old"):
        verify_webhook(BODY, headers(), SECRET, now=now)
    assert verify_webhook(BODY, headers(), SECRET, now=now, within=400)


def test_the_time_is_this_machine_s_unless_it_is_given() -> None:
    assert verify_webhook(BODY, headers(timestamp=int(time.time())), SECRET)
    with pytest.raises(NotGenuine):
        verify_webhook(BODY, headers(timestamp=int(time.time()) - 400), SECRET)


def test_a_body_that_was_made_anew_is_refused_before_it_misleads() -> None:
    with pytest.raises(Misuse, match="bytes"):
        verify_webhook('{"id":"h1"}', headers(), SECRET)  # type: ignore[arg-type]


# -- declaring ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("ftp://example.org/x", {}, "http or https"),
        ("file:///etc/passwd", {}, "http or https"),
        ("example.org/x", {}, "http or https"),
        ("https://", {}, "http or https"),
        ("https://example.org", {"secret": ""}, "would sign nothing"),
        ("https://example.org", {"timeout": 0}, "above 0"),
        ("https://example.org", {"headers": {"Everstep-Signature": "x"}}, "itself"),
        ("https://example.org", {"headers": {"content-type": "x"}}, "itself"),
        ("https://example.org", {"headers": {"X": "a\r\nY: b"}}, "cannot have"),
        ("https://example.org", {"headers": {"X": "ü"}}, "cannot have"),
    ],
)
def test_a_webhook_that_could_not_work_is_refused_at_once(url: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(Misuse, match=said):
        Webhook(url, **options)


def test_neither_its_name_nor_its_repr_has_what_is_secret() -> None:
    webhook = Webhook("https://ann:pass@example.org:8443/a/b?token=t#x", secret=SECRET, headers={"X-Key": "k"})
    assert webhook.name == "https://example.org:8443/a/b"
    assert repr(webhook) == "<webhook https://example.org:8443/a/b>"
    named = Webhook("https://example.org/services/T0/B0/hidden", name="chat")
    assert (named.name, repr(named)) == ("chat", "<webhook chat>")


@pytest.mark.parametrize("wrong", [3, [3], ["https://example.org", "https://example.org?x=1"]])
def test_on_hold_takes_functions_webhooks_and_addresses(wrong: Any) -> None:
    with pytest.raises(Misuse):
        everstep.open("memory:", on_hold=wrong).__enter__()


# -- sending -----------------------------------------------------------------------------------------------------------
def test_a_request_has_what_the_receiver_needs(receiver: Receiver) -> None:
    address = receiver.url("hook?token=t").replace("http://", "http://ann:p%40ss@")
    webhook = Webhook(address, secret=SECRET, headers={"X-Team": "tides"})
    assert send(webhook) == Answer(200)
    (request,) = receiver.requests()
    assert request["path"] == "/hook?token=t"
    assert request["body"] == BODY.decode()
    given = request["headers"]
    assert (given["everstep-delivery"], given["everstep-attempt"]) == ("h1", "2")
    assert given["content-type"] == "application/json"
    assert given["x-team"] == "tides"
    assert given["authorization"] == "Basic YW5uOnBAc3M="
    assert verify_webhook(BODY, given, SECRET, now=1000)


def test_without_a_secret_nothing_is_signed(receiver: Receiver) -> None:
    assert send(Webhook(receiver.url())).is_acknowledged
    assert "everstep-signature" not in receiver.requests()[0]["headers"]


@pytest.mark.parametrize(
    ("word", "status", "error"),
    [
        ("200", 200, ""),
        ("204", 204, ""),
        ("500", 500, "HTTP 500"),
        ("404", 404, "HTTP 404"),
        ("redirect", 302, "HTTP 302"),
        ("lose", 0, "RemoteDisconnected"),
        ("hang", 0, "no answer within 0.3 s"),
    ],
)
def test_only_2xx_acknowledges_and_nothing_is_followed(receiver: Receiver, word: str, status: int, error: str) -> None:
    receiver.plan(word)
    answer = send(Webhook(receiver.url(), timeout=0.3))
    assert answer.status == status
    assert error in answer.error
    assert answer.is_acknowledged == (200 <= status < 300)
    assert len(receiver.requests()) == 1
    assert receiver.requests("redirected") == []


def test_nobody_there_is_an_answer_too() -> None:
    answer = send(Webhook("http://127.0.0.1:1/x", timeout=2))
    assert (answer.status, answer.error.partition(":")[0]) == (0, "ConnectionRefusedError")
    answer = send(Webhook("https://127.0.0.1:1/x", timeout=2))
    assert (answer.status, answer.error.partition(":")[0]) == (0, "ConnectionRefusedError")


def test_a_pause_that_the_receiver_asks_for_is_heard(receiver: Receiver) -> None:
    receiver.plan("later")
    assert send(Webhook(receiver.url())) == Answer(503, "HTTP 503", 30.0)


# -- what is told ------------------------------------------------------------------------------------------------------
def hold(report: bytes = b"{}", **fields: Any) -> HoldRow:
    return HoldRow(id="h1", run="r", reason="drift", report=report, resolutions=["retry"], **fields)


def test_a_message_has_neither_remembered_facts_nor_variables() -> None:
    report = b"""{"drift": [{"subject": "env:KEY", "difference": "remembered 'old', now 'hidden'"},
        {"subject": "file:a", "difference": "+line"}], "facts": {"env:KEY": ["hidden"]}, "accepted": {"3": "x"}}"""
    message = hold_message(hold(report), "sqlite:///runs.db")
    assert b"hidden" not in message
    assert b"+line" in message
    assert b"accepted" not in message


def test_a_report_that_is_too_large_is_left_out() -> None:
    report = b'{"drift": [{"subject": "x", "difference": "%b"}]}' % (b"y" * MESSAGE_BYTES_MAX)
    message = hold_message(hold(report), "sqlite:///runs.db")
    assert len(message) < 2000
    assert b"everstep holds --run r" in message


def test_a_store_s_password_is_not_told() -> None:
    assert shareable_url("postgresql://ann:pass@db.example.org/runs") == "postgresql://ann@db.example.org/runs"
    assert shareable_url("sqlite:////var/runs.db") == "sqlite:////var/runs.db"
    assert shareable_url("memory:") is None


def test_an_example_shows_what_a_value_looks_like() -> None:
    from dataclasses import dataclass
    from typing import Annotated, Literal, TypedDict

    @dataclass
    class Receipt:
        number: int
        of: str
        note: str = ""

    class Paid(TypedDict):
        receipts: list[Receipt]

    shown: list[tuple[Any, Any]] = [
        (None, None), (str, "text"), (int, 1), (bool, True), (list[int], []), (dict[str, int], {}),
        (Literal["a", "b"], "a"), (int | None, 1), (Annotated[str, []], "text"), (object, None), (Any, None),
        (Receipt, {"number": 1, "of": "text"}), (Paid, {"receipts": []}), (tuple[int, str], []),
    ]  # fmt: skip
    for annotation, example in shown:
        assert example_of(annotation) == example, annotation
