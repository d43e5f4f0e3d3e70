"""The ingress answers like a plain vLLM server: tokens, usage, invalid fields, health."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from conftest import ENGINE_ENV
from service import ROOT, Demo, Service, wait_for
from vllm_cases import CHAT, COMPLETIONS, DETOKENIZE, MODEL, REFUSED, REFUSED_GENERATION, TOKENIZE, TOKENIZED

from benchmarks.lib.replay_engine import free_port


@pytest.fixture(scope="module")
def plain(demo: Demo, service: Service) -> Iterator[str]:
    """Run a plain vLLM server with the demo's model, without connector and router."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1",
        "--port", str(port), "--model", str(demo.out / "model_64"), "--served-model-name", MODEL,
        "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "64",
        "--max-num-batched-tokens", "2048", "--block-size", "32", "--enforce-eager",
    ]  # fmt: skip
    said = demo.out / "plain_vllm.txt"
    with said.open("w") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | ENGINE_ENV
        )
    url = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        assert server.poll() is None, said.read_text()[-3000:]
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(healthy, "the plain server is up", 180)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def both(service: Service, plain: str, method: str, path: str, body: Any = None) -> list[httpx.Response]:
    """Return the answers of the ingress and of the plain server."""
    return [httpx.request(method, f"{url}{path}", json=body, timeout=60) for url in (service.url, plain)]


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
    found = [(answer.status_code, answer.json()["error"]["param"]) for answer in (ours, theirs)]
    assert found[0] == found[1], theirs.text
    assert ours.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_usage_of_a_chat_equals_vllms(service: Service, plain: str, stream: bool) -> None:
    content = f"{uuid.uuid4().hex} " * 30
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 3,
            "temperature": 0, "stream": stream}  # fmt: skip
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
