"""The plan of a comparison and what of it is done: a folder that a stopped run goes on from.

`plan.json` holds the settings and the order of the blocks; each finished block is one file, written
whole. A folder belongs to one plan: another one is refused.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eldr_serve.files import write_whole
from loadgen.block import Block
from offline.cli import BadInput

SCHEMA = "eldr-compare/3"


@dataclass(frozen=True)
class Step:
    """One block to run."""

    number: int
    round: int
    policy: str
    seed: int  # the same for all policies of a round, which so meet the same requests


def order(policies: list[str], rounds: int, seed: int) -> list[Step]:
    """Randomised blocks: each round has every policy once, in an order of its own."""
    rng = random.Random(f"{seed}/order")
    steps: list[Step] = []
    for number in range(rounds):
        for policy in rng.sample(policies, len(policies)):
            steps.append(Step(len(steps), number, policy, 1000 * seed + number))
    return steps


class Folder:
    """The folder of one comparison.

    Args:
        settings: everything that the figures depend on, JSON-able.

    Raises:
        BadInput: it belongs to other settings or to another version.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self._plan_file = path / "plan.json"
        self._plan: dict[str, Any] = {"schema": SCHEMA, "settings": settings, "restore": None}
        if self._plan_file.exists():
            found = _read(self._plan_file)
            different = [k for k, v in settings.items() if found.get("settings", {}).get(k) != v]
            if different:
                raise BadInput(
                    f"{path} holds a comparison with another {', '.join(different)}: "
                    "give the same settings or another --out"
                )
            self._plan = found
        elif path.exists() and any(path.iterdir()):
            raise BadInput(f"{path} is not empty and holds no comparison: give another --out")

    @property
    def restore(self) -> dict[str, Any] | None:
        """The policy that a killed run found and could not set back; None if none was killed."""
        found: dict[str, Any] | None = self._plan["restore"]
        return found

    def note(self, restore: dict[str, Any]) -> None:
        """Write the plan, with the policy to set back."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._write(restore)

    def restored(self) -> None:
        """The server has its own policy again."""
        if self._plan_file.exists():
            self._write(None)

    def _write(self, restore: dict[str, Any] | None) -> None:
        self._plan["restore"] = restore
        write_whole(self._plan_file, json.dumps(self._plan, indent=1) + "\n")

    def load(self, step: Step) -> Block | None:
        """The block, if it was finished."""
        file = self._file(step)
        return _block(file) if file.exists() else None

    def save(self, block: Block, step: Step) -> None:
        """Keep a finished block."""
        content = {"schema": SCHEMA, "block": block.to_json()}
        write_whole(self._file(step), json.dumps(content) + "\n")

    def _file(self, step: Step) -> Path:
        policy = "".join(c if c.isalnum() or c in "-.=" else "_" for c in step.policy)
        return self.path / f"block_{step.number:03d}_{policy}.json"


def read_blocks(path: Path) -> list[Block]:
    """The finished blocks of the comparison in a folder, in their order.

    Raises:
        BadInput: one of them cannot be read.
    """
    return [_block(file) for file in sorted(path.glob("block_*.json"))]


def _block(file: Path) -> Block:
    found = _read(file)
    try:
        return Block(**found["block"])
    except (KeyError, TypeError) as error:
        raise BadInput(f"{file} is no block of a comparison ({error})") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise BadInput(f"{path} is of schema {schema!r}, this version reads {SCHEMA!r}")
    return dict(found)
