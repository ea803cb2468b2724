"""`everstep demo`: it really kills, and it proves what it says."""

import json
import subprocess
import sys
from pathlib import Path

from everstep.cli.demo.proof import accounts, same_key_each_time


def entry(kind: str, effect: str, key: str, arguments: object, digest: str) -> dict[str, object]:
    return {"kind": kind, "effect": effect, "key": key, "arguments": arguments, "digest": digest, "at": 1}


def test_the_demo_kills_three_times_and_the_outside_does_not_notice(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "everstep", "demo", "--json", "--folder", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    facts = json.loads(done.stdout)
    assert done.returncode == 0, facts
    assert facts["proof"] is True
    assert len(facts["kills"]) == 3
    second = next(one for one in facts["accounts"] if one["what"] == "Chapter 2")
    assert second["applied"] == 1
    url = f"sqlite:///{tmp_path / 'demo' / 'killed' / 'everstep.db'}"
    show = [sys.executable, "-m", "everstep", "show", "report", "--json", "--url", url]
    shown = json.loads(subprocess.run(show, capture_output=True, text=True, timeout=30).stdout)
    assert shown["status"] == "completed"
    assert len(shown["crashes"]) >= 1


def test_an_effect_that_was_applied_twice_is_no_proof() -> None:
    once = [entry("request", "send", "k", "x", "d"), entry("applied", "send", "k", "x", "d")]
    assert accounts(once, once)[0].is_right
    assert not accounts([*once, once[1]], once)[0].is_right
    assert not accounts(once[:1], once)[0].is_right
    assert not accounts([], once)[0].is_right


def test_a_request_with_another_key_is_no_proof() -> None:
    assert same_key_each_time([entry("request", "send", "k", "x", "d")] * 2)
    assert not same_key_each_time([entry("request", "send", "k", "x", "d"), entry("request", "send", "j", "x", "d")])
