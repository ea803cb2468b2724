"""Notifications of holds: callbacks in this process, and webhooks from an outbox.

A webhook's notification is a row that is written in the transaction of the hold, so a crash right after it loses
nothing: any worker with the same webhook delivers it, at least once. The sender first takes the row, for as long as a
request may take; it is free again when that time is over, or when the sender is gone. An answer of 2xx settles it, any
other is tried again with growing pauses. When the hold is resolved first, its row is dropped.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

from everstep.engine.code.stops import pass_on
from everstep.engine.history.clock import Alarm, microseconds, set_alarm
from everstep.engine.process.process import Process
from everstep.engine.process.webhooks import Answer, Sending, Webhook
from everstep.engine.run.holds import hold_message
from everstep.engine.run.threads import Threads
from everstep.errors import Misuse, StoreError
from everstep.model.crash_points import crash_point
from everstep.model.digests import digest_of
from everstep.model.untrusted import described, log_error, logger
from everstep.stores.protocol import Accepted, HoldRow
from everstep.stores.rows.notifications import NotificationRow, SettleNotification, TakeNotification

Callback = Callable[[HoldRow], Awaitable[None] | None]
OnHold = Callback | Webhook | str | Sequence[Callback | Webhook | str] | None

log = logger("everstep.holds")


SENDING: Final = "sending notifications"
AT_ONCE_MAX: Final = 4
"""Number of notifications that one process sends to one target at the same time."""
FIRST_SECONDS: Final = 1.0
MOST_SECONDS: Final = 300.0
"""Maximum delay between retries of a notification that was not acknowledged: 1, 2, 4 … 300 seconds."""
RETRY_AFTER_SECONDS_MAX: Final = 3600.0
"""The longest pause that a receiver may ask for."""
GIVE_UP_SECONDS: Final = 3 * 86400.0
"""Time after which an undelivered notification is given up. The hold itself stays."""
CLAIM_SECONDS: Final = 5.0
"""How much longer than its request a sender keeps a notification for itself."""
CLOSING_SECONDS: Final = 5.0
"""How long closing waits for due notifications, because there may be no other process to send them (seconds)."""
STORE_SECONDS: Final = 0.5
"""Delay before a store that failed is asked again, in seconds."""
GONE: Final = 410
"""The HTTP status with which the receiver refuses all further requests."""


class Notifier:
    """The part of an app that notifies of holds."""

    def __init__(self, app: Process, on_hold: "OnHold") -> None:
        self._app = app
        self._callbacks: list[Callback] = []
        self._webhooks: dict[str, Webhook] = {}
        self._under_way: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """Notifications that are being sent: their target, and the task."""
        self._stuck: Counter[str] = Counter()
        """Threads that outlast their request, by target: a name server that does not answer cannot be interrupted."""
        self._threads: Threads | None = None
        self._alarm: Alarm | None = None
        self._alarm_at = 0
        self._is_closed = False
        self._looks_again = False
        for one in _listed(on_hold):
            self._add(one)

    def _add(self, one: Any) -> None:

        if isinstance(one, str):
            one = Webhook(one)
        if callable(one):
            self._callbacks.append(one)
        elif not isinstance(one, Webhook):
            raise Misuse(f"on_hold= takes functions, webhooks and their addresses, not {type(one).__name__}.")
        elif one.name in self._webhooks:
            raise Misuse(f"Two webhooks are called {one.name}: give one of them another name=.")
        else:
            self._webhooks[one.name] = one

    @property
    def targets(self) -> list[str]:
        """The names of the targets to which this process delivers."""
        return list(self._webhooks)

    def rows(self, hold: HoldRow) -> list[NotificationRow]:
        """Return the rows to write with a hold: one for each target."""
        return [
            NotificationRow(
                id=f"{hold.id}-{digest_of(target.encode()).hex()[:8]}",
                hold=hold.id,
                run=hold.run,
                target=target,
                next_at=hold.created_at,
                created_at=hold.created_at,
            )
            for target in self._webhooks
        ]

    def tell(self, hold: HoldRow) -> None:
        """Call the callbacks for a durable hold, and send what is due."""
        for callback in self._callbacks:
            try:
                awaited = callback(hold)
            except BaseException as error:  # noqa: BLE001  # it is told, and the hold stays as it is
                log_error(log, "on_hold raised", error=error)
                pass_on(error, self._app.loop)
            else:
                if inspect.isawaitable(awaited):
                    self._app.spawn(_finished(awaited))
        self.look()

    # -- the outbox ------------------------------------------------------------------------------------------------
    def look(self) -> None:
        """Send what is due, as far as there is room, and set the alarm for the next one."""
        if self._webhooks and not self._is_closed and self._app.worker:
            self._looks_again = True
            self._app.background.keep("notifications", self._look)

    async def _look(self) -> None:
        while self._looks_again and not self._is_closed:
            self._looks_again = False
            for webhook in self._webhooks.values():
                await self._look_for(webhook)
            await self._set_alarm()

    async def _look_for(self, webhook: "Webhook") -> None:
        busy = sum(target == webhook.name for target, _ in self._under_way.values())
        room = AT_ONCE_MAX - busy - self._stuck[webhook.name]
        if room <= 0:
            return  # the next sender that ends looks for more
        at = self._app.clock.now()
        limit = room + busy
        rows = await self._app.read(self._app.store.due_notifications, target=webhook.name, at=at, limit=limit)
        for row in [row for row in rows if row.id not in self._under_way][:room]:
            # Not through the loop's task factory: the task must not begin before it is registered here.
            task = asyncio.Task(self._deliver(webhook, row), loop=self._app.loop, context=self._app.context.copy())
            self._under_way[row.id] = (webhook.name, task)

    async def _set_alarm(self) -> None:
        app, now = self._app, self._app.clock.now()
        times = [await app.read(app.store.next_notification, target=target) for target in self._webhooks]
        next_at = min((at for at in times if at is not None and at > now), default=0)
        if next_at == self._alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._alarm_at = next_at
        if next_at:
            self._alarm = set_alarm(self._app.clock, self._app.loop, next_at, self._ring)

    def _ring(self) -> None:
        self._alarm, self._alarm_at = None, 0
        self.look()

    # -- one notification ------------------------------------------------------------------------------------------
    async def _deliver(self, webhook: "Webhook", row: NotificationRow) -> None:
        """Take a notification, send it, and record the result."""
        try:
            await self._try(webhook, row, row.attempts + 1)
        except (StoreError, Misuse) as error:  # the store failed, or the app was closed: a claim ends by itself
            log.warning("A notification for %s is left to be sent again: %s", webhook.name, error)
            del self._under_way[row.id]
            self._app.loop.call_later(STORE_SECONDS, self.look)  # not at once, because the disk may be full
        except asyncio.CancelledError:
            del self._under_way[row.id]
            if not self._is_closed:  # otherwise the application cancelled all its tasks: what is due is still due
                self._app.loop.call_later(STORE_SECONDS, self.look)
            raise
        except Exception as error:  # noqa: BLE001  # it is tried again, and others are sent
            del self._under_way[row.id]
            self._app.loop.call_later(self._app.background.failed(SENDING, error), self.look)
        else:
            del self._under_way[row.id]
            self._app.background.works(SENDING)
            self.look()

    async def _try(self, webhook: "Webhook", row: NotificationRow, attempt: int) -> None:
        app = self._app
        at = app.clock.now()
        until = at + microseconds(webhook.timeout + CLAIM_SECONDS)
        take = TakeNotification(row.id, attempt, app.worker, at, until)
        if not isinstance(await app.committer.submit(take), Accepted):
            return  # another worker has it, or the hold was resolved
        crash_point("notification.taken")
        holds = await app.read(app.store.holds, run=row.run)
        hold = next((one for one in holds if one.id == row.hold), None)
        if hold is None:
            return  # the hold was resolved meanwhile, and this dropped with it

        body = hold_message(hold, app.store.url)
        timestamp = app.store.now() // 1_000_000
        sending = webhook.request(body, delivery=hold.id, attempt=attempt, timestamp=timestamp)
        answer = await self._answer(webhook, row.run, sending)
        crash_point("notification.answered")
        await app.committer.submit(self._settled(row, attempt, answer))
        crash_point("notification.settled")

    async def _answer(self, webhook: "Webhook", run: str, sending: "Sending") -> "Answer":
        """Send on a thread, which is interrupted when its time is over."""
        loop = self._app.loop
        future: asyncio.Future[Answer] = loop.create_future()

        def done(answer: Any, error: BaseException | None) -> None:
            if future.cancelled():
                self._stuck[webhook.name] -= 1
                self.look()
            else:
                future.set_result(answer if error is None else Answer(0, described(error)))

        if self._threads is None:
            refused = partial(self._app.background.failed, "threads of webhooks")
            works = partial(self._app.background.works, "threads of webhooks")
            self._threads = Threads(loop, AT_ONCE_MAX * len(self._webhooks), refused, works)
        self._threads.start(run, sending.send, done)
        try:
            async with asyncio.timeout(webhook.timeout + 1.0):
                return await future
        except TimeoutError:
            return Answer(0, f"no answer within {webhook.timeout:g} s")
        finally:
            self._stuck[webhook.name] += future.cancelled()
            sending.cut_off()

    def _settled(self, row: NotificationRow, attempt: int, answer: "Answer") -> SettleNotification:
        """Return the next state: sent, another attempt after a pause, or given up."""
        if answer.is_acknowledged:
            return SettleNotification(row.id, attempt, "sent")
        now, why = self._app.clock.now(), answer.error
        about = f"Hold {row.hold} of run {row.run} did not reach {row.target}"
        if answer.status == GONE or now - row.created_at > microseconds(GIVE_UP_SECONDS):
            log.error("%s, and is given up: %s.", about, why)
            return SettleNotification(row.id, attempt, "given up", 0, why)
        seconds = min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** min(attempt - 1, 20))
        seconds *= 1.0 - self._app.randomness.random() / 4  # so that the retries of many holds are spread
        seconds = max(seconds, min(answer.retry_after, RETRY_AFTER_SECONDS_MAX))
        if attempt == 1:
            log.warning("%s, and is sent again: %s.", about, why)
        return SettleNotification(row.id, attempt, "pending", now + microseconds(seconds), why)

    # -- the end ---------------------------------------------------------------------------------------------------
    async def close(self, *, send: bool) -> None:
        """Send what is due, for a few seconds, if the store allows it; then leave the rest to other workers."""
        end = self._app.loop.time() + (CLOSING_SECONDS if send else 0.0)
        if send and self._webhooks and self._app.worker:
            self._looks_again = True
            try:
                await self._look()
            except StoreError as error:
                log.error("Notifications cannot be read just now: %s", error)
        while self._under_way and (seconds := end - self._app.loop.time()) > 0:
            await asyncio.wait(self._tasks(), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        self._is_closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        if cut_off := self._tasks():
            log.warning("%d notifications of holds are left to another worker with the same target.", len(cut_off))
            for task in cut_off:
                task.cancel()
            await asyncio.wait(cut_off)
        if self._threads is not None:
            self._threads.close()

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [task for _, task in self._under_way.values()]


def _listed(on_hold: "OnHold") -> Sequence[Any]:
    if on_hold is None:
        return ()
    return on_hold if isinstance(on_hold, list | tuple) else (on_hold,)


async def _finished(awaited: Awaitable[Any]) -> None:
    try:
        await awaited
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001  # see Notifier.tell
        log_error(log, "on_hold raised", error=error)
        pass_on(error, asyncio.get_running_loop())
