"""A journal keeps the measurements of one run."""

from pathlib import Path

import pytest

from eldr_serve.errors import UserInputError
from loadgen.journal import Journal


def test_a_journal_belongs_to_one_run(tmp_path: Path) -> None:
    path = tmp_path / "made" / "run.jsonl"
    Journal(path, {"seed": 0}).put("a", [1.5])
    with path.open("a") as file:
        file.write('\n["b", [2')  # the run was killed during a write
    again = Journal(path, {"seed": 0})
    assert (again.get("a"), again.get("b")) == ([1.5], None)
    again.put("b", [2.5])
    assert Journal(path, {"seed": 0}).get("b") == [2.5]
    with pytest.raises(UserInputError, match=r"different settings \(seed\)"):
        Journal(path, {"seed": 1})
    assert Journal(path, {"seed": 1}, varying=("seed",)).get("a") == [1.5]
    with pytest.raises(UserInputError, match=r"different settings \(rounds\)"):
        Journal(path, {"seed": 1, "rounds": 2}, varying=("seed",))
    path.with_name("old").write_text('{"seed": 0}\n["a", 1]\n')
    with pytest.raises(UserInputError, match="not a journal"):
        Journal(path.with_name("old"), {"seed": 0})
    again.remove()
    assert not path.exists()
