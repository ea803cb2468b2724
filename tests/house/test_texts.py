"""What no text of the project contains: addresses of registries, paths of one machine, marks of unfinished work.

The patterns below have one letter in brackets, so that this file does not contain what it looks for.
"""

import re

import pytest

from tests.house.sources import ROOT, Source, report, texts

REGISTRIES = re.compile(
    r"[p]ypi\.(org|python\.org)|[p]ythonhosted\.org|[a]naconda\.org|[i]ndex-url|[e]xtra-index|[f]ind-links"
    r"|[r]egistry\.npmjs|[g]hcr\.io|[a]rtifactory",
    re.IGNORECASE,
)
MACHINE_PATHS = re.compile(r"(?<![\w.~$*{}<>])/(?:[w]ork|[r]oot)(?![\w-])|(?<![\w.~])/(?:[h]ome|[U]sers)/")
UNFINISHED = re.compile(r"\b([T]ODO|[F]IXME|[X]XX|[H]ACK)\b")
CONSTRAINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.+!]*")


def pattern_violations(source: Source, pattern: re.Pattern[str], what: str) -> list[str]:
    """Return the lines of a text in which a pattern is found."""
    return [source.at(n, f"{what}: {found.group()!r}") for n, line in source.lines() if (found := pattern.search(line))]


def constraint_violations(source: Source) -> list[str]:
    """Return the lines that are neither `name==version` nor a comment, and the names that stand there twice."""
    found = []
    seen: set[str] = set()
    for number, line in source.lines():
        if not line.strip() or line.startswith("#"):
            continue
        if not CONSTRAINT.fullmatch(line):
            found.append(source.at(number, f"not name==version: {line!r}"))
        name = re.sub(r"[-_.]+", "-", line.split("==")[0]).lower()
        if name in seen:
            found.append(source.at(number, f"{name} stands here twice"))
        seen.add(name)
    return found


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        (REGISTRIES, "an address of a package registry"),
        (MACHINE_PATHS, "a path of one machine"),
        (UNFINISHED, "unfinished work"),
    ],
)
def test_no_text_contains_what_does_not_belong_there(pattern: re.Pattern[str], what: str) -> None:
    violations = [violation for source in texts() for violation in pattern_violations(source, pattern, what)]
    assert not violations, report(violations)


def test_the_project_s_texts_are_looked_at() -> None:
    assert {"pyproject.toml", "LICENSE", "tests/house/test_texts.py"} <= {source.path for source in texts()}


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-bench.txt"])
def test_constraints_are_names_and_versions(name: str) -> None:
    violations = constraint_violations(Source(name, (ROOT / name).read_text("utf-8")))
    assert not violations, report(violations)


@pytest.mark.parametrize("line", ["see https://{}.org/project/x", "pip install --{}-url x"])
def test_a_registry_is_found(line: str) -> None:
    text = line.format("pypi" if "org" in line else "index")
    assert pattern_violations(Source("README.md", text), REGISTRIES, "registry")


@pytest.mark.parametrize("folder", ["work/main", "root", "root/x", "home/ann/x", "Users/ann/x"])
def test_a_path_of_one_machine_is_found(folder: str) -> None:
    assert pattern_violations(Source("README.md", f"cd /{folder}"), MACHINE_PATHS, "path")


@pytest.mark.parametrize("text", ["src/everstep/worker/", "/workflows", "docs/work", "/api/v1/workers", "~/home/x"])
def test_a_path_inside_the_project_is_fine(text: str) -> None:
    assert not pattern_violations(Source("README.md", text), MACHINE_PATHS, "path")


@pytest.mark.parametrize("mark", ["TO" + "DO", "FIX" + "ME", "XX" + "X"])
def test_a_mark_of_unfinished_work_is_found(mark: str) -> None:
    assert pattern_violations(Source("src/x.py", f"# {mark}: later"), UNFINISHED, "unfinished")


@pytest.mark.parametrize(
    "line", ["rich", "rich>=1", "rich @ https://example.org/rich.whl", "-e .", "--hash=x", "rich==1 ; x", "a==1\nA==1"]
)
def test_another_line_in_constraints_is_found(line: str) -> None:
    assert constraint_violations(Source("constraints.txt", f"# comment\nclick==8.1.7\n{line}\n"))
