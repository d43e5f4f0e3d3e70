"""The ingress answers like a plain vLLM server: every field, tokens, usage, invalid fields, health.

`make like-vllm` writes the results of the fields to docs/tables/like_vllm.md.
"""

import json
import os
import socket
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from benchmarks.lib.engines import start_process, wait_http
from benchmarks.lib.ports import free_port
from tests.e2e.service import ENGINE_ENV, HTTP, Demo, Service
from tests.support.vllm_answers import Server
from tests.support.vllm_cases import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    MODEL,
    REFUSED,
    REFUSED_GENERATION,
    TOKENIZE,
    TOKENIZED,
)
from tests.support.vllm_fields import ALONE, STREAMING, TRIED
from tests.support.vllm_table import FieldTable, try_field

IN_FLIGHT = 4  # requests to each server


@pytest.fixture(scope="module")
def plain(demo: Demo, service: Service) -> Iterator[str]:
    """Run a plain vLLM server with the demo's model, without connector and router."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--model",
        str(demo.out / "model_64"),
        "--served-model-name",
        MODEL,
        "--dtype",
        "float32",
        "--max-model-len",
        "2048",
        "--max-num-seqs",
        "64",
        "--max-num-batched-tokens",
        "2048",
        "--block-size",
        "32",
        "--enforce-eager",
    ]
    url, log = f"http://127.0.0.1:{port}", demo.out / "plain_vllm.txt"
    # Otherwise the first request for log-probabilities waits for a compilation.
    environment = ENGINE_ENV | {"TORCHDYNAMO_DISABLE": "1"}
    with start_process(command, env=environment, log=log) as server:
        wait_http(f"{url}/health", server, log, 180)
        yield url


def both(service: Service, plain: str, method: str, path: str, body: Any = None) -> list[httpx.Response]:
    """Return the answers of the ingress and of the plain server."""
    return [HTTP.request(method, f"{url}{path}", json=body) for url in (service.url, plain)]


@pytest.mark.parametrize("fields", TOKENIZED)
def test_tokens_of_prompts_and_chats_equal_vllms(
    service: Service, plain: str, fields: dict[str, Any]
) -> None:
    ours, theirs = both(service, plain, "POST", TOKENIZE, {"model": MODEL} | fields)
    assert theirs.status_code == 200, theirs.text
    assert (ours.status_code, ours.json()) == (200, theirs.json())
    tokens = {"model": MODEL, "tokens": ours.json()["tokens"]}
    back = [answer.json() for answer in both(service, plain, "POST", DETOKENIZE, tokens)]
    assert back[0] == back[1]
    assert back[0]["prompt"] or not tokens["tokens"]


@pytest.mark.parametrize(("path", "fields"), [*REFUSED, *REFUSED_GENERATION])
def test_an_error_has_vllms_status_and_field(
    service: Service, plain: str, path: str, fields: dict[str, Any]
) -> None:
    ours, theirs = both(service, plain, "POST", path, {"model": MODEL} | fields)
    errors = [(answer.status_code, answer.json()["error"]["param"]) for answer in (ours, theirs)]
    assert errors[0] == errors[1], theirs.text
    assert ours.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_usage_of_a_chat_equals_vllms(service: Service, plain: str, stream: bool) -> None:
    content = f"{uuid.uuid4().hex} " * 30
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 3,
        "temperature": 0,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    for _ in range(2):  # the second time much of the prompt is cached
        ours, theirs = (_usage(answer) for answer in both(service, plain, "POST", CHAT, body))
        assert ours == theirs


def _usage(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == "application/json":
        return dict(answer.json()["usage"])
    events = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return dict(json.loads(events[-1].removeprefix("data: "))["usage"])


@pytest.fixture(scope="module")
def table() -> Iterator[FieldTable]:
    """Provide the table of fields, and write it to the file in ELDR_LIKE_VLLM if that is set."""
    fields = FieldTable()
    yield fields
    if file := os.environ.get("ELDR_LIKE_VLLM"):
        fields.publish(Path(file))


@pytest.mark.parametrize(
    ("path", "stream"),
    [(path, stream) for path in TRIED for stream in (False, True) if path in STREAMING or not stream],
)
def test_each_field_gets_vllms_answer(
    service: Service, plain: str, table: FieldTable, path: str, stream: bool
) -> None:
    servers = Server(service.url, HTTP), Server(plain, HTTP)
    together = [field for field in TRIED[path] if field not in ALONE]

    def try_one(field: str) -> None:
        table.add(path, field, stream, try_field(servers, path, field, stream))

    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(try_one, together))
    # A batch changes low bits of log-probabilities, and so perhaps which of two likely tokens is chosen.
    for field in [*(TRIED[path].keys() & ALONE), *table.surprises(path, stream)]:
        try_one(field)
    assert not table.surprises(path, stream)


def test_anthropics_client_understands_a_refusal(service: Service) -> None:
    client = anthropic.Anthropic(base_url=service.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.NotFoundError, match="there is no model"):
        client.messages.create(model="other", max_tokens=8, messages=[{"role": "user", "content": "hi"}])


def test_health_and_version_equal_vllms(service: Service, plain: str) -> None:
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/version")):
        ours, theirs = both(service, plain, method, path)
        assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content) != (404, b"")
    ours, theirs = both(service, plain, "GET", "/metrics")
    assert ours.headers["content-type"] == theirs.headers["content-type"]
    ours, theirs = both(service, plain, "GET", "/v1/models")
    assert isinstance(ours.json()["data"][0]["created"], int)


@pytest.mark.parametrize("path", [TOKENIZE, CHAT, "/v1/models", "/health"])
def test_a_405_lists_the_allowed_methods_like_vllm(service: Service, plain: str, path: str) -> None:
    ours, theirs = both(service, plain, "DELETE", path)
    assert ours.status_code == theirs.status_code == 405
    assert set(theirs.headers["allow"].split(", ")) <= set(ours.headers["allow"].split(", "))


def test_a_stream_to_a_client_of_http_1_0_is_not_chunked(service: Service) -> None:
    body = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 3, "stream": True}).encode()
    address = httpx.URL(service.url)
    with closing(socket.create_connection((address.host, address.port or 80), timeout=60)) as client:
        head = f"POST {COMPLETIONS} HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    told, _, events = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in told.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")
