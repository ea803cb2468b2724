"""A person's view of approvals: list the open ones, and answer.

An answer goes into the run's inbox as a signal with an id that only the first answer gets: the store itself prevents a
second one. The question is read from the verified history, so the answer is about exactly what is shown.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from everstep.codec import PLAIN, converted, fields_only, is_equal, meaning_digest
from everstep.engine.code.approvals import arguments_payload, is_about
from everstep.engine.history.journal import restore_payload
from everstep.engine.history.verify import Recorded, load_now, refuse_no_status
from everstep.engine.process.host import Host
from everstep.engine.verbs.runs import existing_row
from everstep.engine.verbs.wanted import type_named
from everstep.errors import ApprovalConflict, Damaged, NotDecodable, NotReadable, RunEnded, UnknownRun
from everstep.model.crash_points import crash_point
from everstep.model.exchange_events import APPROVAL
from everstep.model.secrets import HIDDEN
from everstep.model.status import ENDED
from everstep.stores.protocol import NotPosted, Post, Posted, RunRow, Store

NOT_GIVEN: Final[Any] = ...
_PLAIN: Final[dict[str, type | tuple[type, ...]]] = {
    "bool": bool,
    "int": int,
    "float": (int, float),
    "str": str,
    "None": type(None),
}


class Approval(msgspec.Struct, kw_only=True):
    """Something that waits for a person's answer."""

    run: str
    workflow: str
    id: str
    what: str
    arguments: Any
    """As plain JSON data, or `(secret)`."""
    type: str
    """The type that the answer must have, as text."""
    asked_at: int
    """In microseconds since 1970, as all times here."""
    expires_at: int | None = None
    secret: bool = False
    source: str = ""
    digest: str = ""
    """The digest of the arguments."""
    rejected: int = 0
    """The number of answers that had the wrong type."""


async def approvals(app: Host, run: str | None) -> list[Approval]:
    """Return the open approvals, in one run or in all, the oldest first."""
    return await app.read(open_approvals, app.store, run)


def open_approvals(store: Store, run: str | None = None) -> list[Approval]:
    """Return the open approvals. A history that is damaged, or of a newer release, has none here."""
    found: list[Approval] = []
    now = store.now()
    for one in [run] if run is not None else store.asking():
        row = store.run(one)
        if row is None or row.status in ENDED:
            continue
        try:
            row, history = load_now(store, row)
            known = approvals_in(store, row, history) if row.status not in ENDED else []
        except (Damaged, NotReadable, UnknownRun):
            continue  # no answer may rely on it; the worker that resumes the run holds it, and says why
        answered = {delivery.name for delivery in store.inbox(one)}
        found += [asked for asked in known if APPROVAL + asked.id not in answered and not is_expired(asked, now)]
    return sorted(found, key=lambda one: (one.asked_at, one.run, one.id))


def is_expired(approval: Approval, now: int) -> bool:
    """Return True if it is too late to answer."""
    return approval.expires_at is not None and approval.expires_at <= now


def approvals_in(store: Store, row: RunRow, history: Sequence[Recorded]) -> list[Approval]:
    """Return the approvals that a history has asked for and that have no answer, as far as it was taken from the
    inbox.
    """
    asked: dict[str, tuple[int, Any, int]] = {}
    answered: set[str] = set()
    rejected: dict[str, int] = {}
    for event in history:
        kind, body = event.kind, event.body
        if kind == "approval_asked":
            asked[body.id] = (event.seq, body, event.at)
        elif kind == "approval_withdrawn":
            asked.pop(body.id, None)
        elif kind == "signal_received" and body.name.startswith(APPROVAL):
            answered.add(body.name.removeprefix(APPROVAL))
        elif kind == "signal_rejected" and body.name.startswith(APPROVAL):
            answered.discard(id := body.name.removeprefix(APPROVAL))
            rejected[id] = rejected.get(id, 0) + 1
        elif kind == "run_retried":  # what the code asked for in between no longer counts
            asked = {id: one for id, one in asked.items() if one[0] < body.voids}
    return [
        _approval(store, row, body, at, rejected.get(id, 0))
        for id, (_, body, at) in asked.items()
        if id not in answered
    ]


def _approval(store: Store, row: RunRow, body: Any, at: int, rejected: int) -> Approval:
    arguments, digest = HIDDEN, body.arguments
    if not body.secret:
        payload = _payload_of(store, row.id, body)
        arguments, digest = fields_only(msgspec.json.decode(payload)[0]), meaning_digest(payload)
    return Approval(
        run=row.id,
        workflow=row.workflow,
        id=body.id,
        what=body.what,
        arguments=arguments,
        type=body.type,
        asked_at=at,
        expires_at=None if body.timeout is None else at + body.timeout,
        secret=body.secret,
        source=body.source,
        digest=digest,
        rejected=rejected,
    )


async def approve(
    app: Host, run: str, answer: Any, *, what: str | None, id: str | None, arguments: Any, by: str, note: str
) -> Approval:
    """Answer an approval of a run, and return it."""
    asked = await app.read(_chosen, app, run, what, id)
    if arguments is not NOT_GIVEN and not await app.read(_is_about, app, asked, arguments):
        raise ApprovalConflict(
            f"The approval {asked.id} of run {run} ({asked.what}) is about other arguments than these: look again "
            "with `everstep approvals`."
        )
    given = {"answer": answer, "by": by} | ({"note": note} if note else {})
    payload = app.codec.encode(given, PLAIN, f"the answer to {asked.what!r}")
    _refuse_other_type(app, asked, answer, payload)
    number = f":{asked.rejected}" if asked.rejected else ""
    post = Post(run, "signal", APPROVAL + asked.id, f"{APPROVAL}{asked.id}{number}", payload, app.clock.now())
    verdict = await app.committer.submit(post)
    if isinstance(verdict, NotPosted):
        status = verdict.status or "gone"
        if verdict.status is not None:
            refuse_no_status(run, verdict.status)
        raise RunEnded(f"The run {run} has ended ({status}): there is nothing to approve.", status)
    assert isinstance(verdict, Posted)
    if verdict.duplicate:
        raise await app.read(_answered, app.store, run, asked.id, asked.what)
    crash_point("delivery.posted")
    app.wake(run)
    return asked


def _is_about(app: Host, asked: Approval, arguments: Any) -> bool:
    """Return True if an approval is about equal arguments."""
    payload = arguments_payload(app.codec, arguments, asked.what)
    if is_about(asked.digest, payload) or asked.secret:
        return is_about(asked.digest, payload)
    _, history = load_now(app.store, existing_row(app, asked.run))
    bodies = (event.body for event in history if event.kind == "approval_asked")
    return any(body.id == asked.id and is_equal(_payload_of(app.store, asked.run, body), payload) for body in bodies)


def _payload_of(store: Store, run: str, body: Any) -> bytes:
    return restore_payload(store.payload(run, body.ref), body.ref) if body.ref else bytes(body.value)


def _chosen(app: Host, run: str, what: str | None, id: str | None) -> Approval:
    """Return the chosen approval. If it is answered, expired or unknown, the error lists the open ones."""
    row, history = load_now(app.store, existing_row(app, run))
    if row.status in ENDED:
        raise RunEnded(f"The run {run} has ended ({row.status}): there is nothing to approve.", row.status)
    known = approvals_in(app.store, row, history)
    posted = {delivery.name for delivery in app.store.inbox(run)}
    waiting = [one for one in known if not is_expired(one, app.clock.now())]
    waiting = [one for one in waiting if APPROVAL + one.id not in posted]
    chosen = [one for one in waiting if id in (None, one.id) and what in (None, one.what)]
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        _refuse_known(app, run, known, history, what, id)
    listed = ", ".join(f"{one.id} ({one.what})" for one in waiting) or "none"
    if not chosen:
        raise ApprovalConflict(f"The run {run} waits for no such approval. Open: {listed}.")
    raise ApprovalConflict(f"The run {run} waits for {len(chosen)} approvals: {listed}. Name one with its id.")


def _refuse_known(
    app: Host, run: str, known: list[Approval], history: Sequence[Recorded], what: str | None, id: str | None
) -> None:
    """Raise the error for an approval that is no longer open, which says why."""
    asked = [event.body for event in history if event.kind == "approval_asked"]
    meant = [one for one in asked if id in (None, one.id) and what in (None, one.what)]
    if not meant or (id is None and what is None and len(meant) > 1):
        return
    last = meant[-1]
    if any(delivery.name == APPROVAL + last.id for delivery in app.store.signals(run)):
        raise _answered(app.store, run, last.id, last.what)
    if any(one.id == last.id for one in known):
        raise ApprovalConflict(f"The approval {last.id} of run {run} ({last.what}) has expired.")
    raise ApprovalConflict(f"The run {run} waits no longer for the approval {last.id} ({last.what}).")


def _answered(store: Store, run: str, id: str, what: str) -> ApprovalConflict:
    """Return the error for an approval that has its answer, with the answer's author."""
    given: Any = None
    for delivery in store.signals(run):
        if delivery.name == APPROVAL + id:
            try:
                given = msgspec.json.decode(delivery.value)[0]
            except (msgspec.MsgspecError, ValueError, LookupError, TypeError):
                continue
    said = ""
    if isinstance(given, dict) and "answer" in given:
        by = f" by {given['by']}" if given.get("by") else ""
        said = f": {msgspec.json.encode(given['answer']).decode()[:200]}{by}"
    return ApprovalConflict(f"The approval {id} of run {run} ({what}) has its answer already{said}. The first counts.")


def _refuse_other_type(app: Host, asked: Approval, answer: Any, payload: bytes) -> None:
    """Refuse an answer at once that the run would reject.

    A type of built-in parts is known by its text, and a class where the workflow's code is. Elsewhere it is the run
    that rejects an answer of another type.
    """
    wanted = _PLAIN.get(asked.type)
    if wanted is not None and not (isinstance(answer, wanted) and isinstance(answer, bool) <= (asked.type == "bool")):
        raise ApprovalConflict(
            f"The approval {asked.id} of run {asked.run} ({asked.what}) wants a {asked.type}, and {answer!r} is none."
        )
    driver = app.drivers.get(asked.run)
    waiting = driver.execution.receiving.waiting_for(APPROVAL + asked.id) if driver is not None else None
    try:
        if waiting is not None:
            waiting.decode(app.codec, payload)
        elif wanted is None and (known := type_named(asked.workflow, asked.type)) is not ...:
            converted(app.codec.decode(payload)["answer"], known)
    except NotDecodable as refused:
        raise ApprovalConflict(
            f"The approval {asked.id} of run {asked.run} ({asked.what}) wants a {asked.type}, and this is {refused}."
        ) from None
