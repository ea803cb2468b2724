"""The crawler: concurrent reads that a crash does not repeat."""

from collections import Counter
from pathlib import Path

from tests.examples import kit
from tests.waiting import wait_until

PAGES = ["/", "/cup", "/leaf", "/pan", "/salt", "/sea", "/tea", "/tide"]
RESULT = "pages: " + " ".join(PAGES) + "\n"


def test_an_undisturbed_crawl_asks_for_each_page_once(tmp_path: Path) -> None:
    assert kit.run("crawler", tmp_path) == RESULT
    assert sorted(kit.lines(tmp_path / "site.log")) == PAGES


def test_a_killed_crawl_goes_on_and_asks_again_only_for_what_was_under_way(tmp_path: Path) -> None:
    log = tmp_path / "site.log"
    process = kit.begin("crawler", tmp_path)
    # With three at a time, the seventh request means that at least four answers are recorded.
    wait_until(lambda: len(kit.lines(log)) >= 7, "seven requests")
    kit.kill(process)
    first = kit.lines(log)
    assert kit.run("crawler", tmp_path) == RESULT
    again = kit.lines(log)[len(first) :]
    assert set(first) | set(again) == set(PAGES)
    assert max(Counter(again).values()) == 1
    assert not set(again) & set(first[:-3])


def test_at_most_three_pages_are_asked_for_at_once(tmp_path: Path) -> None:
    kit.run("crawler", tmp_path)
    open_calls, most = set(), 0
    for event in kit.history(tmp_path, "crawl-1"):
        if event.kind == "step_started":
            open_calls.add(event.body["call"])
        elif event.kind == "step_completed":
            open_calls.discard(event.body["call"])
        most = max(most, len(open_calls))
    assert most == 3
