"""Sending a request to a run from outside, and waiting for its answer.

A request goes into the run's inbox, like a signal. Its answer is an event of the run's history; the table `answers`
says which. So an answer is durable, together with all that it depends on, before any sender gets it, and a sender that
asks again with the same id gets the same answer.
"""

import asyncio
from typing import Any

import msgspec

from everstep.codec import ANY, PLAIN, is_same, types_of
from everstep.engine.code.commands import decode_signal
from everstep.engine.history.journal import restore_payload
from everstep.engine.history.verify import (
    check_ends,
    event_at,
    load_now,
    refuse_no_status,
    refuse_unreadable,
    unknown_run,
)
from everstep.engine.process.host import Host
from everstep.engine.verbs.runs import held_error
from everstep.errors import Damaged, IdConflict, NoAnswer, RunEnded
from everstep.model import events as ev
from everstep.model.crash_points import crash_point
from everstep.model.ids import checked_delivery_id, checked_name, checked_run_id
from everstep.model.options import checked_timeout, checked_type
from everstep.model.status import ENDED
from everstep.model.untrusted import described
from everstep.stores.protocol import Delivery, NotPosted, Post, Posted, RunRow


async def ask(app: Host, run: str, name: str, value: Any, *, id: str | None, answer: Any, timeout: float | None) -> Any:
    """Put a request into a run's inbox and wait for its answer."""
    checked_type("answer", answer)
    payload = app.codec.encode(value, PLAIN, f"the request {name!r}")
    id = checked_delivery_id(id, "request", 200) or f"{app.randomness.getrandbits(128):032x}"
    post = Post(checked_run_id(run), "request", checked_name(name, "request"), id, payload, app.clock.now())
    try:
        async with asyncio.timeout(checked_timeout(timeout)) as limit:
            there = await posted(app, post)
            body = await _answer(app, post, there.number, asked_before=there.duplicate)
    except TimeoutError:
        if not limit.expired():
            raise
        raise NoAnswer(
            f"The run {run} has not answered the request {name!r} within {timeout} s. It keeps the request: "
            f"ask again with id={id!r} to continue waiting.",
            id,
        ) from None
    found = await app.read(_payload, app, run, body)
    if body.refused:
        error = app.codec.decode_error(found)
        if isinstance(error, Exception):
            raise error
        raise RunEnded(f"The request {name!r} was refused: {described(error)}.")
    return decode_signal(app.codec, found, ANY if answer in (Any, object) else types_of(answer), answer)


async def posted(app: Host, post: Post) -> Posted:
    """Put a request into the inbox, unless one with its id exists."""
    verdict = await app.committer.submit(post)
    if isinstance(verdict, NotPosted):
        if verdict.status is None:
            raise unknown_run(app.store, post.run)
        refuse_no_status(post.run, verdict.status)
        raise _ended(post, verdict.status, "it had ended before")
    assert isinstance(verdict, Posted)
    crash_point("request.posted")
    if verdict.duplicate:
        there = await app.read(_delivery, app, post.run, verdict.number)
        if there is not None and not (there.name == post.name and is_same(there.value, post.value)):
            raise IdConflict(f"The id {post.id!r} belongs to another request to the run {post.run}: use another id.")
    app.wake(post.run)
    return verdict


async def _answer(app: Host, post: Post, number: int, *, asked_before: bool) -> ev.RequestAnswered:
    """Wait for the answer. A driver in this process announces it; for a run elsewhere, poll."""
    generation, nudged, thorough = 0, False, asked_before
    while True:
        app.refuse_when_failed()
        with app.watchers.watching(post.run) as news:
            row = await app.read(app.store.run, post.run)  # before the answer: one given before the end is found
            if row is None:
                raise unknown_run(app.store, post.run)
            refuse_unreadable(row)
            answered = await app.read(find_answer, app, row, post.id, number, thorough or row.status in ENDED)
            thorough = False
            if answered is not None:
                return answered
            if row.status in ENDED:
                raise _ended(post, row.status, "it ended without having answered it") from await app.read(
                    _failure, app, row
                )
            is_new = not generation and not asked_before  # it is in the inbox of exactly this generation
            if (
                row.generation != generation
                and not is_new
                and not await app.read(_can_be_answered, app, row, post.id, number)
            ):
                raise _ended(post, row.status, "it was asked before the run was restarted")
            generation = row.generation
            if row.status == "held":
                raise held_error(
                    row.id,
                    await app.read(app.store.holds, run=row.id),
                    f" It keeps the request {post.name!r}: ask again with id={post.id!r}.",
                )
            if not nudged:
                nudged = True
                app.pump.start()
                app.pump.nudge()
            await news


def find_answer(app: Host, row: RunRow, id: str, number: int, thorough: bool) -> ev.RequestAnswered | None:
    """Return the answer to a request, verified. The table names its event; if that is wrong, the history is searched.

    The request's id shows that it is the right one: the run may have been moved here, and its requests got other
    numbers. thorough: search the whole history also if the table has no answer, because a row of it may be lost.
    """
    place = app.store.answer(row.id, number)
    if place is None:
        return _in_history(app, row, id) if thorough else None
    of_its_time = msgspec.structs.replace(row, generation=place.generation)
    try:
        event = event_at(app.store, of_its_time, place.seq)
    except Damaged:
        event = None
    if event is not None and event.kind == "request_answered" and event.body.id == id:
        answered: ev.RequestAnswered = event.body
        return answered
    found = _in_history(app, row, id)
    if found is None and place.generation == row.generation:
        raise Damaged(f"The answer to request {number} of run {row.id} is not where it should be.")
    return found


def _in_history(app: Host, row: RunRow, id: str) -> ev.RequestAnswered | None:
    _, history = load_now(app.store, row)
    return next((e.body for e in history if e.kind == "request_answered" and e.body.id == id), None)


def _can_be_answered(app: Host, row: RunRow, id: str, number: int) -> bool:
    """Return True if this generation of the run has the request, or will take it."""
    delivery = _delivery(app, row.id, number)
    if delivery is None or delivery.state in ("undelivered", "left"):
        return False
    if delivery.state == "pending" or row.generation == 1:
        return True
    _, history = load_now(app.store, row)
    carried = history[0].body.carried
    if carried is not None and any(one[2] == id for one in carried.requests):
        return True
    return any(event.kind == "request_received" and event.body.id == id for event in history)


def _delivery(app: Host, run: str, number: int) -> Delivery | None:
    return next((one for one in app.store.signals(run) if one.number == number), None)


def _payload(app: Host, run: str, body: ev.RequestAnswered) -> bytes:
    if body.ref:
        return restore_payload(app.store.payload(run, body.ref), body.ref)
    return bytes(body.error if body.refused else body.value)


def _failure(app: Host, row: RunRow) -> BaseException | None:
    """Return why the run failed, if it did."""
    if row.status != "failed" or not row.outcome:
        return None
    check_ends(app.store, row)
    return app.codec.decode_error(row.outcome)


def _ended(post: Post, status: str, why: str) -> RunEnded:
    return RunEnded(f"The run {post.run} does not answer the request {post.name!r}: {why} ({status}).", status)
