"""Error sentences name the field, the condition, the value and the remedy."""

from typing import Any, Self

import pytest
from pydantic import BaseModel, ValidationError, model_validator

from eldr_serve.validation import first_problem, invalid_value


@pytest.mark.parametrize(
    ("value", "problem", "sentence"),
    [
        ("0", "must be at least 1", "port must be at least 1, got 0"),
        ("-5", "must be -1 or a positive integer.", "port must be -1 or a positive integer, got -5"),
        ("5", "must be text: put it in quotes", "port must be text, got 5: put it in quotes"),
        ("", "must be text: put it in quotes", "port must be text: put it in quotes"),
        ("'al'", "unknown, did you mean 'all'?", "port is 'al': unknown, did you mean 'all'?"),
        ("", "give a or b", "port: give a or b"),
    ],
)
def test_a_sentence_has_the_value_between_condition_and_remedy(
    value: str, problem: str, sentence: str
) -> None:
    assert invalid_value("port", value, problem) == sentence


class _Range(BaseModel):
    low: int
    high: int
    shows_value: bool = False

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.low >= self.high:
            raise ValueError("low must be below high" + (f", got {self.low}" if self.shows_value else ""))
        return self


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"low": 3, "high": 1}, "range.low must be below high, got 3"),
        ({"low": 3, "high": 1, "shows_value": True}, "range: low must be below high, got 3"),
        ({"low": 0, "high": "x"}, "range.high must be a whole number, got 'x'"),
        ({"low": 0, "high": []}, "range.high must be a whole number, got a list"),
    ],
)
def test_a_validators_sentence_has_the_value_once(content: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as refused:
        _Range(**content)
    assert first_problem(refused.value, content, where="range", model=_Range) == sentence
