"""What the tests of secret steps share: all that is shown of a run."""

from pathlib import Path
from typing import Final

from click.testing import CliRunner

import everstep
from everstep.cli import main

MARK: Final = "hunter2-do-not-show"


def everything_shown(path: Path, run: str) -> str:
    """Return all that commands print about a run."""
    runner = CliRunner(env={"EVERSTEP_URL": str(path), "COLUMNS": "200"})
    shown = ""
    for words in (["show", run], ["history", run], ["ls"], ["holds"], ["holds", "--all"], ["verify", run]):
        for more in ([], ["--json"]):
            done = runner.invoke(main, [*words, *more])
            assert "Traceback" not in done.stderr
            shown += done.stdout + done.stderr
    return shown


async def shown_to_programs(app: everstep.App, run: str) -> str:
    """Return all that the Python names show of a run, its result aside."""
    handle = app.get(run)
    return repr(
        (await handle.history(), await handle.holds(open_only=False), await handle.published(), await handle.verify())
    )
