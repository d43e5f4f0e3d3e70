"""Hostile requests: by hand, mutated from valid ones (hypothesis), from the OpenAPI document (schemathesis).

A case is the bytes of one HTTP request, so that it can also violate HTTP, be stored and be sent again. All
cases are made from a seed before the first one is sent. Odd values and bodies are in hostile_cases.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
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

# Ray Serve's proxy itself answers 500 if one of these headers is not UTF-8; the service never sees it.
_READ_BY_PROXY = ("x-request-id", "x-session-id", "serve_multiplexed_model_id")
JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Case:
    """One request; `complete` is False if it violates HTTP, so that it needs no answer."""

    label: str
    raw: bytes
    complete: bool = True


def case(
    label: str,
    path: str,
    body: Any = b"",
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    length: int | None = None,
    complete: bool = True,
) -> Case:
    """Return a request with a body of bytes, text or JSON; `length` overrides its content-length."""
    if not isinstance(body, bytes):
        text = body if isinstance(body, str) else json.dumps(body)
        body = text.encode(errors="surrogatepass")
    said = {"host": "eldr", "connection": "close"} | (JSON if headers is None else headers)
    if "transfer-encoding" not in said:
        said["content-length"] = str(len(body) if length is None else length)
    head = "".join(f"{name}: {value}\r\n" for name, value in said.items())
    raw = f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1", "replace") + body
    return Case(label, raw, complete)


def known(model: str) -> list[Case]:
    """Return requests that once broke this service."""
    surrogate = r'{"model": "MODEL", "prompt": "a\ud800b", "max_tokens": 2}'.replace("MODEL", model)
    return [
        case("known", CHAT, {"messages": [{"role": "user", "content": [5]}]}),
        case("known", COMPLETIONS, surrogate),
        case("known", CHAT, _chat(model, "a\ud800b")),
        case("known", "/tokenize", {"model": model, "prompt": "x", "kv_transfer_params": "boom"}),
        case("known", COMPLETIONS, _completion(model, n=math.nan)),
        case("known", COMPLETIONS, _completion(model, max_tokens=10**30)),
        case("known", COMPLETIONS, _completion(model, max_tokens=2**62)),
        case("known", COMPLETIONS, _completion(model, prompt=["x"] * 1024, n=16384)),
        case("known", COMPLETIONS, _completion(f"{model}:invented")),
        case("known", "/tokenize", {"model": f"{model}:invented", "prompt": "x"}),
    ]


def by_hand(model: str, admin_key: str | None) -> list[Case]:
    """Return requests that may break such services: each field with odd values, and other ideas."""
    return [
        *_texts(model),
        *_fields(model),
        *_messages(model),
        *_other_endpoints(model),
        *_transport(model),
        *_administration(admin_key),
    ]


@cache
def _tables(model: str) -> dict[str, list[Any]]:
    """Return lists of values and parts of bodies, for a model with that id."""
    text = Path(__file__).with_suffix(".json").read_text().replace("MODEL", json.dumps(model)[1:-1])
    tables: dict[str, list[Any]] = _expanded(json.loads(text))
    return tables


def _expanded(value: Any) -> Any:
    """Expand values that are repeated `times`, follow `after`, or are `nested` in levels."""
    if isinstance(value, list):
        return [_expanded(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "times" in value:
        repeated = value["repeat"] * value["times"]
        return value["after"] + repeated if "after" in value else repeated
    if "nested" in value:
        return _nested(value["nested"])
    return {key: _expanded(part) for key, part in value.items()}


def _completion(model: str, /, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "hello", "max_tokens": 4} | fields


def _chat(model: str, content: Any = "hello", /, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4} | fields


def _texts(model: str) -> Iterator[Case]:
    """Yield bodies that are not JSON, or unusual JSON."""
    for text in _tables(model)["texts"]:
        yield case("text", COMPLETIONS, text)
        yield case("text", CHAT, text)
    for body in (b"\xff", b"\xef\xbb\xbf{}", b'{"prompt": "\xed\xa0\x80"}', b"\x00" * 100, b"\x80\x04N."):
        yield case("bytes", COMPLETIONS, body)
    for encoding in ("utf-16", "utf-32", "utf-7"):
        yield case("encoding", COMPLETIONS, json.dumps(_completion(model)).encode(encoding))
        headers = {"content-type": f"application/json; charset={encoding}"}
        yield case("encoding", COMPLETIONS, _completion(model), headers=headers)


def _fields(model: str) -> Iterator[Case]:
    """Yield each field with values of other types and sizes."""
    tables = _tables(model)
    for field in tables["fields"]:
        for odd in tables["odd"]:
            yield case(f"completion:{field}", COMPLETIONS, _completion(model, **{field: odd}))
            yield case(f"chat:{field}", CHAT, _chat(model, **{field: odd}))
    for fields in tables["completions"]:
        yield case("completion", COMPLETIONS, _completion(model, **fields))
    for name in tables["models"]:
        for path, body in ((COMPLETIONS, _completion(name)), (CHAT, _chat(name))):
            yield case("model", path, body)


def _messages(model: str) -> Iterator[Case]:
    tables = _tables(model)
    for content in tables["contents"]:
        for role in ("user", "system", "assistant", "tool", "developer", "nobody", "", None, 5):
            yield case("content", CHAT, {"model": model, "messages": [{"role": role, "content": content}]})
    for call in tables["tool_calls"]:
        messages = [
            {"role": "assistant", "tool_calls": call},
            {"role": "tool", "tool_call_id": "x", "content": "y"},
        ]
        yield case("tool_calls", CHAT, {"model": model, "messages": messages, "max_tokens": 2})
    for offered in tables["tools"]:
        for choice in tables["tool_choices"]:
            yield case("tools", CHAT, _chat(model, tools=offered, tool_choice=choice))
    for messages in tables["messages"]:
        yield case("messages", CHAT, {"model": model, "messages": messages})
    many = [{"role": "user", "content": "x"}] * 2000
    yield case("messages", CHAT, {"model": model, "messages": many})
    for template in tables["templates"]:
        yield case("template", CHAT, _chat(model, chat_template=template))
    for flags in (
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
    ):
        yield case("template", CHAT, _chat(model, **flags))
        yield case(
            "template", CHAT, {"model": model, "messages": [{"role": "assistant", "content": None}]} | flags
        )


def _nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(levels // 2):
        found = {"type": "object", "properties": {"x": found}}
    return found


def _other_endpoints(model: str) -> Iterator[Case]:
    tables = _tables(model)
    for path, fields in tables["endpoints"]:
        for text in ("", "{", "null", "[" * 300):
            yield case(path, path, text)
        for name in (model, f"{model}:x", "x", None, 5, "a\ud800"):
            yield case(path, path, {"model": name} | fields)
        for field in (*fields, *tables["endpoint_fields"]):
            for odd in tables["odd"]:
                yield case(f"{path}:{field}", path, {"model": model} | fields | {field: odd})
    for tokens in ([10**9], [-1], [1] * 100_000, [2**62]):
        yield case("detokenize", "/detokenize", {"model": model, "tokens": tokens})
    form = {"content-type": "multipart/form-data; boundary=x"}
    for body in (
        b"",
        b"--x--\r\n",
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--x--\r\n',
    ):
        yield case("form", "/v1/audio/transcriptions", body, headers=form)
        yield case("form", CHAT, body, headers=form)
    for path in tables["paths"]:
        for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW"):
            yield case("path", path, method=method)


def _transport(model: str) -> Iterator[Case]:
    """Yield odd headers, and HTTP that breaks off."""
    body = _completion(model)
    tables = _tables(model)
    for value in tables["content_types"]:
        yield case("content-type", COMPLETIONS, body, headers={"content-type": value})
    yield case("content-type", COMPLETIONS, body, headers={})
    for name, value in product(tables["headers"], tables["header_values"]):
        if name not in _READ_BY_PROXY or value != "\xff\xfe":
            complete = name not in ("expect", "upgrade", "te")
            yield case(f"header:{name}", COMPLETIONS, body, headers=JSON | {name: value}, complete=complete)
    for many in (50, 2000):
        headers = JSON | {f"x-{number}": "y" for number in range(many)}
        yield case("headers", COMPLETIONS, body, headers=headers, complete=many < 100)
    text = json.dumps(body).encode()
    for said in (len(text) + 10, 10**6, 10**18, 10**30, -1, 0, 5):
        yield case("length", COMPLETIONS, text, length=said, complete=False)
    large = 17 * 2**20
    yield case("large", COMPLETIONS, b'{"prompt": "' + b"x" * large + b'"}', complete=False)
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(text), text)
    chunked = JSON | {"transfer-encoding": "chunked"}
    yield case("chunked", COMPLETIONS, chunks, headers=chunked)
    one_by_one = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    yield case("chunked", COMPLETIONS, one_by_one, headers=chunked)
    broken_off = (
        b"",
        chunks[:-5],
        b"zz\r\nx\r\n0\r\n\r\n",
        b"-1\r\n",
        b"f" * 18 + b"\r\n",
        b"5;x=" + b"y" * 5000,
    )
    for broken in broken_off:
        yield case("chunked", COMPLETIONS, broken, headers=chunked, complete=False)
    whole = case("", COMPLETIONS, body).raw
    for cut in (1, 10, 20, len(whole) // 2, len(whole) - 1):
        yield Case("cut", whole[:cut], complete=False)
    for raw in (b"", b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00",
                b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n",
                b"POST / HTTP/1.0\r\n\r\n", b"GET /\x00 HTTP/1.1\r\n\r\n",
                b"GET / HTTP/1.1\r\nx\r\n\r\n"):  # fmt: skip
        yield Case("http", raw, complete=False)


def _administration(key: str | None) -> Iterator[Case]:
    """Yield changes of policy and table: without the key, and with it if it is given."""
    odd_counts: list[Any] = [2**31, 2**63, 10**30, -1, 0, 1.5, None, "x", [], {}]
    odd_values: list[Any] = [2**63, 10**400, -1, 1e308, 1e-320, None, "x", [], {}, {"x": 1}, True]
    policies: list[Any] = [
        None, 5, [], {}, {"name": 5}, {"name": "x"}, {"name": "random", "x": 1}, {"name": "random",
        "parameters": 5},
        *(
            {"name": "balance-route", "parameters": {name: odd}}
            for name in ("slots", "candidates", "lookahead", "threshold", "max_overtakes", "queue",
                         "overcommit", "home")
            for odd in odd_counts
        ),
        *(
            {"name": policy, "parameters": {name: odd}}
            for policy in ("balance-route-horizon", "balance-band", "locality-band", "marginal-cost")
            for name in ("alpha", "beta", "gamma", "horizon", "predictor", "refresh", "gate", "band",
            "max_load_ratio",
                         "band_tokens", "affinity", "cost", "lookahead",
                         "max_overtakes")
            for odd in odd_values
        ),
    ]  # fmt: skip
    keys = [{}, {"authorization": "Bearer wrong"}, {"authorization": "\xff"}]
    if key:
        keys.append({"authorization": f"Bearer {key}"})
    for headers in keys:
        for body in policies if headers is keys[-1] else policies[:8]:
            yield case("policy", "/eldr/policy", body, method="PUT", headers=JSON | headers)
        for table in (
            b"", b"x", b"\x00" * 1000, b"\xff" * 8, b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ",
            b"x" * 100_000,
        ):  # fmt: skip
            yield case("table", "/eldr/table", table, method="PUT", headers=headers)
    for text in (
        "NaN",
        '{"name": "balance-band", "parameters": {"band_tokens": Infinity}}',
        "{",
        r'{"name": "\ud800"}',
    ):
        yield case("policy", "/eldr/policy", text, method="PUT", headers=JSON | keys[-1])
    yield case("table", "/eldr/table", b"x", method="PUT", length=10**9, complete=False)


# -- hypothesis ----------------------------------------------------------------------------------


def _collect(strategy: st.SearchStrategy[Any], count: int, number: int) -> list[Any]:
    """Return `count` examples of the strategy; the same number gives the same examples."""
    found: list[Any] = []
    if count < 1:
        return found

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
        found.append(example)

    with suppress(Unsatisfiable):  # raised if nothing can be invalid, as in a call without parameters
        take()
    return found[:count]


_SCALARS = st.one_of(
    st.sampled_from(_tables("m")["odd"]),
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


def mutations(model: str, count: int, number: int) -> list[Case]:
    """Return valid bodies with some fields, parts or bytes replaced."""
    bodies = [
        (COMPLETIONS, _completion(model)),
        (COMPLETIONS, _completion(model, stream=True, logprobs=1, stop=["x"], seed=1)),
        (COMPLETIONS, _completion(model, prompt=[1, 2, 3], n=2)),
        (CHAT, _chat(model, logprobs=True, top_logprobs=1)),
        (CHAT, _chat(model, [{"type": "text", "text": "x"}], stream=True)),
        (CHAT, _chat(model, response_format={"type": "json_object"}, tools=[], tool_choice="auto")),
        ("/tokenize", {"model": model, "prompt": "x"}),
        ("/detokenize", {"model": model, "tokens": [1]}),
        ("/v1/embeddings", {"model": model, "input": "x"}),
        ("/v1/score", {"model": model, "text_1": "x", "text_2": "y"}),
    ]

    @st.composite
    def mutated(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Case:
        path, valid = draw(st.sampled_from(bodies))
        body = json.loads(json.dumps(valid))
        for _ in range(draw(st.integers(1, 3))):
            body = _mutated(body, draw)
        raw = json.dumps(body).encode(errors="surrogatepass")
        if draw(st.integers(0, 9)) == 9:
            at = draw(st.integers(0, len(raw)))
            raw = raw[:at] + draw(st.binary(max_size=4)) + raw[at + draw(st.integers(0, 3)) :]
        return case(f"mutation:{path}", path, raw)

    found: dict[Case, None] = {}
    while len(found) < count:  # examples may repeat
        number += 1
        found |= dict.fromkeys(_collect(mutated(), max(count - len(found), 50), number))
    return list(found)[:count]


def _mutated(body: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """Return the body with one value replaced, removed or added."""
    if not isinstance(body, dict | list) or not body or draw(st.integers(0, 20)) == 20:
        return deepcopy(draw(_VALUES))  # a copy, since the strategy may return one object several times
    if isinstance(body, list):
        at = draw(st.integers(0, len(body) - 1))
        body[at] = _mutated(body[at], draw)
        return body
    kind = draw(st.integers(0, 5))
    if kind < 2:
        body[draw(st.sampled_from(_tables("m")["fields"]))] = deepcopy(draw(_VALUES))
        return body
    key = draw(st.sampled_from(sorted(body)))
    if kind == 2:
        del body[key]
    else:
        body[key] = _mutated(body[key], draw)
    return body


# -- schemathesis --------------------------------------------------------------------------------


def from_openapi(
    document: dict[str, Any], model: str, admin_key: str | None, count: int, number: int
) -> list[Case]:
    """Return as many valid requests by the document as invalid ones, evenly over its operations.

    A body that names a model gets the served one: with any other, the service would check nothing else.
    """
    schema = schemathesis.openapi.from_dict(document)
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    modes = [GenerationMode.NEGATIVE, GenerationMode.POSITIVE]
    plans = [(operation, mode) for mode in modes for operation in operations]
    found: list[Case] = []
    for index, (operation, mode) in enumerate(plans):
        share = (count - len(found)) // (len(plans) - index)
        strategy = operation.as_strategy(generation_mode=mode)
        for generated in _collect(strategy, share, number + index):
            if isinstance(generated.body, dict) and "model" in generated.body:
                generated.body["model"] = model
            found.append(_sent(generated, admin_key))
    return found


def _sent(generated: Any, admin_key: str | None) -> Case:
    arguments = generated.as_transport_kwargs(base_url="http://eldr")
    prepared = requests.Request(**arguments).prepare()
    url = urlsplit(prepared.url or "/")
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    headers = {name.lower(): value for name, value in prepared.headers.items()}
    body = prepared.body or b""
    kept = {k: str(value) for k, value in headers.items() if k not in ("content-length", "connection")}
    if admin_key and target.startswith("/eldr/"):
        kept["authorization"] = f"Bearer {admin_key}"
    label = f"openapi:{generated.method} {generated.operation.path}"
    return case(label, target, _bytes(body), method=prepared.method or "GET", headers=kept)


def _bytes(body: Any) -> bytes:
    if isinstance(body, Iterable) and not isinstance(body, bytes | str):
        return b"".join(_bytes(part) for part in body)
    return body.encode(errors="surrogatepass") if isinstance(body, str) else bytes(body)
