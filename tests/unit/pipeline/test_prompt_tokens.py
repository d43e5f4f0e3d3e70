"""Token ids before an engine has seen a prompt: the engine's own tokenizer, and no prompt that breaks it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shipped import ROOT
from tokenizers import Tokenizer

from eldr_serve.experts.signature_predictor import tokenizer_fingerprint
from eldr_serve.pipeline import prompt_tokens
from eldr_serve.pipeline.prompt_tokens import PromptTokens
from eldr_serve.request import RequestFields

MODEL = ROOT / "examples/demo_model" / "weights"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
TEXT = "Every prompt is placed before its prefill. "


def ids(text: str, *, special: bool) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=special).ids)


async def of(**asked: Any) -> list[int] | None:
    tokens = PromptTokens(str(MODEL))
    await tokens.fingerprint()
    found = await tokens.of(RequestFields.model_validate(asked))
    return None if found is None else found.tolist()


async def test_a_text_has_the_ids_that_its_engine_gives_it_however_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[Any] = []

    async def to_thread(function: Any, *args: Any) -> Any:
        threads.append(function)
        return function(*args)

    monkeypatch.setattr(prompt_tokens.asyncio, "to_thread", to_thread)
    loading = [0]
    for times, in_threads in ((1, 0), (1000, 1)):
        threads.clear()
        assert await of(prompt=TEXT * times) == ids(TEXT * times, special=True)
        loading.append(len(threads) - in_threads)
    assert loading[1] == loading[2]  # the same for both: the rest was the long prompt's


async def test_a_chat_has_those_of_its_texts() -> None:
    parts = [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": "x"}}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert await of(messages=messages) == ids(f"Be brief.\n{TEXT}", special=False)


@pytest.mark.parametrize(
    ("asked", "found"),
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
async def test_what_is_no_single_text_has_none(asked: dict[str, Any], found: list[int] | None) -> None:
    assert await of(**asked) == found


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "type"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values, json_values)
def test_no_prompt_breaks_it(prompt: Any, messages: Any) -> None:
    tokens = PromptTokens(str(MODEL))
    tokens._tokenizer = TOKENIZER
    found = asyncio.run(tokens.of(RequestFields(prompt=prompt, messages=messages)))
    assert found is None or found.dtype == np.uint32


async def test_a_tokenizer_is_named_as_calibration_names_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    vocabulary = AutoTokenizer.from_pretrained(MODEL).get_vocab()
    assert await PromptTokens(str(MODEL)).fingerprint() == tokenizer_fingerprint(vocabulary)
    (tmp_path / "tokenizer.json").write_text("{")
    broken = PromptTokens(str(tmp_path))
    with pytest.raises(ValueError, match="cannot be read"):
        await broken.fingerprint()
    assert await broken.of(RequestFields(prompt=TEXT)) is None
