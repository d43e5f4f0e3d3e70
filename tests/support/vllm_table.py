"""The table of request fields: where the service's answers equal those of a plain vLLM server."""

from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loadgen.results import column_notes, publish
from tests.support.vllm_answers import RANDOM, Refusal, Server, differences
from tests.support.vllm_cases import MODEL
from tests.support.vllm_fields import (
    CONSTRAINING,
    DIFFERENT,
    NOT_TRIED,
    STREAMING,
    TRIED,
    is_different,
    requests_of,
)

NOTES = column_notes(
    "Ids, times and the fingerprint of the engine's configuration are not compared. Log-probabilities are "
    "compared to 0.001, and a stream's events are joined. Numbers of tokens are not compared if the field "
    "constrains the text.",
    {
        "unstreamed, streamed": "`equal` if all answers of the field equal those of a plain vLLM server with "
        "the same model; `refused` if both servers refuse all requests with the same status and field; "
        "`equal or refused` if they refuse only some.",
        "note": "What the service does otherwise, or why the field was not tried.",
    },
)


def try_field(servers: tuple[Server, Server], path: str, name: str, stream: bool) -> str:
    """Send the field's requests to both servers. Return `equal`, `refused`, or where answers differ."""
    ignored = RANDOM - {"id"} if name == "request_id" else RANDOM
    if name in CONSTRAINING:
        ignored = ignored | {"usage"}
    outcomes: dict[str, None] = {}
    for body in requests_of(path, name, stream):
        ours, theirs = (server.ask(path, body, ignored) for server in servers)
        if isinstance(ours, Refusal) and ours == theirs:
            outcomes["refused"] = None
        elif isinstance(ours, Refusal) or isinstance(theirs, Refusal):
            outcomes[f"{_shown(ours)} instead of {_shown(theirs)}"] = None
        else:
            outcomes["; ".join(differences(ours, theirs)[:3]) or "equal"] = None
    return " or ".join(sorted(outcomes))


def _shown(answer: Any) -> str:
    return str(answer) if isinstance(answer, Refusal) else "an answer"


@dataclass
class FieldTable:
    """The outcome of each tried field, and the reason why each other field is not tried."""

    outcomes: dict[tuple[str, str, bool], str] = field(default_factory=dict)

    def add(self, path: str, name: str, stream: bool, outcome: str) -> None:
        """Store the outcome that `try_field` returned."""
        self.outcomes[path, name, stream] = outcome

    def surprises(self, path: str, stream: bool) -> dict[str, str]:
        """Return the outcomes of fields whose answers differ, or should by the documented differences."""
        return {
            name: outcome
            for (tried, name, streamed), outcome in self.outcomes.items()
            if (tried, streamed) == (path, stream) and is_alike(outcome) == is_different(path, name, stream)
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each field, by endpoint."""
        rows = []
        for path, fields in TRIED.items():
            rows += [
                {
                    "endpoint": path,
                    "field": name,
                    "requests": len(requests_of(path, name, stream=False)),
                    "unstreamed": self._shown(path, name, stream=False),
                    "streamed": self._shown(path, name, stream=True) if path in STREAMING else None,
                    "note": DIFFERENT.get((path, name)),
                }
                for name in sorted(fields)
            ]
            rows += [
                {
                    "endpoint": path,
                    "field": name,
                    "requests": 0,
                    "unstreamed": None,
                    "streamed": None,
                    "note": reason,
                }
                for name, reason in sorted(NOT_TRIED.get(path, {}).items())
            ]
        return rows

    def _shown(self, path: str, name: str, *, stream: bool) -> str:
        outcome = self.outcomes.get((path, name, stream), "not tried")
        return "differs" if is_different(path, name, stream) and not is_alike(outcome) else outcome

    def publish(self, out: Path) -> None:
        """Write the rows with the versions of the vendors' clients."""
        clients = {name: version(name) for name in ("openai", "anthropic")}
        inputs = {"model": MODEL, "clients": clients}
        publish("like_vllm", self.rows(), inputs=inputs, seed=0, notes=NOTES, out=out)


def is_alike(outcome: str) -> bool:
    """Return whether all answers of a field are equal, or refused by both servers."""
    return set(outcome.split(" or ")) <= {"equal", "refused"}
