"""Hostile requests from a seed: mutations of valid ones (hypothesis), and from OpenAPI (schemathesis)."""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from typing import Any
from urllib.parse import urlsplit

try:
    import requests
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st
    from hypothesis.errors import Unsatisfiable
    from schemathesis import GenerationMode
    from schemathesis.core.result import Ok
except ImportError as error:
    raise SystemExit(f"hostile requests need the packages of eldr-serve[dev]: {error}") from None

from tests.fuzz.cases import CHAT, COMPLETIONS, FuzzCase, case, chat, completion, tables_for


def _collect(strategy: st.SearchStrategy[Any], count: int, number: int) -> list[Any]:
    """Return `count` examples of the strategy. The same number gives the same examples."""
    examples: list[Any] = []
    if count < 1:
        return examples

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def take(example: Any) -> None:
        examples.append(example)

    with suppress(Unsatisfiable):  # nothing can be invalid, for example in a call without parameters
        take()
    return examples[:count]


_SCALARS = st.one_of(
    st.sampled_from(tables_for("m")["odd"]),
    st.none(),
    st.booleans(),
    st.integers(-200, 200),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=20),
    st.text("\ud800\udfff\x00\u2028ab{}", max_size=8),
)
_KEYS = ["type", "role", "content", "text", "name", "function", "parameters", "json_schema", "schema"]
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6) | st.sampled_from(_KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)


def mutations(model: str, count: int, number: int) -> list[FuzzCase]:
    """Return valid bodies with some fields, parts or bytes replaced."""
    bodies = [
        (COMPLETIONS, completion(model)),
        (COMPLETIONS, completion(model, stream=True, logprobs=1, stop=["x"], seed=1)),
        (COMPLETIONS, completion(model, prompt=[1, 2, 3], n=2)),
        (CHAT, chat(model, logprobs=True, top_logprobs=1)),
        (CHAT, chat(model, [{"type": "text", "text": "x"}], stream=True)),
        (CHAT, chat(model, response_format={"type": "json_object"}, tools=[], tool_choice="auto")),
        ("/v1/responses", {"model": model, "input": "x", "max_output_tokens": 4}),
        ("/v1/responses", {"model": model, "input": [{"role": "user", "content": "x"}], "stream": True}),
        ("/v1/messages", chat(model, system="x", stop_sequences=["y"])),
        ("/v1/messages", chat(model, stream=True, tools=[{"name": "f", "input_schema": {}}])),
        ("/v1/messages/count_tokens", chat(model, system=[{"type": "text", "text": "x"}])),
        ("/tokenize", {"model": model, "prompt": "x"}),
        ("/detokenize", {"model": model, "tokens": [1]}),
        ("/v1/embeddings", {"model": model, "input": "x"}),
        ("/v1/embeddings", {"model": model, "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/score", {"model": model, "text_1": "x", "text_2": "y"}),
        ("/v1/score", {"model": model, "queries": ["x"], "documents": ["y", "z"]}),
        ("/v1/rerank", {"model": model, "query": "x", "documents": ["y", "z"], "top_n": 1}),
    ]

    tables = tables_for(model)

    @st.composite
    def mutated_case(draw: Callable[[st.SearchStrategy[Any]], Any]) -> FuzzCase:
        path, valid = draw(st.sampled_from(bodies))
        # A field that the endpoint alone has is as likely as all others together.
        fields = st.sampled_from(tables["fields"])
        if own_fields := tables["own_fields"].get(path):
            fields = st.sampled_from(own_fields) | fields
        body = json.loads(json.dumps(valid))
        for _ in range(draw(st.integers(1, 3))):
            body = _mutate(body, draw, fields)
        raw = json.dumps(body).encode(errors="surrogatepass")
        if draw(st.integers(0, 9)) == 9:
            start = draw(st.integers(0, len(raw)))
            raw = raw[:start] + draw(st.binary(max_size=4)) + raw[start + draw(st.integers(0, 3)) :]
        return case(f"mutation:{path}", path, raw)

    cases: dict[FuzzCase, None] = {}
    while len(cases) < count:  # examples may repeat
        number += 1
        cases |= dict.fromkeys(_collect(mutated_case(), max(count - len(cases), 50), number))
    return list(cases)[:count]


def _mutate(body: Any, draw: Callable[[st.SearchStrategy[Any]], Any], fields: st.SearchStrategy[str]) -> Any:
    """Return the body with one value replaced, removed or added. `fields` are the names of added ones."""
    if not isinstance(body, dict | list) or not body or draw(st.integers(0, 20)) == 20:
        return deepcopy(draw(_VALUES))  # a copy, since the strategy may return one object several times
    if isinstance(body, list):
        index = draw(st.integers(0, len(body) - 1))
        body[index] = _mutate(body[index], draw, fields)
        return body
    kind = draw(st.integers(0, 5))
    if kind < 2:
        body[draw(fields)] = deepcopy(draw(_VALUES))
        return body
    key = draw(st.sampled_from(sorted(body)))
    if kind == 2:
        del body[key]
    else:
        body[key] = _mutate(body[key], draw, fields)
    return body


# -- schemathesis --------------------------------------------------------------------------------


def from_openapi(
    document: dict[str, Any], model: str, admin_key: str | None, count: int, number: int
) -> list[FuzzCase]:
    """Return as many valid requests by the document as invalid ones, evenly over its operations.

    A body that names a model gets the served one: with any other, the service would check nothing else.
    """
    schema = schemathesis.openapi.from_dict(document)
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    modes = [GenerationMode.NEGATIVE, GenerationMode.POSITIVE]
    plans = [(operation, mode) for mode in modes for operation in operations]
    cases: list[FuzzCase] = []
    for index, (operation, mode) in enumerate(plans):
        share = (count - len(cases)) // (len(plans) - index)
        strategy = operation.as_strategy(generation_mode=mode)
        for generated in _collect(strategy, share, number + index):
            if isinstance(generated.body, dict) and "model" in generated.body:
                generated.body["model"] = model
            cases.append(_case_of(generated, admin_key))
    return cases


def _case_of(generated: Any, admin_key: str | None) -> FuzzCase:
    arguments = generated.as_transport_kwargs(base_url="http://eldr")
    prepared = requests.Request(**arguments).prepare()
    url = urlsplit(prepared.url or "/")
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    headers = {name.lower(): value for name, value in prepared.headers.items()}
    body = prepared.body or b""
    fields = {k: str(value) for k, value in headers.items() if k not in ("content-length", "connection")}
    if admin_key and target.startswith("/eldr/"):
        fields["authorization"] = f"Bearer {admin_key}"
    label = f"openapi:{generated.method} {generated.operation.path}"
    return case(label, target, _bytes(body), method=prepared.method or "GET", headers=fields)


def _bytes(body: Any) -> bytes:
    if isinstance(body, Iterable) and not isinstance(body, bytes | str):
        return b"".join(_bytes(part) for part in body)
    return body.encode(errors="surrogatepass") if isinstance(body, str) else bytes(body)
