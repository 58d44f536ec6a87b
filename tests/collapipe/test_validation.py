"""Errors about invalid values name the place, the rule and the value."""

from dataclasses import dataclass

import pytest
from pydantic import TypeAdapter, ValidationError

from collapipe.validation import fault_of


@dataclass
class Stage:
    rows: int


STAGES = TypeAdapter(list[Stage])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"rows": 1}, {"rows": "x"}]', "[1].rows: must be a whole number, not 'x'"),
        ("[{}]", "[0].rows is missing"),
        ('[{"rows": []}]', "[0].rows: must be a whole number"),
        ('["secret"]', "[0]: must be keys with values, not 'secret'"),
        ('"secret"', "must be a list, [A, B]"),
    ],
)
def test_a_fault_names_its_place_and_a_plain_value(text: str, message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        STAGES.validate_json(text)
    assert fault_of(refused.value) == message


def test_the_fault_of_invalid_json_does_not_quote_the_file() -> None:
    with pytest.raises(ValidationError) as refused:
        STAGES.validate_json('[{"rows": 1}, secret')
    assert fault_of(refused.value).startswith("Invalid JSON: ")
    assert "secret" not in fault_of(refused.value)
