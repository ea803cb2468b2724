"""`everstep demo`: a program of about ten steps is killed three times, and the outside never notices."""

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from everstep.cli.demo.child import RUN, DemoFailed, Stage
from everstep.cli.demo.proof import draw_accounts
from everstep.cli.demo.story import Outcome, disturbed, facts_of, judged, send_approval, undisturbed
from everstep.cli.drawing import draw_timeline
from everstep.cli.mistakes import EXIT_DONE, EXIT_FAILED
from everstep.cli.opening import line_to_paste
from everstep.cli.terminal import clean, console, say_json, styled
from everstep.model.own_files import replace

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command("demo")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Where to put it; a new folder. Default: a temporary one."
)
@click.option("--json", "in_json", is_flag=True, help="Say nothing while it runs; print what was found as JSON.")
def demo_command(folder: Path | None, in_json: bool) -> int:
    """See a program being killed three times and finish as if nothing had happened.

    A research agent runs as a real process and is really killed with SIGKILL: in a model call, in the middle of an
    effect, and between two steps. Then it runs undisturbed. A ledger, a process of its own, says what the
    outside saw of both. Takes about 15 seconds, needs no network, and leaves its folder for you to look at.
    """
    place = (folder or Path(tempfile.mkdtemp(prefix="everstep-demo-"))).resolve()
    if folder is not None:
        if place.exists() and any(place.iterdir()):
            raise click.BadParameter(f"{place} is not empty.", param_hint="--folder")
        place.mkdir(parents=True, exist_ok=True)
    program = place / "agent.py"
    replace(program, Path(__file__).with_name("agent.py").read_bytes())
    try:
        outcome = _play(place, program, in_json=in_json)
    except DemoFailed as error:
        if in_json:
            say_json({"proof": False, "problem": str(error), "folder": str(place)})
        else:
            console().print(styled(f"✗ {error}", "bold red"))
        return EXIT_FAILED
    if in_json:
        say_json(facts_of(outcome, place))
    else:
        _print_end(outcome, place)
    return EXIT_DONE if outcome.is_proof else EXIT_FAILED


def _play(place: Path, program: Path, *, in_json: bool) -> Outcome:
    began = time.monotonic()
    first = Stage(place / "killed", program)
    screen = Screen(first, shown=not in_json)
    second = None
    try:
        screen.title(program)
        kills = disturbed(first, screen.say, _approve)
        screen.close()
        second = Stage(place / "undisturbed", program)
        screen.note("… the same program in another store, left in peace")
        undisturbed(second, _approve)
        return judged(first, second, kills, began)
    finally:
        screen.close()
        for stage in filter(None, (first, second)):
            stage.close()


def _approve(stage: Stage) -> None:
    asyncio.run(send_approval(stage.url))


class Screen:
    """What a person sees while it happens: lines of what was done to the program, and its timeline below, alive."""

    def __init__(self, stage: Stage, *, shown: bool) -> None:
        from rich.live import Live

        self._stage = stage
        self._shown = shown
        self._console = console()
        self._live = None
        if shown and sys.stdout.isatty():
            self._live = Live(console=self._console, auto_refresh=False)
        stage.on_look = self.refresh
        self._drawn = 0.0

    def title(self, program: Path) -> None:
        """Say what is going to happen."""
        self.note(f"The program: {program}")
        self.note(
            "A research agent: model calls, three chapters and a notice that are published, a file, an approval.\n"
        )
        if self._live is not None:
            self._live.start()

    def say(self, mark: str, text: str, style: str) -> None:
        """Say what was done to the program, with the time."""
        if self._shown:
            line = styled(f"{self._stage.seconds:5.1f} s  ", "dim").append(f"{mark} ", style=style)
            self._console.print(line.append(clean(text), style=style if mark == "╳" else ""))

    def note(self, text: str) -> None:
        """Say something beside the story."""
        if self._shown:
            self._console.print(styled(text, "dim"))

    def refresh(self) -> None:
        """Draw the timeline again, if a moment has passed."""
        if self._live is None or time.monotonic() - self._drawn < 0.08 or not self._stage.timeline.rows:
            return
        self._drawn = time.monotonic()
        self._live.update(self._timeline(), refresh=True)

    def _timeline(self) -> "RenderableType":
        from rich.padding import Padding

        now = self._stage.died_at or self._stage.store.now()
        timeline, width = self._stage.timeline, self._console.width
        return Padding(draw_timeline(timeline.rows, timeline.started_at, now=now, width=width), (1, 0, 0, 0))

    def close(self) -> None:
        """Leave the finished timeline on the screen."""
        if self._live is not None:
            self._live.update(self._timeline(), refresh=True)
            self._live.stop()
            self._live = None
        elif self._shown and self._stage.timeline.end and not self._drawn:
            self._drawn = 1.0
            timeline = self._stage.timeline
            self._console.print(
                draw_timeline(timeline.rows, timeline.started_at, now=timeline.last_at, width=self._console.width)
            )


def _print_end(outcome: Outcome, place: Path) -> None:
    out = console()
    out.print()
    out.print(draw_accounts(outcome.accounts))
    out.print()
    verdicts = (
        (outcome.same_result, f"both runs returned the same result (sha256 {outcome.result_digest}…)"),
        (outcome.same_file, "both wrote the same file"),
        (outcome.same_keys, "every request for one action carried the same key, before and after the kills"),
        (outcome.sound, "both histories match their digests"),
    )
    for is_right, text in verdicts:
        out.print(styled("✓ " if is_right else "✗ ", "green" if is_right else "bold red").append(text))
    url = f"sqlite:///{place / 'killed' / 'everstep.db'}"
    out.print()
    out.print(styled("Look at it:", "dim"))
    for words in (("show", RUN), ("history", RUN), ("verify", RUN)):
        out.print(styled(f"  {line_to_paste(*words, url=url)}", "bold"), soft_wrap=True)
    out.print(
        styled(f"  {place / 'agent.py'}", "bold").append("  the program, a hundred lines", style="dim"), soft_wrap=True
    )
    out.print(styled("Write your own: the README begins with one in a dozen lines.", "dim"))
