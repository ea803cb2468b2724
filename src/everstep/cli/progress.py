"""The progress of a run while it is driven: lines for events, and in a terminal a live view of steps in progress."""

import time
from typing import TYPE_CHECKING, Any, Protocol

from everstep.cli.drawing import MARKS
from everstep.cli.opening import line_to_paste
from everstep.cli.terminal import arguments_text, clean, clock_time, console, moment, shortened, styled
from everstep.engine.code.step_state import FALLBACK, NEVER
from everstep.model.events import EventRow, decode_body
from everstep.model.exchange_events import APPROVAL
from everstep.model.secrets import HIDDEN
from everstep.stores.protocol import RunRow, Store
from everstep.view.run import approve_words, example_value
from everstep.view.timeline import NO_BUDGET, NO_SLOT, Row, Timeline
from everstep.view.words import between, duration, error_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

UNDER_WAY_MAX = 12
"""The maximum number of steps in progress that are shown at once."""


class Progress(Protocol):
    """An output for progress."""

    def say(self, mark: str, text: str, style: str = "") -> None:
        """Print a line that stays."""

    def refresh(self, row: RunRow, timeline: Timeline) -> None:
        """Show the steps in progress."""

    def close(self) -> None:
        """Stop showing."""


class SilentProgress:
    """Prints nothing, for `--json`."""

    def say(self, mark: str, text: str, style: str = "") -> None:
        """Print nothing."""

    def refresh(self, row: RunRow, timeline: Timeline) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Do nothing."""


class PlainProgress:
    """Lines on standard error, for logs and pipes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._console = console(err=True)

    def say(self, mark: str, text: str, style: str = "") -> None:
        """Print a line."""
        self._console.print(f"{clock_time(self._store.now())}  {mark} {clean(text)}", soft_wrap=True)

    def refresh(self, row: RunRow, timeline: Timeline) -> None:
        """Do nothing: there are only lines."""

    def close(self) -> None:
        """Do nothing."""


class LiveProgress:
    """Lines that stay, and below them the steps in progress, redrawn."""

    def __init__(self, store: Store) -> None:
        import sys

        from rich.live import Live

        self._store = store
        self._console = console(err=True)
        self._live = Live(
            console=self._console,
            refresh_per_second=10,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=True,
        )
        self._live.start()

    def say(self, mark: str, text: str, style: str = "") -> None:
        """Print a line above the steps in progress."""
        self._console.print(styled(f"{mark} ", style).append(clean(text), style="" if mark != "…" else "dim"))

    def refresh(self, row: RunRow, timeline: Timeline) -> None:
        """Redraw the steps in progress."""
        self._live.update(self._draw(timeline), refresh=False)

    def _draw(self, timeline: Timeline) -> "RenderableType":
        from rich.console import Group

        now = self._store.now()
        under_way = [one for one in timeline.rows if one.state == "open"]
        lines: list[Text] = [_under_way(one, now) for one in under_way[:UNDER_WAY_MAX]]
        if len(under_way) > UNDER_WAY_MAX:
            lines.append(styled(f"  … and {len(under_way) - UNDER_WAY_MAX} more", "dim"))
        return Group(*lines)

    def close(self) -> None:
        """Remove the steps in progress, and leave the lines."""
        if self._live.is_started:
            self._live.update("")
            self._live.stop()


_AFTER_THE_LAST = {NEVER: "waits for a person", FALLBACK: "its fallback takes over"}


def _under_way(row: Row, now: int) -> "Text":
    frames = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
    frame = frames[int(time.monotonic() * 10) % len(frames)]
    if row.kind == "step" and (not row.attempts or row.note.startswith((NO_BUDGET, NO_SLOT))):
        return styled(f"◷ {row.name}: {row.note}", "yellow")
    if row.kind == "step":
        attempt = row.attempts[-1]
        if attempt.ended_at is not None and attempt.due is not None:
            if attempt.due < 0:
                return styled(f"◷ {row.name}: {_AFTER_THE_LAST[attempt.due]}", "yellow")
            wait = max(0, attempt.due - now) / 1e6
            return styled(f"◷ {row.name}: attempt {attempt.number + 1} in {duration(wait)}", "yellow")
        count = f", attempt {attempt.number}" if attempt.number > 1 else ""
        return styled(f"{frame} {row.name}{count}  {between(attempt.started_at, now)}", "cyan")
    if row.kind == "timer" and row.deadline is not None:
        return styled(f"◷ timer, {duration(max(0, row.deadline - now) / 1e6)} left", "blue")
    if row.kind == "signal":
        return styled(f"✉ waits for the signal {row.name}", "magenta")
    if row.kind == "approval":
        return styled(f"☐ waits for the approval {row.name}", "magenta")
    if row.kind == "request":
        return styled(f"? takes requests {row.name}", "magenta")
    return styled(f"{frame} child run {row.name}  {between(row.started_at, now)}", "cyan")


class Watcher:
    """Follows one run in the store and reports new events."""

    def __init__(self, store: Store, run: str, progress: Progress, url: str | None) -> None:
        self.timeline = Timeline(store, run)
        self._store = store
        self._run = run
        self._progress = progress
        self._url = url
        self._generation = 0
        self._said: set[str] = set()

    def catch_up(self) -> RunRow | None:
        """Read the existing events silently; return the run's row, if there is one."""
        row = self._store.run(self._run)
        if row is not None:
            self._take_new(row, silent=True)
        return row

    def look(self) -> float:
        """Report new events and return how many seconds to wait before looking again."""
        began = time.monotonic()
        row = self._store.run(self._run)
        if row is not None:
            if row.head_seq != self.timeline.last_seq or row.generation != self._generation:
                self._take_new(row, silent=False)
            self._say_what_it_waits_for(row)
            self._progress.refresh(row, self.timeline)
        # A long history takes a while to read: this must not cost more than a tenth of the time.
        return max(0.05, 10 * (time.monotonic() - began))

    def _take_new(self, row: RunRow, *, silent: bool) -> None:
        if row.generation != self._generation:
            self._generation = row.generation
            self.timeline = Timeline(self._store, self._run)
        for event in self._store.events(self._run, row.generation)[self.timeline.last_seq :]:
            self.timeline.add(event)
            if not silent:
                self._say(event)

    def _say(self, event: EventRow) -> None:
        try:
            body = decode_body(event.kind, event.body)
        except Exception:  # noqa: BLE001 - a damaged event has nothing to say; the engine holds the run for it
            return
        line = _LINES.get(event.kind)
        said = line(event, body, self.timeline) if line is not None else None
        if said is not None:
            self._progress.say(*said)

    def _say_what_it_waits_for(self, row: RunRow) -> None:
        if row.status != "waiting":
            return
        for awaited in self.timeline.awaited_signals():
            if (key := f"signal {awaited.seq}") not in self._said:
                self._said.add(key)
                line = line_to_paste("signal", self._run, awaited.name, example_value(awaited.type), url=self._url)
                self._progress.say("✉", f"waits for the signal {awaited.name} ({awaited.type}):", "magenta")
                self._progress.say(" ", f"  {line}", "bold")
        for awaited in self.timeline.awaited_approvals():
            if (key := f"approval {awaited.id}") not in self._said:
                self._said.add(key)
                line = line_to_paste(*approve_words(self._run, awaited.id, awaited.type), url=self._url)
                self._progress.say("☐", f"waits for the approval {awaited.name} {awaited.arguments}:", "magenta")
                self._progress.say(" ", f"  {line}", "bold")
        for awaited in self.timeline.awaited_requests():
            if (key := f"request {awaited.name}") not in self._said:
                self._said.add(key)
                line = line_to_paste("ask", self._run, awaited.name, example_value(awaited.type), url=self._url)
                self._progress.say("?", f"takes requests {awaited.name} ({awaited.type}):", "magenta")
                self._progress.say(" ", f"  {line}", "bold")
        if row.wake_at is not None and (key := f"wake {row.wake_at}") not in self._said:
            self._said.add(key)
            now = self._store.now()
            if row.wake_at - now > 1_000_000:
                left = duration((row.wake_at - now) / 1e6)
                self._progress.say("◷", f"waits until {moment(row.wake_at, now)} ({left})", "blue")


Said = tuple[str, str, str] | None


def _step_started(event: EventRow, body: Any, timeline: Timeline) -> Said:
    if body.because == "crash":
        return "↻", f"{event.step} was cut off; attempt {body.attempt} begins", "yellow"
    if body.because == "freed":
        return "↻", f"{event.step} begins: its key {body.key} is free", "yellow"
    if body.because == "budget":
        return "↻", f"{event.step}: there is room in the budget; attempt {body.attempt}", "yellow"
    if body.because == "person":
        return "↻", f"{event.step}: attempt {body.attempt}, because a person asked for it", "yellow"
    if body.attempt > 1:
        return "↻", f"{event.step}: attempt {body.attempt}", "yellow"
    if body.compensates:
        return "↩", f"{event.step} undoes {timeline.rows[-1].undoes}", "yellow"
    arguments = HIDDEN if body.secret else arguments_text(body.preview)
    return "…", f"{event.step} {shortened(arguments, 100)}", "dim"


def _step_ended(event: EventRow, body: Any, timeline: Timeline) -> Said:
    row = next((one for one in reversed(timeline.rows) if one.kind == "step" and one.name == event.step), None)
    took = f"  {duration(body.seconds)}"
    if event.kind == "step_completed":
        value = shortened(row.value, 100) if row is not None and row.value not in ("", "null") else ""
        return MARKS["completed"][0], f"{event.step}{took}" + (f"  → {value}" if value else ""), "green"
    why = error_line(row.error) if row is not None and row.error else ""
    return MARKS["failed"][0], f"{event.step}{took}  {why}", "red"


def _step_shared(event: EventRow, body: Any, timeline: Timeline) -> Said:
    return MARKS["completed"][0], f"{event.step}  was done by {body.run}", "green"


def _attempt_failed(event: EventRow, body: Any, timeline: Timeline) -> Said:
    row = next((one for one in reversed(timeline.rows) if one.kind == "step" and one.name == event.step), None)
    error = row.attempts[-1].error if row is not None and row.attempts else None
    following = (
        _AFTER_THE_LAST[body.due] if body.due < 0 else f"the next in {duration(max(0, body.due - event.at) / 1e6)}"
    )
    return "✗", f"{event.step}: attempt {body.attempt} failed, {following}  {error_line(error or {})}", "red"


def _withheld(event: EventRow, body: Any, timeline: Timeline) -> Said:
    if body.limit:
        return "◷", f"{event.step}: {NO_SLOT} of the limit {body.limit}", "dim"
    following = "its fallback takes over" if body.then == "fallback" else "it is not begun"
    return "◷", f"{event.step}: no room in the budget ({body.over}), {following}", "yellow"


def _published(event: EventRow, body: Any, timeline: Timeline) -> Said:
    return "◆", f"{body.name} = {shortened(timeline.published.get(body.name, ''), 120)}", "magenta"


def _checkpoint_damaged(event: EventRow, body: Any, timeline: Timeline) -> Said:
    return "✗", f"the checkpoint at event {body.checkpoint} was not used: {body.why}", "yellow"


def _child_ended(event: EventRow, body: Any, timeline: Timeline) -> Said:
    mark = "✓" if body.status == "completed" else "✗"
    return mark, f"child run {body.run} {body.status}", "green" if mark == "✓" else "red"


def _graph_moved(event: EventRow, body: Any, timeline: Timeline) -> Said | None:
    """Report a move of a graph. Steps and children report their own starts."""
    kinds = {node.name: node.kind for node in timeline.graph.nodes()} if timeline.graph is not None else {}
    begins = [visit for visit in body.begins if kinds.get(visit.partition("#")[0]) in ("code", "approval")]
    return ("→", f"{', '.join(begins)} begins", "dim") if begins else None


_LINES: dict[str, Any] = {
    "graph_moved": _graph_moved,
    "step_started": _step_started,
    "step_completed": _step_ended,
    "step_failed": _step_ended,
    "step_shared": _step_shared,
    "key_taken": lambda event, body, _: ("…", f"{event.step}: run {body.run or '?'} has its key {body.key}", "dim"),
    "attempt_failed": _attempt_failed,
    "call_withheld": _withheld,
    "value_published": _published,
    "child_started": lambda event, body, _: ("▸", f"child run {body.run} ({body.workflow})", "cyan"),
    "child_ended": _child_ended,
    "checkpoint_taken": lambda event, body, _: ("◆", f"checkpoint {body.number}", "dim"),
    "checkpoint_damaged": _checkpoint_damaged,
    "signal_received": lambda event, body, _: (
        ("☑", f"answer to {body.name} arrived", "magenta")
        if body.name.startswith(APPROVAL)
        else ("✉", f"signal {body.name} arrived", "magenta")
    ),
    "signal_rejected": lambda event, body, _: ("✗", f"signal {body.name} was rejected: {body.why}", "red"),
    "request_received": lambda event, body, _: ("?", f"request {body.name} arrived", "magenta"),
    "request_answered": lambda event, body, _: (
        ("✗", f"request {body.name} was refused", "red")
        if body.refused
        else ("✓", f"request {body.name} answered", "green")
    ),
    "cancel_requested": lambda event, body, _: ("⊘", f"cancel requested {body.reason}".rstrip(), "yellow"),
    "rollback_requested": lambda event, body, _: ("↩", f"rollback requested {body.note}".rstrip(), "yellow"),
    "compensation_started": lambda event, body, timeline: ("↩", timeline.rows[-1].note, "yellow"),
    "drift_judged": lambda event, body, _: ("≠", f"{body.subject} has changed; {body.by}(): {body.decision}", "yellow"),
    "timer_fired": lambda event, body, _: ("◷", "a timer fired", "blue"),
    "run_continued": lambda event, body, _: ("↻", "continues with a fresh history", "cyan"),
    "run_repaired": lambda event, body, _: ("◆", f"repaired: {body.archived} events were archived", "yellow"),
    "run_restored": lambda event, body, _: ("◆", "the store was restored from a backup: asking first", "yellow"),
}
