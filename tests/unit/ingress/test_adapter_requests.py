"""Requests that name a LoRA adapter as their model."""

from typing import Any

import numpy as np
import pytest

from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.request import Request, RequestFields, prompt_key
from tests.support.fake_router import FakeActor
from tests.support.ingress_app import CHAT, COMPLETIONS, HELLO, running_app

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_the_model_and_its_adapters_are_listed() -> None:
    async with running_app(adapters=("sql", "law")) as app:
        models = (await app.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["m", "sql", "law"]
        assert (await app.client.get("/v1/models/law")).json() == models[2]
        assert (await app.client.get("/v1/models/other")).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, HELLO),
        (CHAT, {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_a_request_is_placed_with_the_adapter_that_it_names(path: str, body: dict[str, Any]) -> None:
    actor = FakeActor()
    async with running_app(actor=actor, adapters=("sql",)) as app:
        for name, status in (("sql", 200), ("m", 200), ("m:sql", 404)):
            assert (await app.post(path, body | {"model": name})).status_code == status
    assert [request.adapter for request in actor.requests] == ["sql", ""]
    assert len({request.prompt_key for request in actor.requests}) == 2


def context(adapter: str, salt: str | None = None) -> RequestContext:
    fields = RequestFields(prompt="hi", cache_salt=salt)
    return RequestContext(Request(method="completions", body=b"", fields=fields, adapter=adapter))


def test_prompts_of_different_adapters_share_nothing() -> None:
    ids = np.arange(9, dtype=np.uint32)
    blocks = [context(*names).blocks(ids, 4) for names in (("",), ("a",), ("b",), ("a", "salt"), ("", "a"))]
    assert len({tuple(prompt.hashes.tolist()) for prompt in blocks}) == len(blocks)
    assert [prompt.exact for prompt in blocks] == [True, False, False, False, True]
    assert len({prompt_key(RequestFields(prompt="hi"), name) for name in ("", "a", "b")}) == 3


def test_the_predictor_of_the_base_model_reads_no_prompt_of_an_adapter() -> None:
    for adapter in ("", "a"):
        request = context(adapter)
        request.tokenised_ids = np.arange(3, dtype=np.uint32)
        assert (request.predictable_ids is None) is bool(adapter)
