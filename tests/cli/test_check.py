"""`everstep check`: the rules, on any store."""

import json
from typing import Any

from tests.cli.conftest import Folder


def test_check_exits_with_0_when_every_rule_is_kept(folder: Folder) -> None:
    folder.everstep("run", "app.py:report", '"tides"', '{"name": "ann"}', "--id", "r-1")
    folder.everstep("run", "app.py:failing", "--id", "f-1")
    folder.left_waiting("a-1", "app.py:approval", '"x"')
    done = folder.everstep("check")
    assert done.status == 0, done.out
    assert "3 runs" in done.out
    assert "rules are kept" in done.out
    facts = folder.json("check")
    assert facts["kept"] is True
    assert facts["broken"] == []


def test_check_names_what_is_broken_in_words(folder: Folder) -> None:
    folder.everstep("run", "app.py:failing", "--id", "f-1")
    folder.change("DELETE FROM events WHERE run = 'f-1' AND kind = 'step_completed'")
    done = folder.everstep("check")
    assert done.status == 1
    assert "f-1" in done.out
    assert "L5: a history is whole" in done.out
    broken: list[dict[str, Any]] = json.loads(folder.everstep("check", "--json").out)["broken"]
    assert {"L5"} <= {one["rule"] for one in broken}
    assert all(one["means"] and one["what"] for one in broken)


def test_check_joins_a_ledger(folder: Folder) -> None:
    folder.everstep("run", "app.py:report", '"tides"', '{"name": "ann"}', "--id", "r-1")
    history = folder.json("history", "r-1")
    sent = next(one for one in history if one["kind"] == "step_completed" and one["step"] == "send")
    key = folder.effects()[-1].split()[-1]
    entry = {"effect": "send", "key": key, "arguments": {}, "digest": "d", "at": sent["at"]}
    lines = [{"kind": "request", **entry}, {"kind": "applied", **entry}]
    folder.file("ledger.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert folder.everstep("check", "--ledger", "ledger.jsonl").status == 0
    folder.file("ledger.jsonl", "".join(json.dumps(line) + "\n" for line in [*lines, lines[1]]))
    twice = folder.everstep("check", "--ledger", ".")
    assert twice.status == 1
    assert "send (repeat) was applied 2 times" in twice.out


def test_check_without_a_ledger_that_is_named_is_misuse(folder: Folder) -> None:
    folder.everstep("run", "app.py:failing", "--id", "f-1")
    assert folder.everstep("check", "--ledger", "nowhere").status == 2
    folder.file("bad.jsonl", "not json\n")
    assert folder.everstep("check", "--ledger", "bad.jsonl").status == 2
    assert folder.everstep("check", "--url", "none.db").status == 2
