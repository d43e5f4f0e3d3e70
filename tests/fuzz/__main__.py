"""Send hostile requests to a running service and check its state afterwards.

    python -m tests.fuzz --url http://127.0.0.1:8000 --cases 10000 --seed 0 --admin-key KEY

Requests are written by hand, mutated from valid ones (hypothesis) and generated from the service's
OpenAPI document (schemathesis). No answer may be late or a 5xx other than 503. Afterwards no request may be
in flight, no lease or KV block be held, and a valid request must be answered. Use a service with a small
`max_model_len`, so that no valid answer takes long, and without other users: with the admin key, policies are
changed too.
"""

import asyncio
import base64
import json
import random
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer
from rich.console import Console

from eldr_serve.commands.client import OperatorClient, ServiceError
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from loadgen.held_resources import settle
from loadgen.progress import progress_bar
from tests.fuzz.cases import FuzzCase, by_hand, known_cases
from tests.fuzz.connections import occupy, slow_request
from tests.fuzz.generated_cases import from_openapi, mutations

_SLOW_TOKENS = 1000
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_STREAMED_ERROR = re.compile(rb'data: (\{"error".*\})')


@dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Attributes:
        status: HTTP status; 0 if the connection ended without an answer.
        problem: what the service did wrong; None if nothing.
    """

    case: FuzzCase
    status: int
    seconds: float
    problem: str | None

    @property
    def line(self) -> str:
        """Return the case as a JSON line with everything needed to send it again."""
        raw = base64.b64encode(self.case.raw).decode()
        outcome = {"problem": self.problem, "status": self.status, "seconds": round(self.seconds, 3)}
        return json.dumps(outcome | {"label": self.case.label, "complete": self.case.complete, "raw": raw})


async def send(case: FuzzCase, host: str, port: int, limit_s: float) -> Outcome:
    """Send one case on its own connection and check the answer."""
    start = time.perf_counter()
    answer = bytearray()
    is_late = False
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(case.raw)
                if not case.complete:
                    writer.write_eof()
                while part := await reader.read(2**16):
                    answer += part
            finally:
                writer.close()
    except TimeoutError:
        is_late = True
    except OSError:
        pass  # the server closes early, for example if a body is too large
    status_line = _STATUS.match(answer)
    status = int(status_line.group(1)) if status_line else 0
    problem = _find_problem(case, status, bytes(answer), is_late, limit_s)
    return Outcome(case, status, time.perf_counter() - start, problem)


def _find_problem(case: FuzzCase, status: int, answer: bytes, is_late: bool, limit_s: float) -> str | None:
    """Return what is wrong with an answer; None if nothing."""
    if is_late and (case.complete or status):
        return f"the answer did not end within {limit_s:g} s"
    if status >= 500 and status != 503:
        return f"status {status}"
    if not status and case.complete:
        return "no answer"
    for event in _STREAMED_ERROR.findall(answer):
        code = json.loads(event)["error"].get("code")
        if isinstance(code, int) and code >= 500 and code != 503:
            return f"status {code} in a stream"
    return None


async def send_all(
    cases: list[FuzzCase], host: str, port: int, *, in_flight: int, limit_s: float
) -> list[Outcome]:
    """Send all cases, `in_flight` at a time, and print a line for each violation."""
    outcomes: list[Outcome] = []
    pending = iter(cases)
    console = Console(stderr=True)
    with progress_bar() as progress:
        task = progress.add_task("hostile requests", total=len(cases))

        async def send_in_turn() -> None:
            for case in pending:
                outcome = await send(case, host, port, limit_s)
                outcomes.append(outcome)
                progress.advance(task)
                if outcome.problem:
                    beginning = case.raw.partition(b"\r\n\r\n")[2][:100]
                    console.print(
                        f"{outcome.problem}: {case.label} {beginning!r}", markup=False, soft_wrap=True
                    )

        await asyncio.gather(*(send_in_turn() for _ in range(in_flight)))
    return outcomes


def corpus(url: str, model: str, count: int, seed: int, admin_key: str | None) -> list[FuzzCase]:
    """Return `count` cases: those that once broke the service, and others.

    A fifth of the others is generated from the service's OpenAPI document, up to two fifths are written by
    hand, and the rest are mutations of valid requests.
    """
    document = httpx.get(f"{url}/openapi.json", timeout=30).raise_for_status().json()
    return _corpus(document, model, count, seed, admin_key)


def _corpus(
    document: dict[str, Any], model: str, count: int, seed: int, admin_key: str | None
) -> list[FuzzCase]:
    cases = known_cases(model)[:count]
    share = (count - len(cases)) // 5  # generating cases from the document is slow
    handwritten = by_hand(model, admin_key)
    cases += random.Random(seed).sample(handwritten, min(len(handwritten), 2 * share))
    cases += from_openapi(document, model, admin_key, share, seed)
    return cases + mutations(model, count - len(cases), seed)


def _read(path: Path) -> list[FuzzCase]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return [FuzzCase(line["label"], base64.b64decode(line["raw"]), line["complete"]) for line in lines]


def hostile(
    url: Annotated[str, typer.Option(help="URL of the service.")] = "http://127.0.0.1:8000",
    cases: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the generated cases.")] = 0,
    model: Annotated[str | None, typer.Option(help="Model id; the first one served by default.")] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="ELDR_ADMIN_KEY", help="Also send policy changes with this key.")
    ] = None,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 8,
    limit_s: Annotated[float, typer.Option(min=0.1, help="Maximum time of an answer, s.")] = 5.0,
    idle: Annotated[int, typer.Option(min=0, help="Idle connections to hold meanwhile.")] = 0,
    slow: Annotated[int, typer.Option(min=0, help="Unread streams to hold meanwhile.")] = 0,
    replay: Annotated[Path | None, typer.Option(help="Send the requests of this file instead.")] = None,
    out: Annotated[Path, typer.Option(help="JSON-lines file of the violations.")] = Path("out/hostile.jsonl"),
) -> None:
    """Send hostile requests. The exit status is 1 if one breaks the service, and 2 for bad input."""
    url = url.rstrip("/")
    address = urlsplit(url)
    if address.scheme != "http" or not address.hostname:
        raise UserInputError(f"{url} is not an http URL")
    try:
        served = model or OperatorClient(url, timeout_s=30).model()
        with Console(stderr=True).status(f"generating {cases} requests; thousands take minutes"):
            todo = _read(replay) if replay else corpus(url, served, cases, seed, admin_key)
        host_and_port = address.hostname, address.port or 80

        async def send_while_occupied() -> list[Outcome]:
            async with occupy(
                *host_and_port, idle=idle, slow=slow, request=slow_request(served, _SLOW_TOKENS)
            ):
                return await send_all(todo, *host_and_port, in_flight=in_flight, limit_s=limit_s)

        outcomes = asyncio.run(send_while_occupied())
        problems = settle(url, served, admin_key)
    except (httpx.HTTPError, ServiceError) as error:
        raise UserInputError(f"{url} does not answer as eldr-serve: {error}") from error
    violations = [outcome for outcome in outcomes if outcome.problem]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(f"{outcome.line}\n" for outcome in violations))
    statuses = ", ".join(
        f"{n} x {status or 'closed'}" for status, n in sorted(Counter(o.status for o in outcomes).items())
    )
    slowest = max(outcomes, key=lambda outcome: outcome.seconds)
    print(f"{len(outcomes)} requests: {statuses}; slowest {slowest.seconds:.2f} s ({slowest.case.label})")
    for problem in problems:
        print(problem)
    print(f"{len(violations)} violations" + (f"; resend them with --replay {out}" if violations else ""))
    if violations or problems:
        raise typer.Exit(1)


if __name__ == "__main__":
    run(hostile)
