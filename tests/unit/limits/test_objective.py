"""Objectives: values of the headers, and the defaults of a tenant."""

from typing import Any

import pytest

from eldr_serve.errors import BadRequestError
from eldr_serve.limits.keys import Keys, KeysError, Limits, add_key
from eldr_serve.limits.tenants import Tenant
from eldr_serve.objective import MAX_MS, TPOT_HEADER, TTFT_HEADER, Objective, objective_of


@pytest.mark.parametrize("value", ["500", "500.0", "0500"])
def test_a_header_sets_the_objective_in_milliseconds(value: str) -> None:
    assert objective_of({TTFT_HEADER: value}, Objective()) == Objective(ttft_s=0.5)
    assert objective_of({TPOT_HEADER: value}, Objective()) == Objective(tpot_s=0.5)


def test_a_header_replaces_only_its_own_default() -> None:
    default = Objective(1.0, 0.05)
    assert objective_of({}, default) is default
    assert objective_of({TTFT_HEADER: "250"}, default) == Objective(0.25, 0.05)
    assert not objective_of({}, Objective())


@pytest.mark.parametrize(
    "value",
    [
        "",
        "0",
        "0.0",
        "-1",
        "+1",
        "1e3",
        "inf",
        "nan",
        "1_000",
        "1,5",
        " 5",
        "5 ms",
        "٣",
        "3600001",
        "9" * 400,
    ],
)
def test_another_value_is_refused_with_one_sentence(value: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        objective_of({TTFT_HEADER: value}, Objective(1.0))
    assert caught.value.status == 400
    assert caught.value.param == TTFT_HEADER
    message = str(caught.value)
    assert message.startswith(f"the header {TTFT_HEADER} is {value[:40]!r}: send a number of milliseconds")
    assert len(message) < 200


def test_the_keys_file_sets_a_tenants_default() -> None:
    keys = add_key(Keys(), "a", "key", {"ttft_ms": 800})
    keys = add_key(keys, "a", "other", {"tpot_ms": 40})
    keys = Keys.model_validate_json(keys.model_dump_json(exclude_none=True))
    tenant = Tenant("a", keys.tenants["a"])
    assert tenant.objective == Objective(0.8, 0.04)
    tenant.set_limits(Limits())
    assert tenant.objective == Objective()


@pytest.mark.parametrize("wrong", [0, -1, MAX_MS + 1, "soon"])
def test_a_wrong_default_is_refused(wrong: Any) -> None:
    with pytest.raises(KeysError, match="ttft_ms"):
        add_key(Keys(), "a", "key", {"ttft_ms": wrong})
