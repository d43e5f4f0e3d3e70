"""Hostile requests written by hand, beside those that generated_cases.py makes.

A case is the bytes of one HTTP request, so that it can also violate HTTP, be stored and be sent again. All
cases are made before the first one is sent. Odd values and bodies are in cases.json.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

# Ray Serve's proxy itself answers 500 if one of these headers is not UTF-8; the service never sees it.
_READ_BY_PROXY = ("x-request-id", "x-session-id", "serve_multiplexed_model_id")
JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class FuzzCase:
    """One request. `complete` is False if it violates HTTP, so that it needs no answer."""

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
) -> FuzzCase:
    """Return a request with a body of bytes, text or JSON. `length` overrides its content-length."""
    if not isinstance(body, bytes):
        text = body if isinstance(body, str) else json.dumps(body)
        body = text.encode(errors="surrogatepass")
    fields = {"host": "eldr", "connection": "close"} | (JSON if headers is None else headers)
    if "transfer-encoding" not in fields:
        fields["content-length"] = str(len(body) if length is None else length)
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    raw = f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1", "replace") + body
    return FuzzCase(label, raw, complete)


def known_cases(model: str) -> list[FuzzCase]:
    """Return requests that once broke this service."""
    surrogate = r'{"model": "MODEL", "prompt": "a\ud800b", "max_tokens": 2}'.replace("MODEL", model)
    return [
        case("known", CHAT, {"messages": [{"role": "user", "content": [5]}]}),
        case("known", COMPLETIONS, surrogate),
        case("known", CHAT, chat(model, "a\ud800b")),
        case("known", "/tokenize", {"model": model, "prompt": "x", "kv_transfer_params": "boom"}),
        case("known", COMPLETIONS, completion(model, n=math.nan)),
        case("known", COMPLETIONS, completion(model, max_tokens=10**30)),
        case("known", COMPLETIONS, completion(model, max_tokens=2**62)),
        case("known", COMPLETIONS, completion(model, prompt=["x"] * 1024, n=16384)),
        case("known", COMPLETIONS, completion(f"{model}:invented")),
        case("known", "/tokenize", {"model": f"{model}:invented", "prompt": "x"}),
    ]


def by_hand(model: str, admin_key: str | None) -> list[FuzzCase]:
    """Return requests that may break such services: each field with odd values, and other ideas."""
    by_model = (_texts, _fields, _messages, _other_endpoints, _transport)
    return [*chain.from_iterable(make(model) for make in by_model), *_administration(admin_key)]


@cache
def tables_for(model: str) -> dict[str, Any]:
    """Return lists of values, of fields and of parts of bodies, for a model with that id."""
    text = Path(__file__).with_suffix(".json").read_text().replace("MODEL", json.dumps(model)[1:-1])
    tables: dict[str, Any] = expand(json.loads(text))
    return tables


def expand(value: Any) -> Any:
    """Expand values that are repeated `times`, follow `after`, or are `nested` in levels."""
    if isinstance(value, list):
        return [expand(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "times" in value:
        repeated = value["repeat"] * value["times"]
        return value["after"] + repeated if "after" in value else repeated
    if "nested" in value:
        return nested_schema(value["nested"])
    return {key: expand(part) for key, part in value.items()}


def completion(model: str, /, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "hello", "max_tokens": 4} | fields


def chat(model: str, content: Any = "hello", /, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4} | fields


def _texts(model: str) -> Iterator[FuzzCase]:
    """Yield bodies that are not JSON, or unusual JSON."""
    for text in tables_for(model)["texts"]:
        yield case("text", COMPLETIONS, text)
        yield case("text", CHAT, text)
    for body in (b"\xff", b"\xef\xbb\xbf{}", b'{"prompt": "\xed\xa0\x80"}', b"\x00" * 100, b"\x80\x04N."):
        yield case("bytes", COMPLETIONS, body)
    for encoding in ("utf-16", "utf-32", "utf-7"):
        yield case("encoding", COMPLETIONS, json.dumps(completion(model)).encode(encoding))
        headers = {"content-type": f"application/json; charset={encoding}"}
        yield case("encoding", COMPLETIONS, completion(model), headers=headers)


def _fields(model: str) -> Iterator[FuzzCase]:
    """Yield each field with values of other types and sizes."""
    tables = tables_for(model)
    for field in tables["fields"]:
        for odd in tables["odd"]:
            yield case(f"completion:{field}", COMPLETIONS, completion(model, **{field: odd}))
            yield case(f"chat:{field}", CHAT, chat(model, **{field: odd}))
    for fields in tables["completions"]:
        yield case("completion", COMPLETIONS, completion(model, **fields))
    for name in tables["models"]:
        for path, body in ((COMPLETIONS, completion(name)), (CHAT, chat(name))):
            yield case("model", path, body)


def _messages(model: str) -> Iterator[FuzzCase]:
    tables = tables_for(model)
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
            yield case("tools", CHAT, chat(model, tools=offered, tool_choice=choice))
    for messages in tables["messages"]:
        yield case("messages", CHAT, {"model": model, "messages": messages})
    thousands = [{"role": "user", "content": "x"}] * 2000
    yield case("messages", CHAT, {"model": model, "messages": thousands})
    for template in tables["templates"]:
        yield case("template", CHAT, chat(model, chat_template=template))
    for flags in (
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
    ):
        yield case("template", CHAT, chat(model, **flags))
        yield case(
            "template", CHAT, {"model": model, "messages": [{"role": "assistant", "content": None}]} | flags
        )


def nested_schema(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels // 2):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


def _other_endpoints(model: str) -> Iterator[FuzzCase]:
    tables = tables_for(model)
    for path, fields in tables["endpoints"]:
        for text in ("", "{", "null", "[" * 300):
            yield case(path, path, text)
        for name in (model, f"{model}:x", "x", None, 5, "a\ud800"):
            yield case(path, path, {"model": name} | fields)
        own_fields = tables["own_fields"].get(path, [])
        for field in dict.fromkeys((*fields, *own_fields, *tables["endpoint_fields"])):
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


def _transport(model: str) -> Iterator[FuzzCase]:
    """Yield odd headers, and HTTP that breaks off."""
    body = completion(model)
    tables = tables_for(model)
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
    for length in (len(text) + 10, 10**6, 10**18, 10**30, -1, 0, 5):
        yield case("length", COMPLETIONS, text, length=length, complete=False)
    large = 17 * 2**20
    yield case("large", COMPLETIONS, b'{"prompt": "' + b"x" * large + b'"}', complete=False)
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(text), text)
    chunked = JSON | {"transfer-encoding": "chunked"}
    yield case("chunked", COMPLETIONS, chunks, headers=chunked)
    one_by_one = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    yield case("chunked", COMPLETIONS, one_by_one, headers=chunked)
    for broken in (
        b"",
        chunks[:-5],
        b"zz\r\nx\r\n0\r\n\r\n",
        b"-1\r\n",
        b"f" * 18 + b"\r\n",
        b"5;x=" + b"y" * 5000,
    ):
        yield case("chunked", COMPLETIONS, broken, headers=chunked, complete=False)
    whole = case("", COMPLETIONS, body).raw
    for cut in (1, 10, 20, len(whole) // 2, len(whole) - 1):
        yield FuzzCase("cut", whole[:cut], complete=False)
    for raw in (
        b"",
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\n",
        b"POST / HTTP/1.0\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nx\r\n\r\n",
    ):
        yield FuzzCase("http", raw, complete=False)


def _administration(key: str | None) -> Iterator[FuzzCase]:
    """Yield changes of policy and table: without the key, and with it if it is given."""
    odd_counts: list[Any] = [2**31, 2**63, 10**30, -1, 0, 1.5, None, "x", [], {}]
    odd_values: list[Any] = [2**63, 10**400, -1, 1e308, 1e-320, None, "x", [], {}, {"x": 1}, True]
    policies: list[Any] = [
        None,
        5,
        [],
        {},
        {"name": 5},
        {"name": "x"},
        {"name": "random", "x": 1},
        {"name": "random", "parameters": 5},
        *(
            {"name": "balance-route", "parameters": {name: odd}}
            for name in (
                "slots",
                "candidates",
                "lookahead",
                "threshold",
                "max_overtakes",
                "queue",
                "overcommit",
                "home",
            )
            for odd in odd_counts
        ),
        *(
            {"name": policy, "parameters": {name: odd}}
            for policy in ("balance-route-horizon", "balance-band", "locality-band", "marginal-cost")
            for name in (
                "alpha",
                "beta",
                "gamma",
                "horizon",
                "predictor",
                "refresh",
                "gate",
                "band",
                "max_load_ratio",
                "band_tokens",
                "affinity",
                "cost",
                "lookahead",
                "max_overtakes",
            )
            for odd in odd_values
        ),
    ]
    keys = [{}, {"authorization": "Bearer wrong"}, {"authorization": "\xff"}]
    if key:
        keys.append({"authorization": f"Bearer {key}"})
    for headers in keys:
        for body in policies if headers is keys[-1] else policies[:8]:
            yield case("policy", "/eldr/policy", body, method="PUT", headers=JSON | headers)
        for table in (
            b"",
            b"x",
            b"\x00" * 1000,
            b"\xff" * 8,
            b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ",
            b"x" * 100_000,
        ):
            yield case("table", "/eldr/table", table, method="PUT", headers=headers)
    for text in (
        "NaN",
        '{"name": "balance-band", "parameters": {"band_tokens": Infinity}}',
        "{",
        r'{"name": "\ud800"}',
    ):
        yield case("policy", "/eldr/policy", text, method="PUT", headers=JSON | keys[-1])
    yield case("table", "/eldr/table", b"x", method="PUT", length=10**9, complete=False)
