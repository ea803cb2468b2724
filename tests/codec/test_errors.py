"""Exceptions: built-in, Everstep's and registered ones come back as themselves, all others as StepError."""

import asyncio
import builtins
import json
import socket
import subprocess
from typing import Any

import pytest

from everstep import errors
from everstep.codec import Codec, error_facts, register
from everstep.errors import NotDecodable, NotDone, NotEncodable, RunHeld, StepError, StepTimedOut

codec = Codec()


def round_trip(error: BaseException) -> Any:
    payload = codec.encode_error(error)
    json.loads(payload)
    return codec.decode_error(payload)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as caught:
        return caught


@register
class Declined(Exception):
    def __init__(self, code: int, card: str) -> None:
        super().__init__(f"declined with {code}")
        self.code = code
        self.card = card
        self.response = object()  # not storable, and left out


@register
class Unreachable(OSError):
    def __init__(self, host: str) -> None:
        super().__init__(111, "refused", host)
        self.host = host


@register(encode=lambda error: (error.a, error.b), decode=lambda parts: Coded(*parts))
class Coded(Exception):
    def __init__(self, a: int, b: int) -> None:
        self.a, self.b = a, b


@register
class Failures(ExceptionGroup[Exception]):
    pass


class Foreign(ValueError):
    pass


SPECIAL = {
    "UnicodeDecodeError": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    "UnicodeEncodeError": UnicodeEncodeError("utf-8", "\ud800", 0, 1, "bad"),
    "UnicodeTranslateError": UnicodeTranslateError("x", 0, 1, "bad"),
    "ExceptionGroup": ExceptionGroup("many", [ValueError(1), ExceptionGroup("inner", [KeyError("k")])]),
    "BaseExceptionGroup": BaseExceptionGroup("many", [KeyboardInterrupt(), ValueError(1)]),
}
BUILT_IN = sorted(
    {item for item in vars(builtins).values() if isinstance(item, type) and issubclass(item, BaseException)},
    key=lambda cls: cls.__name__,
)


@pytest.mark.parametrize("cls", BUILT_IN, ids=lambda cls: cls.__name__)
def test_every_built_in_exception_comes_back_as_itself(cls: Any) -> None:
    original = SPECIAL.get(cls.__name__) or cls("some text")
    restored = round_trip(original)
    assert type(restored) is cls
    assert str(restored) == str(original)
    if not isinstance(original, BaseExceptionGroup):
        assert restored.args == original.args


@pytest.mark.parametrize(
    "name", [n for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, errors.Error)]
)
def test_every_error_of_everstep_comes_back_as_itself(name: str) -> None:
    cls = getattr(errors, name)
    restored = round_trip(cls("some text"))
    assert type(restored) is cls
    assert str(restored) == "some text"
    assert vars(restored).items() >= vars(cls("some text")).items()


def test_an_operating_system_error_keeps_its_number_and_its_file_names() -> None:
    restored = round_trip(FileNotFoundError(2, "no such file", "/a", None, "/b"))
    assert type(restored) is FileNotFoundError
    assert (restored.errno, restored.strerror, restored.filename, restored.filename2) == (2, "no such file", "/a", "/b")
    assert str(round_trip(OSError(2, "gone", "f"))) == str(OSError(2, "gone", "f"))
    assert round_trip(StepTimedOut("late")).args == ("late",)


def test_attributes_outside_the_arguments_are_kept() -> None:
    assert round_trip(SystemExit(3)).code == 3
    assert round_trip(StopIteration(5)).value == 5
    missing = round_trip(ImportError("no", name="mod", path="/p"))
    assert (missing.name, missing.path) == ("mod", "/p")
    syntax = round_trip(SyntaxError("bad", ("f.py", 3, 1, "x =")))
    assert (syntax.filename, syntax.lineno) == ("f.py", 3)
    held = round_trip(RunHeld("held", hold="h-1", reason="drift"))
    assert (held.hold, held.reason) == ("h-1", "drift")
    assert round_trip(KeyError((1, 2))).args == ((1, 2),)


def test_common_exceptions_of_the_standard_library_come_back_as_themselves() -> None:
    assert type(round_trip(asyncio.CancelledError("why"))) is asyncio.CancelledError
    assert type(round_trip(TimeoutError())) is asyncio.TimeoutError
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    restored = round_trip(caught.value)
    assert (type(restored), restored.pos, str(restored)) == (json.JSONDecodeError, 1, str(caught.value))
    assert round_trip(subprocess.CalledProcessError(3, ["ls"], b"out")).returncode == 3
    assert round_trip(socket.gaierror(-2, "unknown")).errno == -2


def test_a_registered_exception_comes_back_without_its_constructor() -> None:
    restored = round_trip(Declined(7, "visa"))
    assert type(restored) is Declined
    assert (restored.args, restored.code, restored.card) == (("declined with 7",), 7, "visa")
    assert not hasattr(restored, "response")
    unreachable = round_trip(Unreachable("h"))
    assert (type(unreachable), unreachable.errno, unreachable.filename, unreachable.host) == (
        Unreachable,
        111,
        "h",
        "h",
    )


def test_a_registered_exception_with_its_own_codec_uses_it() -> None:
    restored = round_trip(Coded(1, 2))
    assert (type(restored), restored.a, restored.b) == (Coded, 1, 2)


def test_any_other_exception_becomes_a_step_error_that_names_it() -> None:
    restored = round_trip(Foreign("some text"))
    assert type(restored) is StepError
    assert (restored.type, restored.message) == ("Foreign", "some text")
    again = round_trip(restored)
    assert (type(again), again.type, again.message) == (StepError, "Foreign", "some text")


def test_causes_contexts_and_notes_are_kept() -> None:
    error = ValueError("outer")
    error.add_note("a note")
    error.__cause__ = Foreign("inner")
    error.__cause__.__context__ = KeyError("innermost")
    restored = round_trip(error)
    assert restored.__notes__ == ["a note"]
    assert type(restored.__cause__) is StepError
    assert type(restored.__cause__.__context__) is KeyError
    assert restored.__suppress_context__
    silenced = ValueError("quiet")
    silenced.__context__, silenced.__suppress_context__ = KeyError(), True
    assert round_trip(silenced).__context__ is None
    assert round_trip(silenced).__suppress_context__


def test_a_group_comes_back_with_its_members() -> None:
    restored = round_trip(Failures("many", [Declined(1, "a"), Foreign("x"), ExceptionGroup("in", [KeyError(1)])]))
    assert type(restored) is Failures
    assert [type(member) for member in restored.exceptions] == [Declined, StepError, ExceptionGroup]
    assert vars(restored.exceptions[0])["code"] == 1


def test_circles_and_endless_chains_of_causes_end() -> None:
    error, other = ValueError(1), ValueError(2)
    error.__cause__, other.__cause__ = other, error
    assert round_trip(error).__cause__.args == (2,)
    chain: BaseException = ValueError(0)
    for number in range(1000):
        following = ValueError(number)
        following.__cause__ = chain
        chain = following
    assert round_trip(chain).args == (999,)
    nested: Exception = ValueError()
    for _ in range(60):
        nested = ExceptionGroup("g", [nested])
    assert type(round_trip(nested)) is ExceptionGroup


@register
class Counted(Exception):
    """An exception that counts how often any of its kind is described."""

    count = 0

    def __str__(self) -> str:
        Counted.count += 1
        return "counted"


def wrapping_by_cause(error: Counted) -> Counted:
    outer = Counted(error)
    outer.__cause__ = error
    return outer


def wrapping_by_attributes(error: Counted) -> Counted:
    outer = Counted("outer")
    vars(outer).update(original=error, first=[error], request={"error": error})
    outer.__context__ = error
    return outer


def wrapping_with_what_cannot_be_stored(error: Counted) -> Counted:
    outer = Counted([error, object()])
    vars(outer).update(original=error)
    return outer


def wrapping_in_groups(error: Counted) -> Any:
    return ExceptionGroup("group", [error, error])


def wrapping_in_groups_by_cause(error: Counted) -> Any:
    outer = ExceptionGroup("group", [error, Counted(error)])
    outer.__cause__ = error
    return outer


WRAPPING = (
    wrapping_by_cause, wrapping_by_attributes, wrapping_with_what_cannot_be_stored, wrapping_in_groups,
    wrapping_in_groups_by_cause,
)  # fmt: skip


@pytest.mark.parametrize("wrapping", WRAPPING)
def test_an_error_that_wraps_others_is_described_in_one_walk(wrapping: Any) -> None:
    described: list[int] = []
    sizes: list[int] = []
    for depth in (4, 8):
        error: Any = Counted("innermost")
        for _ in range(depth):
            error = wrapping(error)
        Counted.count = 0
        payload = codec.encode_error(error)
        described.append(Counted.count)
        sizes.append(len(payload))
        assert type(codec.decode_error(payload)) is type(error)
        Counted.count = 0
        codec.encode([error])
        described.append(Counted.count)
    # Python's own text of an argument reads those within it, so that a level may cost as much as its depth.
    assert described[2] <= 5 * described[0], described
    assert described[3] <= 5 * described[1], described
    assert sizes[1] <= 4 * sizes[0], sizes


def in_itself() -> list[Any]:
    attribute, argument, both, listed, one, other = (ValueError("text") for _ in range(6))
    attribute.me = attribute  # type: ignore[attr-defined]
    argument.args = (argument,)
    both.args, both.me, both.__cause__ = (both, both), [both], both  # type: ignore[attr-defined]
    listed.args = ([{"error": (listed,)}],)
    one.a = one.b = other  # type: ignore[attr-defined]
    other.a = other.b = one  # type: ignore[attr-defined]
    group = ExceptionGroup("group", [one, other])
    one.group = group  # type: ignore[attr-defined]
    return [attribute, argument, both, listed, one, other, group]


@pytest.mark.parametrize("which", range(len(in_itself())))
def test_an_error_that_holds_itself_is_kept_with_a_note_in_its_place(which: int) -> None:
    error = in_itself()[which]
    payload = codec.encode_error(error)
    assert len(payload) < 20_000
    restored = round_trip(error)
    assert type(restored) is type(error)
    assert "holds itself" in payload.decode()
    assert type(codec.decode(codec.encode([error]))[0]) is type(error)


def test_an_error_whose_own_codec_returns_it_again_is_kept_as_text() -> None:
    coded = Coded(0, 0)
    coded.a, coded.b = coded, coded  # type: ignore[assignment]
    assert type(round_trip(coded)) is StepError


def test_an_error_in_an_argument_comes_back_as_itself_also_if_it_is_the_cause() -> None:
    inner = Declined(7, "visa")
    inner.__cause__ = KeyError("k")
    error = RuntimeError("outer", inner)
    error.__cause__ = inner
    restored = round_trip(error)
    assert (type(restored.args[1]), restored.args[1].code) == (Declined, 7)
    assert (type(restored.__cause__), type(restored.__cause__.__cause__)) == (Declined, KeyError)


def test_an_error_has_its_text_however_often_it_was_wrapped() -> None:
    error: BaseException = KeyError("innermost")
    for _ in range(5):
        outer = RuntimeError(error)
        outer.__cause__ = error
        error = outer
    assert str(round_trip(error)) == str(error) == "'innermost'"


def test_a_value_of_many_shared_parts_becomes_a_note_in_an_error() -> None:
    shared: Any = [1]
    for _ in range(18):
        shared = [shared, shared]
    error = Declined(7, "visa")
    error.args = (shared, "kept")
    vars(error)["parts"] = shared
    restored = round_trip(error)
    assert "too large" in restored.args[0]
    assert (restored.args[1], restored.code) == ("kept", 7)
    assert not hasattr(restored, "parts")


@pytest.mark.parametrize("count", [1_000, 1_001, 20_000])
def test_a_group_keeps_its_first_members_and_a_note_of_how_many_there_were(count: int) -> None:
    class Member(ValueError):
        asked = 0

        def __str__(self) -> str:
            Member.asked += 1
            return "member"

    restored = round_trip(ExceptionGroup("group", [Member() for _ in range(count)]))
    assert len(restored.exceptions) == 1_000
    assert Member.asked <= 1_000
    assert getattr(restored, "__notes__", []) == (
        [] if count == 1_000 else [f"Everstep has kept the first 1000 of the {count} members of this group."]
    )
    nested = ExceptionGroup("outer", [ExceptionGroup("inner", [Member() for _ in range(count)]) for _ in range(50)])
    Member.asked = 0
    assert type(round_trip(nested)) is ExceptionGroup
    assert Member.asked <= 5_000


def test_arguments_that_cannot_be_stored_become_their_text() -> None:
    restored = round_trip(ValueError(object, {"a": (1,)}, 10**400, "\ud800"))
    assert restored.args == ("<class 'object'>", {"a": (1,)}, 10**400, "\ud800")
    assert round_trip(ValueError(10**5000)).args == (10**5000,)


def test_encoding_an_exception_never_raises() -> None:
    class Hostile(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

        __repr__ = __str__

        @property
        def __notes__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no notes")

    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    circle: list[Any] = []
    circle.append(circle)
    for error in (Hostile(), ValueError(Hostile()), ValueError(deep), KeyError(circle), ValueError("x" * 10**6)):
        assert isinstance(round_trip(error), Exception)
    assert len(codec.encode_error(Foreign("x" * 10**6))) < 20_000


def test_where_it_was_raised_is_kept_bounded_and_survives_another_round() -> None:
    def deep(level: int) -> None:
        if level:
            deep(level - 1)
        raise ValueError("here")

    try:
        deep(200)
    except ValueError as caught:
        restored = round_trip(caught)
    text = restored.__everstep_traceback__
    assert "test_errors.py" in text
    assert "in deep" in text
    assert len(text) < 8_100
    assert text in round_trip(restored).__everstep_traceback__


def test_facts_show_an_exception_without_restoring_it() -> None:
    error = raised(Foreign("\x1b[31mred"))
    error.__cause__ = KeyError("k")
    facts = error_facts(codec.encode_error(error))
    assert facts["type"] == "Foreign"
    assert facts["message"] == "\\x1b[31mred"
    assert "test_errors.py" in facts["traceback"]
    assert facts["cause"]["type"] == "KeyError"
    group = error_facts(codec.encode_error(ExceptionGroup("g", [ValueError(1)])))
    assert group["members"][0]["message"] == "1"


def test_a_restorable_exception_may_be_a_value_and_any_other_is_refused() -> None:
    restored = codec.decode(codec.encode([Declined(7, "visa"), NotDone("x")]))
    assert [type(part) for part in restored] == [Declined, NotDone]
    with pytest.raises(NotEncodable, match=r"everstep\.register\(Foreign\)"):
        codec.encode([Foreign()])


def test_an_exception_whose_class_is_no_longer_registered_is_said_so() -> None:
    payload = codec.encode_error(Declined(7, "visa")).replace(b'"Declined"', b'"Vanished"')
    with pytest.raises(NotDecodable, match="no longer registered"):
        codec.decode_error(payload)
