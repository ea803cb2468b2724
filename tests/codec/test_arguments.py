"""Arguments: one form for each call, a digest that does not depend on order, and what is handed through."""

import dataclasses
import functools
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.codec import ANY, Codec, Live, Signature, register, types_of
from everstep.errors import Misuse, NotDecodable, NotEncodable
from tests.codec.test_hostile import same, values
from tests.codec.test_values import Author, Basket, Book, Colour, Item, Node, Order, Point

if TYPE_CHECKING:
    from nowhere import Invisible  # type: ignore[import-not-found]

codec = Codec()


class Client:
    pass


def plain(a: int, b: str = "b", *, c: int = 3) -> None: ...


def encode(function: Any, *args: Any, **kwargs: Any) -> Any:
    return codec.encode_arguments(Signature(function), args, kwargs, "f")


# --- one form


def test_a_call_by_name_and_a_call_by_position_are_the_same_call() -> None:
    assert encode(plain, 1, "x") == encode(plain, a=1, b="x") == encode(plain, 1, b="x") == encode(plain, b="x", a=1)
    assert encode(plain, 1, c=5).kwargs == {"c": 5}
    assert encode(plain, 1, c=5).digest != encode(plain, 1, "5").digest


def test_what_must_be_named_stays_named_and_is_sorted() -> None:
    def f(a: int = 1, b: int = 2, c: int = 3, **more: int) -> None: ...

    arguments = encode(f, z=1, c=2, a=3)
    assert arguments.args == (3,)
    assert list(arguments.kwargs) == ["c", "z"]
    assert codec.decode_arguments(Signature(f), arguments.payload) == ((3,), {"c": 2, "z": 1})


def test_arguments_that_can_only_be_positional_are_not_taken_from_names() -> None:
    def f(a: int, /, **more: int) -> None: ...

    arguments = encode(f, 1, a=2)
    assert (arguments.args, arguments.kwargs) == ((1,), {"a": 2})


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"a": 2}), ((1,), {"nope": 2}), ((), {"b": "x"})]
)
def test_a_wrong_call_is_a_type_error_that_names_the_function(args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError):
        plain(*args, **kwargs)
    with pytest.raises(TypeError, match=r"plain\(\)"):
        encode(plain, *args, **kwargs)


def test_a_missing_keyword_is_a_type_error() -> None:
    def f(*, must: int) -> None: ...

    with pytest.raises(TypeError, match="must"):
        encode(f)
    assert encode(f, must=1).kwargs == {"must": 1}


@given(st.lists(st.integers(), max_size=5), st.dictionaries(st.sampled_from("abcdxy"), st.integers(), max_size=5))
def test_a_call_is_accepted_just_when_the_function_accepts_it_and_means_the_same(args: Any, kwargs: Any) -> None:
    def f(a: Any, b: Any = 0, /, c: Any = 1, *rest: Any, d: Any, **more: Any) -> Any:
        return a, b, c, rest, d, more

    def g(a: Any, b: Any, c: Any = 1) -> Any:
        return a, b, c

    for function in (f, g):
        try:
            expected = function(*args, **kwargs)
        except TypeError:
            with pytest.raises(TypeError):
                Signature(function).normalise(tuple(args), kwargs)
        else:
            placed, named = Signature(function).normalise(tuple(args), kwargs)
            assert function(*placed, **named) == expected


def test_functions_of_every_sort_have_a_signature() -> None:
    class Callee:
        def __call__(self, book: Book) -> Author: ...  # type: ignore[empty-body]

        def method(self, book: Book) -> Author: ...  # type: ignore[empty-body]

    def function(first: int, book: Book) -> Author: ...  # type: ignore[empty-body]

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any: ...

    for callee in (Callee(), Callee().method, functools.partial(function, 1), wrapper):
        signature = Signature(callee)
        assert Book in signature.arguments.classes
        assert Author in signature.result.classes
    assert Signature(print).arguments is ANY
    assert codec.encode_arguments(Signature(max), (1, 2), {}, "max").args == (1, 2)


def test_quoted_annotations_are_resolved_one_by_one() -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    def f(a: "Local", b: "Nowhere", c: "list[Book] | Nowhere", d: "Live[Nowhere]") -> "Invisible":  # type: ignore[name-defined]  # noqa: F821
        return Local(1)

    signature = Signature(f)
    assert set(signature.arguments.classes) >= {Local, Book}
    assert signature.live == {"d"}
    assert signature.result is ANY


# --- the decoded form


def test_a_body_gets_the_decoded_form_and_scalars_as_they_are() -> None:
    given_list = [1, (2,)]
    arguments = encode(lambda a, b: None, given_list, "x")
    assert arguments.args == ([1, (2,)], "x")
    assert arguments.args[0] is not given_list


def test_annotated_classes_come_back_in_arguments() -> None:
    def f(book: Book, *points: Point, **authors: Author) -> None: ...

    arguments = encode(f, Book("t", [Author("a")]), Point(1), Point(2), z=Author("z"))
    assert arguments.args == (Book("t", [Author("a")]), Point(1), Point(2))
    assert arguments.kwargs == {"z": Author("z")}
    assert codec.decode_arguments(Signature(f), arguments.payload) == (arguments.args, arguments.kwargs)
    with pytest.raises(NotEncodable, match=r"^f\[0\] is a Author"):
        encode(plain, Author("a"))


def test_a_live_parameter_is_handed_through_and_does_not_count() -> None:
    def f(client: Live[Client], n: int, *, other: Live[Client] | None = None, spare: Live[Client]) -> None: ...

    assert Signature(f).live == {"client", "other", "spare"}
    first, second, spare = Client(), Client(), Client()
    arguments = encode(f, first, [1], spare=spare)
    assert arguments.args == (first, [1])
    assert arguments.args[0] is first
    assert arguments.kwargs["spare"] is spare
    assert arguments.digest == encode(f, second, [1], spare=second).digest
    assert arguments.digest != encode(f, second, [2], spare=second).digest
    assert codec.decode_arguments(Signature(f), arguments.payload) == ((None, [1]), {"spare": None})


def test_live_may_take_all_the_rest() -> None:
    def f(n: int, *clients: Live[Client], **more: Live[Client]) -> None: ...

    client = Client()
    arguments = encode(f, 1, client, client, x=client)
    assert arguments.args == (1, client, client)
    assert arguments.kwargs == {"x": client}


def test_the_receiver_of_a_method_is_handed_through() -> None:
    class Service:
        def send(self, text: str, copies: list[int]) -> None: ...

    service = Service()
    signature = Signature(Service.send, is_method=True)
    arguments = codec.encode_arguments(signature, (service, "x", [1]), {}, "send")
    assert arguments.args == (service, "x", [1])
    assert arguments.payload == b'[["x",[1]]]'
    assert (
        codec.encode_arguments(signature, (Service(),), {"copies": [1], "text": "x"}, "send").digest == arguments.digest
    )
    assert codec.decode_arguments(signature, arguments.payload) == ((None, "x", [1]), {})


# --- digests


def test_a_digest_does_not_depend_on_the_order_of_keys_and_members() -> None:
    def digest(value: Any) -> str:
        return str(encode(lambda a: None, value).digest)

    assert digest({"a": 1, "b": {"c": 1, "d": 2}}) == digest({"b": {"d": 2, "c": 1}, "a": 1})
    assert digest({"a": (1,), "b": 2}) == digest({"b": 2, "a": (1,)})
    assert digest({1: 2, 3: 4}) == digest({3: 4, 1: 2})
    assert digest([{"b": {3, 1}, "a": 1}]) == digest([{"a": 1, "b": {1, 3}}])
    numbers = [n * 2**20 for n in range(40)]
    backwards = sorted(numbers, reverse=True)
    assert list(set(numbers)) != list(set(backwards))  # one set, two orders
    assert digest(set(numbers)) == digest(set(backwards))
    different = [
        1,
        1.0,
        True,
        "1",
        None,
        [],
        {},
        (),
        set(),
        frozenset(),
        b"",
        [1],
        (1,),
        {1},
        {1: 1},
        {"1": 1},
        [[1, 1]],
        Colour,
    ]
    assert len({digest(value) for value in different[:-1]}) == len(different) - 1
    assert digest([1, 2]) != digest([2, 1])
    assert digest((1, 2)) != digest((2, 1))


@given(values)
def test_a_digest_is_the_same_before_and_after_a_round_trip(value: Any) -> None:
    def f(a: Author | Book | Order | Item | Basket | Node) -> None: ...

    signature = Signature(f)
    arguments = codec.encode_arguments(signature, (value,), {}, "f")
    assert same(arguments.args, (value,))
    assert codec.encode_arguments(signature, arguments.args, {}, "f").digest == arguments.digest


def test_a_digest_does_not_depend_on_the_hash_seed() -> None:
    program = (
        "from everstep.codec import Codec, Signature\n"
        "print(Codec().encode_arguments(Signature(lambda a: 1), ({'x', 'y', 'z', ('a', 1)},), {}, 'f').digest)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1


def test_damaged_arguments_are_not_decodable() -> None:
    for payload in (b"[1]", b'[{"args":1,"kwargs":{}}]', b"[null]", b""):
        with pytest.raises(NotDecodable):
            codec.decode_arguments(Signature(plain), payload)


# --- registered classes


def test_a_registered_class_comes_back_without_an_annotation() -> None:
    @register
    @dataclasses.dataclass
    class Parcel:
        author: Author
        lines: tuple[Point, ...]

    parcel = Parcel(Author("a"), (Point(1), Point(2)))
    assert codec.decode(codec.encode({"p": [parcel, parcel]})) == {"p": [parcel, parcel]}


def test_a_registered_class_with_its_own_codec_uses_it_also_for_awkward_shapes() -> None:
    @register(encode=lambda value: value.inner, decode=lambda inner: Wrapped(inner))
    class Wrapped:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Wrapped) and self.inner == other.inner

        __hash__ = None  # type: ignore[assignment]

    for inner in (1, "x", (1, 2), [(1,)], {"a": (1,)}, {1: 2}, {(1,)}, None, b"x", Wrapped, [1, (2,)]):
        value = Wrapped(Wrapped(inner)) if inner is not Wrapped else Wrapped([Wrapped(1), Wrapped((2,))])
        assert codec.decode(codec.encode([value])) == [value]
        assert encode(lambda a: None, value).args == (value,)
    with pytest.raises(NotEncodable):
        codec.encode(Wrapped(object()))


def test_registering_what_cannot_be_known_is_misuse() -> None:
    class Opaque:
        pass

    with pytest.raises(Misuse, match="encode="):
        register(Opaque)
    with pytest.raises(Misuse, match="both"):
        register(Opaque, encode=str)
    with pytest.raises(Misuse, match="takes a class"):
        register(3)  # type: ignore[call-overload]


def test_two_classes_registered_under_one_name_are_misuse() -> None:
    first = dataclasses.make_dataclass("Twin", ["a"])
    second = dataclasses.make_dataclass("Twin", ["a"])
    first.__module__, second.__module__ = "one", "two"
    register(first)
    register(first)
    with pytest.raises(Misuse, match="Two classes named Twin"):
        register(second)


def test_a_class_registered_again_after_a_reload_takes_the_place_of_the_old_one() -> None:
    for _ in range(2):
        reloaded = register(dataclasses.make_dataclass("Reloaded", ["a"]))
        assert type(codec.decode(codec.encode(reloaded(1)))) is reloaded


def test_data_stays_readable_when_a_class_moves_between_annotation_and_registry() -> None:
    cls = dataclasses.make_dataclass("Mover", ["a"])
    before = codec.encode(cls(1), types_of(cls))
    register(cls)
    assert codec.decode(before) == cls(1)
    assert codec.encode(cls(1)) == b'[{"a":1},"!Mover"]'


def test_the_codec_needs_neither_pydantic_nor_pathlib_at_import() -> None:
    program = "import sys, everstep.codec; print({'pydantic', 'pathlib'} & set(sys.modules))"
    # Without `site`, whose .pth files import modules of their own.
    program = f"import sys; sys.path[:] = {sys.path!r}; {program}"
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "set()"
