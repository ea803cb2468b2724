"""Exceptions of other packages come back as themselves if the step's or the workflow's modules have imported them."""

import sqlite3
import sys
import types
from typing import Any

import httpx
import msgspec
import pytest
import sqlalchemy
import sqlalchemy.exc
from botocore.exceptions import ClientError

from everstep import Retry, step, workflow
from everstep.codec import Codec, near
from everstep.errors import Misuse, StepError
from tests.engine.lives import once_live, prove, prove_life

TWICE = Retry(attempts=2, first=0)
REQUEST = httpx.Request("GET", "http://example.org")


class Declined(Exception):
    """An error of the application, with a constructor of its own."""

    def __init__(self, code: int, *, card: str) -> None:
        super().__init__(f"declined with {code}")
        self.card = card


class Told(Exception):
    """An error whose text needs what cannot be stored."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.answer = REQUEST

    def __str__(self) -> str:
        return f"{self.status} from {self.answer.url}"


class Deleting(Exception):
    """An error that does something when it is dropped."""

    def __del__(self) -> None:
        pass


def raise_sql() -> None:
    with sqlalchemy.create_engine("sqlite://").connect() as connection:
        connection.execute(sqlalchemy.text("SELECT * FROM nowhere WHERE a = :a"), {"a": 1})


def raise_status() -> None:
    httpx.Response(503, request=REQUEST).raise_for_status()


def raise_made_at_run_time() -> None:
    cls = type("NoSuchKey", (ClientError,), {})
    raise cls({"Error": {"Code": "NoSuchKey", "Message": "it is gone"}}, "GetObject")


def raise_with_a_cause() -> None:
    try:
        raise httpx.ReadTimeout("slow", request=REQUEST)
    except httpx.ReadTimeout as slow:
        error = httpx.ConnectError("boom", request=REQUEST)
        error.add_note("the third time")
        raise error from slow


@step
async def do(what: str) -> None:
    if what == "connect":
        raise_with_a_cause()
    if what == "status":
        raise_status()
    if what == "sql":
        raise_sql()
    if what == "made":
        raise_made_at_run_time()
    if what == "declined":
        raise Declined(7, card="visa")
    if what == "told":
        raise Told(503)
    if what == "group":
        raise ExceptionGroup("all", [httpx.ConnectError("one"), Declined(1, card="x")])


def test_an_except_on_the_class_of_another_package_works_live_and_replayed() -> None:
    @workflow
    async def flow() -> list[Any]:
        seen: list[Any] = []
        try:
            await do("connect")
        except httpx.ConnectError as error:
            cause = error.__cause__
            seen.append([str(error), error.__notes__[0], type(cause).__name__, str(cause)])
        return seen

    assert prove(flow) == [["boom", "the third time", "ReadTimeout", "slow"]]


def test_an_except_on_a_base_class_works_live_and_replayed() -> None:
    @workflow
    async def flow() -> list[Any]:
        seen: list[Any] = []
        for what in ("connect", "status", "sql", "made"):
            try:
                await do(what)
            except httpx.HTTPError as error:
                seen.append(type(error).__name__)
            except sqlalchemy.exc.OperationalError as error:
                seen += [str(error.statement), type(error.orig).__name__, isinstance(error.orig, sqlite3.Error)]
            except ClientError as error:
                seen += [error.response["Error"]["Code"], *error.__notes__]
        return seen

    assert prove(flow) == [
        "ConnectError",
        "HTTPStatusError",
        "SELECT * FROM nowhere WHERE a = ?",
        "OperationalError",
        True,
        "NoSuchKey",
        "Everstep: it was a NoSuchKey, which is not in any module.",
    ]


def test_the_applications_own_errors_come_back_without_their_constructors() -> None:
    @workflow
    async def flow() -> str:
        try:
            await do("declined")
        except Declined as error:
            return f"{error} {error.card}"
        return "?"

    assert prove(flow) == "declined with 7 visa"


def test_a_group_keeps_its_members_as_themselves() -> None:
    @workflow
    async def flow() -> list[str]:
        seen: list[str] = []
        try:
            await do("group")
        except* httpx.ConnectError as group:
            seen.append(str(group.exceptions[0]))
        except* Declined as group:
            seen.append(str(group.exceptions[0]))
        return seen

    assert prove(flow) == ["one", "declined with 1"]


def test_the_text_of_an_error_is_kept_although_a_part_of_it_cannot_be_stored() -> None:
    @workflow
    async def flow() -> None:
        await do("told")

    error: Any = prove_life(flow).error
    assert (type(error), error.status) == (Told, 503)
    assert str(error) == "503 from <Told.answer.url is not stored>"
    payload = Codec().encode_error(error)
    assert Codec().error_facts(payload)["message"] == "503 from http://example.org"


def test_whoever_uses_what_is_not_stored_is_told_to_read_it_in_the_step() -> None:
    @workflow
    async def flow() -> bool:
        try:
            await do("status")
        except httpx.HTTPStatusError as error:
            return error.response.status_code == 503
        return False

    error = prove_life(flow).error
    assert type(error) is Misuse
    assert str(error).startswith("HTTPStatusError.response.status_code is not stored")
    assert "Read it in the step" in str(error)


def test_a_runs_failure_is_raised_to_the_caller_as_itself() -> None:
    @workflow
    async def flow() -> None:
        await do("connect")

    error = prove_life(flow).error
    assert isinstance(error, httpx.ConnectError)
    assert isinstance(error.__cause__, httpx.ReadTimeout)


def test_a_childs_failure_is_raised_in_the_parent_as_itself() -> None:
    @workflow
    async def child() -> None:
        await do("status")

    @workflow
    async def parent() -> str:
        try:
            await child()
        except httpx.HTTPStatusError as error:
            return str(error)[:12]
        return "?"

    assert once_live(parent).value == "Server error"


def test_a_policy_decides_by_the_class_that_was_raised() -> None:
    attempts: list[str] = []

    @step(retry=Retry(attempts=3, first=0, only=(httpx.HTTPError,)))
    async def only() -> None:
        attempts.append("only")
        raise_status()

    @step(retry=Retry(attempts=3, first=0, never=(httpx.HTTPError,)))
    async def never() -> None:
        attempts.append("never")
        raise_status()

    @workflow
    async def flow() -> int:
        for one in (only, never):
            try:
                await one()
            except httpx.HTTPStatusError:
                continue
        return 1

    assert once_live(flow).value == 1
    assert attempts == ["only"] * 3 + ["never"]


# -- where a class is not near ----------------------------------------------------------------------------------------
def test_a_class_that_no_module_has_imported_is_a_step_error_that_says_what_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    far = types.ModuleType("far_away")
    exec("class Far(Exception): pass", far.__dict__)
    monkeypatch.setitem(sys.modules, "far_away", far)

    @step
    async def go() -> None:
        raise sys.modules["far_away"].Far("no")

    @workflow
    async def flow() -> str:
        try:
            await go()
        except StepError as error:
            return f"{error.type} | {error.message} | {error}"
        return "?"

    assert prove(flow) == (
        "Far | no | Far: no (to catch it as itself, declare the step with raises=(far_away.Far,), "
        "or use everstep.register(far_away.Far))"
    )


def test_a_class_that_was_near_and_is_no_more_is_a_step_error_that_says_so() -> None:
    with near(raise_status):
        payload = Codec().encode_error(httpx.ConnectError("boom"))
        assert type(Codec().decode_error(payload)) is httpx.ConnectError
    error = Codec().decode_error(payload)
    assert type(error) is StepError
    assert (error.type, error.message) == ("ConnectError", "boom")
    assert "here no module of the step or the workflow has imported it" in str(error)
    assert "everstep.register(httpx.ConnectError)" in str(error)


def test_a_class_of_the_codes_own_module_is_found_under_any_name_of_that_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A script is `__main__` when it is run, and has its file's name in a worker."""
    source = "class Mine(Exception): pass\ndef raises(): raise Mine('x')\n"
    modules = [types.ModuleType(name) for name in ("run_as_script", "loaded_by_worker")]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(source, module.__dict__)
    first, second = modules
    with near(first.raises):
        payload = Codec().encode_error(first.Mine("x"))
    with near(second.raises):
        assert type(Codec().decode_error(payload)) is second.Mine


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("subprocess", "Popen"),
        ("builtins", "SystemExit"),
        ("everstep.errors", "Evicted"),
        ("everstep.engine.code.loop", "SpinningWorkflow"),
        ("httpx", "Client"),
        ("httpx", "no.such.thing"),
        ("antigravity", "Error"),
        ("", "Deleting"),
        ("", "TWICE"),
    ],
)
def test_a_forged_name_reaches_no_other_class_and_imports_nothing(module: str, name: str) -> None:
    facts = {"type": "Forged", "message": "m", "from": "nearby", "module": module, "class": name, "args": []}
    with near(raise_status):
        error = Codec().decode_error(msgspec.json.encode([facts]))
    assert type(error) is StepError
    assert "antigravity" not in sys.modules


def test_an_error_that_was_recorded_as_a_step_error_stays_one() -> None:
    """The histories of earlier releases say nothing of a class: their code must take the same way again."""
    facts = {"type": "ConnectError", "message": "boom", "traceback": ""}
    with near(raise_status):
        error = Codec().decode_error(msgspec.json.encode([facts]))
    assert type(error) is StepError
    assert str(error) == "ConnectError: boom"


def test_raises_and_register_come_before_what_is_near() -> None:
    class Wanted(Exception):
        pass

    @step(raises=(Wanted,))
    async def go() -> None:
        raise Wanted("w")

    @workflow
    async def flow() -> str:
        try:
            await go()
        except Wanted as error:
            return str(error)
        return "?"

    assert prove(flow) == "w"
