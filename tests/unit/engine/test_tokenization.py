"""Ingress and engine tokenise like vLLM's own server, for the demo model.

vLLM's server runs without an engine here. `tests/e2e/test_like_vllm.py` uses a complete one.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.render.app_state import init_render_app_state
from vllm.utils.argparse_utils import FlexibleArgumentParser

from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.vllm.engine import VllmEngine
from examples.demo_model import WEIGHTS
from tests.support.fake_fleet import Sent
from tests.support.ingress_app import running_app
from tests.support.vllm_cases import DETOKENIZE, MODEL, REFUSED, TOKENIZE, TOKENIZED


@pytest.fixture(scope="module")
def plain() -> Iterator[Any]:
    """Provide vLLM's application, which changes the level of the root logger."""
    level = logging.getLogger().level
    arguments = ["--model", str(WEIGHTS), "--served-model-name", MODEL, "--max-model-len", "2048"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    app = build_app(args, ("render",))
    config = VllmConfig(model_config=AsyncEngineArgs.from_cli_args(args).create_model_config())
    asyncio.run(init_render_app_state(config, app.state, args))
    yield app
    logging.getLogger().setLevel(level)


async def answers(plain: Any, path: str, fields: dict[str, Any]) -> list[httpx.Response]:
    """Return the answers of the ingress with our engine, and of vLLM."""
    engine = VllmEngine(SimpleNamespace(engine=SimpleNamespace(_app_state=plain.state)), MODEL)

    async def answered(sent: Sent) -> AsyncIterator[Any]:
        parts: list[bytes] = []
        request = EngineRequest(body=sent.body, **sent.header)
        await engine.serve_endpoint(request, lambda payload, tokens, ids=b"": parts.append(payload))
        for part in parts:
            yield part, 0

    body = {"model": MODEL} | fields
    async with running_app(decode=answered, model_id=MODEL, validated=False) as app:
        ours = await app.post(path, body)
    transport = httpx.ASGITransport(plain)
    async with httpx.AsyncClient(transport=transport, base_url="http://plain") as client:
        headers = {"content-type": "application/json"}
        return [ours, await client.post(path, content=json.dumps(body), headers=headers)]


@pytest.mark.parametrize("fields", TOKENIZED)
async def test_tokens_of_prompts_and_chats_equal_vllms(plain: Any, fields: dict[str, Any]) -> None:
    ours, theirs = await answers(plain, TOKENIZE, fields)
    assert theirs.status_code == 200, theirs.text
    assert (ours.status_code, ours.json()) == (200, theirs.json())
    tokens = {"tokens": ours.json()["tokens"]}
    ours, theirs = await answers(plain, DETOKENIZE, tokens)
    assert ours.json() == theirs.json()
    assert ours.json()["prompt"] or not tokens["tokens"]


@pytest.mark.parametrize(("path", "fields"), REFUSED)
async def test_a_refusal_has_vllms_status_and_names_the_field_that_vllm_names(
    plain: Any, path: str, fields: dict[str, Any]
) -> None:
    ours, theirs = await answers(plain, path, fields)
    errors = [(answer.status_code, answer.json()["error"]["param"]) for answer in (ours, theirs)]
    assert errors[0] == errors[1], theirs.text
    assert ours.json()["error"]["message"]
