"""Requests whose answers must equal those of a plain vLLM server."""

from typing import Any

MODEL = "eldr-demo"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "How are you?"}
TALK = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "I am"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "How"}, {"type": "text", "text": "much?"}]}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

# Valid requests to /tokenize.
TOKENIZED: list[dict[str, Any]] = [
    {"prompt": "Once upon a time, in Zürich … 🙂"},
    {"prompt": ""},
    {"prompt": "x", "model": ""},
    {"prompt": "x", "model": None},
    {"prompt": "Once upon", "add_special_tokens": False},
    {"prompt": "Once upon", "return_token_strs": True},
    {"prompt": "Once upon", "unknown": 5},
    {"messages": [USER]},
    {"messages": TALK},
    {"messages": PARTS},
    {"messages": [USER], "return_token_strs": True},
    {"messages": [USER], "add_generation_prompt": False},
    {"messages": TALK, "add_generation_prompt": False, "continue_final_message": True},
    {"messages": [USER], "add_special_tokens": True},
    {"messages": [USER], "tools": [TOOL]},
    {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [USER], "prompt": "x"},
]

# Refused requests to endpoints that generate nothing.
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (TOKENIZE, {}),
    (TOKENIZE, {"prompt": 5}),
    (TOKENIZE, {"prompt": ["a", "b"]}),
    (TOKENIZE, {"messages": "hello"}),
    (TOKENIZE, {"messages": [USER], "tools": [5]}),
    (TOKENIZE, {"messages": TALK, "add_generation_prompt": True, "continue_final_message": True}),
    (TOKENIZE, {"messages": [USER], "chat_template": "{{ messages }}"}),
    (TOKENIZE, {"prompt": "x", "model": "unknown"}),
    (DETOKENIZE, {}),
    (DETOKENIZE, {"tokens": "x"}),
    (DETOKENIZE, {"tokens": [-1]}),
    (DETOKENIZE, {"tokens": [2**40]}),
    (DETOKENIZE, {"tokens": [2**63 - 1]}),
    (DETOKENIZE, {"tokens": [1], "model": "unknown"}),
]

# Refused requests to endpoints that generate text.
REFUSED_GENERATION: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {}),
    (COMPLETIONS, {"prompt": "x", "model": "unknown"}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "many"}),
    (COMPLETIONS, {"prompt": "x", "n": "many"}),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}),
    (COMPLETIONS, {"prompt": "x", "top_p": 7}),
    (COMPLETIONS, {"prompt": "x", "logprobs": 1000}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 100_000}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -3}),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 9, "max_tokens": 4}),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}),
    (COMPLETIONS, {"prompt": "word " * 9000}),
    (CHAT, {}),
    (CHAT, {"messages": "hello"}),
    (CHAT, {"messages": [USER], "top_logprobs": 3}),
    (CHAT, {"messages": [USER], "temperature": "hot"}),
    (CHAT, {"messages": [USER], "tool_choice": "required"}),
]
