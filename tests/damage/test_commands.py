"""The command line on a damaged file: it says what is damaged, shows what can be shown, and never breaks down."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from everstep.cli import main
from tests.damage.subject import DONE, OPEN, File, copy_of, flip

FLIPS = [
    ("runs", column, bit)
    for column in ("workflow", "status", "owner", "queue", "tags", "parent", "arguments", "current_step", "preview")
    for bit in (0, 7)
] + [
    ("runs", column, bit)
    for column in ("generation", "head_seq", "wake_at", "created_at", "updated_at", "epoch", "published", "deaths")
    for bit in (1, 41, 62, 63)
]
FLIPS += [("events", column, bit) for column in ("kind", "step", "body", "at", "seq") for bit in (0, 6, 7, 13)]
COMMANDS = (
    ["show", OPEN],
    ["history", OPEN],
    ["verify", OPEN],
    ["verify", "--all"],
    ["ls"],
    ["holds"],
)


@pytest.mark.parametrize("start", range(4))
def test_every_command_that_looks_survives_a_damaged_row(original: Path, tmp_path: Path, start: int) -> None:
    """A quarter of the flips each; whatever is damaged, a command ends with what it found or one clear message."""
    file = File(copy_of(original, tmp_path))
    runner = CliRunner(env={"EVERSTEP_URL": str(file.path), "COLUMNS": "160"})
    problems = []
    for table, column, bit in FLIPS[start::4]:
        where = "run = ? AND seq = 8" if table == "events" else "id = ?"
        (row,) = file.rows(table, where, OPEN)
        if row[column] is None or (isinstance(row[column], str) and not row[column]):
            continue
        target = "CAST(? AS TEXT)" if isinstance(row[column], str) else "?"
        sql = f"UPDATE {table} SET {column} = {target} WHERE rowid = ?"
        try:
            file.raw.execute(sql, (flip(row[column], bit), row["rowid_"]))
        except Exception:  # noqa: BLE001  # a number that another row has
            continue
        for words in COMMANDS:
            for more in ([], ["--json"]):
                done = runner.invoke(main, [*words, *more])
                text = done.stdout + done.stderr
                if "not expected" in text or "Traceback" in text or done.exit_code not in (0, 1, 2):
                    problems.append(f"{table}.{column} bit {bit}: {' '.join(words)}: {text[-300:]}")
                elif words[0] == "ls" and DONE not in text:
                    problems.append(f"{table}.{column} bit {bit}: ls hides the others")
        stored = row[column].encode() if isinstance(row[column], str) else row[column]
        file.raw.execute(sql, (stored, row["rowid_"]))
    file.close()
    assert not problems, "\n".join(problems[:10])


def test_verify_all_tells_of_a_history_whose_row_is_gone(original: Path, tmp_path: Path) -> None:
    file = File(copy_of(original, tmp_path))
    file.raw.execute("DELETE FROM runs WHERE id = ?", (OPEN,))
    file.close()
    done = CliRunner(env={"EVERSTEP_URL": str(file.path)}).invoke(main, ["verify", "--all", "--json"])
    assert done.exit_code == 1
    (bad,) = [run for run in json.loads(done.stdout)["runs"] if not run["sound"]]
    assert bad["run"] == OPEN
    assert "no row" in bad["problem"]
