"""A `def` step that an `async` workflow calls directly: the error has the line to write."""

import pytest

from everstep import step, workflow
from everstep.errors import OutsideInWorkflow
from everstep.model.mistakes import blocks
from tests.engine.resume_helpers import Machine


@step
def fetch(url: str, tries: int = 1) -> str:
    return url * tries


@workflow
async def forgets() -> str:
    return fetch("a", tries=2).strip()


async def test_the_error_shows_the_line_to_write(machine: Machine) -> None:
    app = await machine.boot()
    with pytest.raises(OutsideInWorkflow) as error:
        await app.run(forgets)
    assert 'write `return (await asyncio.to_thread(fetch, "a", tries=2)).strip()`' in str(error.value)


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("page = fetch(url)", "page = await asyncio.to_thread(fetch, url)"),
        ("fetch()", "await asyncio.to_thread(fetch)"),
        ("page = self.shop.fetch(url, n=3)", "page = await asyncio.to_thread(self.shop.fetch, url, n=3)"),
        ("pages.append(fetch(u))", "pages.append(await asyncio.to_thread(fetch, u))"),
        ("return fetch(url)[0]", "return (await asyncio.to_thread(fetch, url))[0]"),
        ("if fetch(url):", "await asyncio.to_thread(fetch, …)"),
        ("page = fetch(", "await asyncio.to_thread(fetch, …)"),
        ("fetch(fetch(url))", "await asyncio.to_thread(fetch, …)"),
        ("page = other(url)", "await asyncio.to_thread(fetch, …)"),
        ('page = fetch("é")', "await asyncio.to_thread(fetch, …)"),
        ("", "await asyncio.to_thread(fetch, …)"),
        ("\0", "await asyncio.to_thread(fetch, …)"),
    ],
)
def test_a_line_that_is_clear_is_written_out_and_any_other_in_general(line: str, written: str) -> None:
    assert blocks("step", "Shop.fetch" if "shop" in line else "fetch", line).remedy == f"write `{written}`"
