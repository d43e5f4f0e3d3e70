"""Token ids of a prompt before an engine has it: they equal the engine's, and no prompt raises an error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from eldr_serve.experts.signature_predictor import tokenizer_fingerprint
from eldr_serve.pipeline.prefill import prompt_tokenizer
from eldr_serve.pipeline.prefill.prompt_tokenizer import PromptTokenizer
from eldr_serve.request import RequestFields
from tests.support.shipped import ROOT

MODEL = ROOT / "examples/demo_model" / "weights"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
TEXT = "Every prompt is placed before its prefill. "


def ids(text: str, *, special: bool) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=special).ids)


async def token_ids(**fields: Any) -> list[int] | None:
    tokenizer = PromptTokenizer(str(MODEL))
    await tokenizer.fingerprint()
    ids = await tokenizer.tokenise(RequestFields.model_validate(fields))
    return None if ids is None else ids.tolist()


async def test_a_text_of_any_length_has_its_engines_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[Any] = []

    async def to_thread(function: Any, *args: Any) -> Any:
        threads.append(function)
        return function(*args)

    monkeypatch.setattr(prompt_tokenizer.asyncio, "to_thread", to_thread)
    loads = []
    for times, in_threads in ((1, 0), (1000, 1)):
        threads.clear()
        assert await token_ids(prompt=TEXT * times) == ids(TEXT * times, special=True)
        loads.append(len(threads) - in_threads)
    assert loads[0] == loads[1]  # only the long prompt is tokenised in a thread


async def test_a_chat_has_the_token_ids_of_its_texts() -> None:
    parts = [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": "x"}}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert await token_ids(messages=messages) == ids(f"Be brief.\n{TEXT}", special=False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": [3, 1, 2]}, [3, 1, 2]),
        ({"prompt": ["a", "b"]}, None),
        ({"prompt": [[1], [2]]}, None),
        ({"prompt": []}, None),
        ({"prompt": ""}, None),
        ({"prompt": [3, -1]}, None),
        ({"prompt": [3, 2**40]}, None),
        ({"prompt": [3, "x"]}, None),
        ({"prompt_embeds": "AAAA"}, None),
        ({"messages": [None, {"content": 3}, {"content": [None, {"text": 3}]}]}, None),
        ({"prompt": "\ud800"}, ids("?", special=True)),
    ],
)
async def test_only_a_single_prompt_has_token_ids(fields: dict[str, Any], expected: list[int] | None) -> None:
    assert await token_ids(**fields) == expected


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "type"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values, json_values)
def test_any_json_prompt_is_accepted(prompt: Any, messages: Any) -> None:
    tokenizer = PromptTokenizer(str(MODEL))
    tokenizer._tokenizer = TOKENIZER
    ids = asyncio.run(tokenizer.tokenise(RequestFields(prompt=prompt, messages=messages)))
    assert ids is None or ids.dtype == np.uint32


async def test_a_tokenizer_has_the_same_fingerprint_as_in_calibration(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    vocabulary = AutoTokenizer.from_pretrained(MODEL).get_vocab()
    assert await PromptTokenizer(str(MODEL)).fingerprint() == tokenizer_fingerprint(vocabulary)
    (tmp_path / "tokenizer.json").write_text("{")
    broken = PromptTokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="cannot be read"):
        await broken.fingerprint()
    assert await broken.tokenise(RequestFields(prompt=TEXT)) is None
