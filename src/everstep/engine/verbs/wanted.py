"""What a run waits for, as the sender of a signal can know it: a value that the run would reject is refused at once.

A run that is driven in this process says it itself. Of another one the history says it, if nothing else can have
happened to the wait: types of built-in parts are known by their text, classes by the names that the declared workflow's
code uses. Where the sender cannot know, the signal is sent, and the run rejects it.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from everstep.codec import ANY, converted, names_around_function, plain_type, types_of
from everstep.engine.code.workflow import DECLARED
from everstep.engine.history.describe import COMMANDS
from everstep.engine.process.host import Host
from everstep.errors import Misuse, NotDecodable, UnknownWorkflow, WrongType
from everstep.model.events import EventRow, SignalAwaited, decode_body
from everstep.model.status import ENDED
from everstep.stores.protocol import Post, RunRow

NEWEST: Final = 64
"""The number of events at the end of a history that usually contain the wait."""
EVENTS_MAX: Final = 3000
"""No longer history is read to refuse a signal."""


async def refuse_wrong_type(app: Host, post: Post) -> None:
    """Raise `WrongType` if the run would certainly reject this signal."""
    if post.run in app.drivers:
        if misfit_here(app, post) is None or await app.read(is_preceded, app, post):
            return
        if (refusal := misfit_here(app, post)) is not None:  # it may wait for something else by now
            raise refusal
    elif (refusal := await app.read(misfit_elsewhere, app, post)) is not None:
        raise refusal


def refuse_wrong_type_at_once(app: Host, post: Post) -> None:
    """Do the same for a caller that may read the store on its own thread."""
    refusal = misfit_here(app, post) if post.run in app.drivers else misfit_elsewhere(app, post)
    if refusal is not None and not is_preceded(app, post):
        raise refusal


def misfit_here(app: Host, post: Post) -> WrongType | None:
    """Return why the run, which is driven in this process, would reject a signal now; None if it would not."""
    driver = app.drivers.get(post.run)
    execution = driver.execution if driver is not None else None
    if execution is None or execution.replaying or not execution.is_receiving:
        return None
    waiting = execution.receiving.waiting_for(post.name)
    if waiting is None:
        return None
    try:
        waiting.decode(app.codec, post.value)
    except NotDecodable as refused:
        return _refusal(post, waiting.type_text, refused)
    return None


def is_preceded(app: Host, post: Post) -> bool:
    """Return True if the run gets another signal of this name first, or was sent this very one before."""
    return any(
        (one.id == post.id != "") or (one.state == "pending" and one.name == post.name)
        for one in app.store.signals(post.run)
    )


def misfit_elsewhere(app: Host, post: Post) -> WrongType | None:
    """Return why a run that is not driven here will reject a signal, if its history proves that it does."""
    row = app.store.run(post.run)
    if row is None or row.damage or row.status in ENDED or row.generation < 1 or not row.head_seq:
        return None
    try:
        return _by_history(app, row, post)
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        return None  # the history is damaged, or of a newer release: the run says so


def _by_history(app: Host, row: RunRow, post: Post) -> WrongType | None:
    newest = app.store.events(row.id, row.generation, max(row.head_seq - NEWEST + 1, 1), row.head_seq)
    refusal = _misfit(app, row, post, _awaited(newest, post.name))
    if refusal is None or row.head_seq > EVENTS_MAX or is_preceded(app, post):
        return None
    if row.head_seq > NEWEST:
        whole = app.store.events(row.id, row.generation, 1, row.head_seq)
        return _misfit(app, row, post, _awaited(whole, post.name))
    return refusal


def _misfit(app: Host, row: RunRow, post: Post, awaited: Sequence[SignalAwaited]) -> WrongType | None:
    refusal: WrongType | None = None
    for body in awaited:
        annotation = type_named(row.workflow, body.type)
        if annotation is ...:
            return None
        try:
            types = ANY if annotation in (Any, object) else types_of(annotation)
            converted(app.codec.decode(post.value, types), annotation)
        except NotDecodable as refused:
            refusal = refusal or _refusal(post, body.type, refused)
        else:
            return None
    return refusal


def _refusal(post: Post, type_text: str, refused: NotDecodable) -> WrongType:
    return WrongType(
        f"The run {post.run} waits for the signal {post.name!r} as {type_text}, and this is {refused}. "
        "It was not sent.",
        str(refused),
    )


def type_named(workflow: str, text: str) -> Any:
    """Return the type that the text of a wait names; `...` if that is not known in this process."""
    if (known := plain_type(text)) is not ...:
        return known
    try:
        names = names_around_function(DECLARED.named(workflow).function)
    except (UnknownWorkflow, Misuse):
        return ...
    return plain_type(text, names)


def _awaited(events: Sequence[EventRow], name: str) -> list[SignalAwaited]:
    """Return the waits for a signal at the end of a history, if it is certain that the next one goes to them."""
    waits: list[SignalAwaited] = []
    unasked = 0
    taken: dict[int, SignalAwaited] = {}
    is_certain = True
    for event in events:
        kind = event.kind
        if kind == "signal_awaited" and (body := decode_body(kind, event.body)).name == name:
            if unasked:
                unasked -= 1
            else:
                waits.append(body)
        elif kind == "signal_received" and (body := decode_body(kind, event.body)).name == name:
            if waits:
                taken[body.number] = waits.pop(0)
            else:
                unasked += 1
        elif kind == "signal_rejected" and (body := decode_body(kind, event.body)).name == name:
            if body.number not in taken:
                is_certain = False
            else:
                waits.insert(0, taken.pop(body.number))
        elif kind not in COMMANDS and kind not in _NO_NEWS:
            # The code got news of something else, so it may have given up each of these waits.
            is_certain = is_certain and not waits and kind not in _BACK and not _carries(event)
    return waits if is_certain else []


_NO_NEWS: Final = frozenset(
    {"step_started", "attempt_failed", "heartbeat", "run_held", "run_resolved", "stream_noted", "attempt_charged"}
)
"""Events that the code does not notice, besides those that record its own commands."""
_BACK: Final = frozenset({"run_retried", "run_repaired", "run_restored", "rollback_requested", "compensation_started"})
"""After these the history no longer says in one line what the code waits for."""


def _carries(event: EventRow) -> bool:
    return event.kind == "run_started" and decode_body(event.kind, event.body).carried is not None
