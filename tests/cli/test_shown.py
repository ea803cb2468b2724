"""What is stored is shown as one expects it, without the classes of the user's code."""

import datetime as dt
import json
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from everstep.cli.terminal import json_text
from everstep.codec import Codec
from everstep.view.plain import payload_json, shown


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (10**30, 10**30),
        (-(10**30), -(10**30)),
        ({"a": [10**25, 1]}, {"a": [10**25, 1]}),
        ([10**25, 10**26], [10**25, 10**26]),
        ((1, 10**25), [1, 10**25]),
        (dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "2026-01-02T00:00:00+00:00"),
        (dt.datetime(2026, 1, 2, tzinfo=ZoneInfo("Europe/Berlin")), "2026-01-02T00:00:00+01:00"),
        ({"at": dt.date(2026, 1, 2)}, {"at": "2026-01-02"}),
        (dt.timedelta(hours=1), "PT3600S"),
        ({1: 2, "a": 3}, {"1": 2, "a": 3}),
        ({1: 10**25}, {"1": 10**25}),
        ({1: 2, "1": 3}, [[1, 2], ["1", 3]]),
        ("a\ud800", "a\\ud800"),
        (b"abc", "YWJj"),
        ({"nan": float("nan"), "plain": "x"}, {"nan": "nan", "plain": "x"}),
    ],
)
def test_a_payload_is_shown_as_plain_data(value: Any, expected: Any) -> None:
    assert shown(Codec().encode(value)) == expected


@pytest.mark.parametrize("payload", [b'["zz","int"]', b'[1,{"0":"int"}]', b'[[1],{"7":"int"}]', b'[[1],["dict",{}]]'])
def test_what_does_not_fit_its_types_is_shown_as_it_is_stored(payload: bytes) -> None:
    assert shown(payload) == json.loads(payload)[0]


@pytest.mark.parametrize("indent", [2, -1])
def test_a_number_of_more_than_64_bits_is_printed_as_that_number(indent: int) -> None:
    text = json_text({"big": payload_json(Codec().encode(10**30)), "said": "\u202e é"}, indent=indent)
    assert json.loads(text) == {"big": 10**30, "said": "\u202e é"}
    assert "\u202e" not in text
