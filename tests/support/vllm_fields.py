"""Requests that try each documented field of the vendors' clients and of vLLM's server at least once."""

from typing import Any

from tests.support.vllm_cases import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    MODEL,
    PARTS,
    TALK,
    TOKENIZE,
    TOKENIZED,
    TOOL,
    USER,
)

RESPONSES = "/v1/responses"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
STREAMING = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
# With such a request in a batch, vLLM 0.32 gives the others wrong log-probabilities (vllm#51789).
ALONE = ("logprob_token_ids",)
# Fields that constrain the text, which then often has several, almost equally likely, sequences of tokens.
CONSTRAINING = ("response_format", "structured_outputs")
READ = ("/v1/models", "/health", "/ping", "/version")  # paths that GET reads
Fields = dict[str, Any]

# Without another value, every request has these fields.
DEFAULTS: dict[str, Fields] = {
    CHAT: {"messages": [USER], "max_tokens": 4, "temperature": 0},
    COMPLETIONS: {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0},
    RESPONSES: {"input": "How are you?", "max_output_tokens": 4, "temperature": 0},
    MESSAGES: {"messages": [USER], "max_tokens": 4, "temperature": 0},
    COUNT_TOKENS: {"messages": [USER]},
    TOKENIZE: {},
    DETOKENIZE: {"tokens": [5, 6, 7]},
    EMBEDDINGS: {"input": "x"},
    SCORE: {"text_1": "x", "text_2": "y"},
    RERANK: {"query": "x", "documents": ["y", "z"]},
}

_SEEDED = {"temperature": 0.9, "seed": 3}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_CONTINUED = {"messages": TALK, "add_generation_prompt": False, "continue_final_message": True}
_OPENAI_TOOL = {"type": "function", "name": "f", "parameters": {}, "strict": False}
_ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
# Without a parser of tool calls vLLM's server refuses most other choices.
_NO_CALL = {"tools": [TOOL], "tool_choice": "none"}
_ANTHROPIC_NO_CALL = {"tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "none"}}

# Fields of /v1/chat/completions, /v1/completions and /v1/responses.
_SAMPLING: dict[str, list[Fields]] = {
    "temperature": [{"temperature": 0.5, "seed": 1}],
    "top_p": [_SEEDED | {"top_p": 0.5}],
    "top_k": [_SEEDED | {"top_k": 3}],
    "min_p": [_SEEDED | {"min_p": 0.1}],
    "seed": [_SEEDED],
    "stop_token_ids": [{"stop_token_ids": list(range(200))}],
    "include_stop_str_in_output": [{"stop": ["e"], "include_stop_str_in_output": True}],
    "frequency_penalty": [{"frequency_penalty": 2.0}],
    "presence_penalty": [{"presence_penalty": 2.0}],
    "repetition_penalty": [{"repetition_penalty": 1.5}],
    "logit_bias": [{"logit_bias": {"100": 100}}],
    "ignore_eos": [{"ignore_eos": True}],
    "skip_special_tokens": [{"skip_special_tokens": False}],
    "priority": [{"priority": 0}, {"priority": 1}],
    "session_id": [{"session_id": "s"}],
    "cache_salt": [{"cache_salt": "salt"}],
    "vllm_xargs": [{"vllm_xargs": {"x": 1}}],
    "user": [{"user": "u"}],
}

# Fields of /v1/chat/completions and /v1/completions.
_GENERATION: dict[str, list[Fields]] = _SAMPLING | {
    "model": [{}],
    "stream": [{}],
    "stream_options": [{"stream_options": {"include_usage": True}}],
    "max_tokens": [{"max_tokens": 3}],
    "n": [_SEEDED | {"n": 2}],
    "stop": [{"stop": "e"}, {"stop": ["a", "o"]}],
    "allowed_token_ids": [{"allowed_token_ids": [100, 101, 102]}],
    "bad_words": [{"bad_words": ["the", "a"]}],
    "min_tokens": [{"min_tokens": 3}],
    "spaces_between_special_tokens": [{"spaces_between_special_tokens": False}],
    "use_beam_search": [{"use_beam_search": True, "n": 2}],
    "length_penalty": [{"use_beam_search": True, "n": 2, "length_penalty": 2.0}],
    "prompt_logprobs": [{"prompt_logprobs": 1}],
    "truncate_prompt_tokens": [{"truncate_prompt_tokens": 3}],
    "truncation_side": [{"truncate_prompt_tokens": 3, "truncation_side": "right"}],
    "add_special_tokens": [{"add_special_tokens": True}, {"add_special_tokens": False}],
    "response_format": [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}},
    ],
    "structured_outputs": [{"structured_outputs": {"choice": ["A", "B"]}}],
    "request_id": [{"request_id": "mine"}],
    "return_token_ids": [{"return_token_ids": True}],
    "repetition_detection": [{"repetition_detection": {"max_pattern_size": 2, "min_count": 2}}],
    "thinking_token_budget": [{"thinking_token_budget": 2}],
    "stream_interval": [{"stream_interval": 3}],
    "user": [{"user": "u"}],
}

# Endpoint -> field -> requests
TRIED: dict[str, dict[str, list[Fields]]] = {
    CHAT: _GENERATION
    | {
        "messages": [{"messages": [USER]}, {"messages": TALK}, {"messages": PARTS}],
        "max_completion_tokens": [{"max_tokens": None, "max_completion_tokens": 3}],
        "logprobs": [{"logprobs": True}],
        "top_logprobs": [{"logprobs": True, "top_logprobs": 2}],
        "logprob_token_ids": [{"logprobs": True, "logprob_token_ids": [100, 101]}],
        "return_tokens_as_token_ids": [{"logprobs": True, "return_tokens_as_token_ids": True}],
        "return_prompt_text": [{"return_prompt_text": True}],
        "tools": [_NO_CALL],
        "tool_choice": [
            _NO_CALL,
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ],
        "parallel_tool_calls": [_NO_CALL | {"parallel_tool_calls": False}],
        "reasoning_effort": [{"reasoning_effort": "low"}],
        "include_reasoning": [{"include_reasoning": False}],
        "echo": [_CONTINUED | {"echo": True}],
        "add_generation_prompt": [{"add_generation_prompt": False}],
        "continue_final_message": [_CONTINUED],
        "documents": [{"documents": [{"title": "a", "text": "b"}]}],
        "chat_template": [{"chat_template": "{{ messages }}"}],
        "chat_template_kwargs": [{"chat_template_kwargs": {"enable_thinking": False}}],
    },
    COMPLETIONS: _GENERATION
    | {
        "prompt": [
            {"prompt": "Once upon"},
            {"prompt": [5, 6, 7]},
            {"prompt": ["one two", "three"]},
            {"prompt": [[5, 6], [7]]},
        ],
        "echo": [{"echo": True}, {"echo": True, "logprobs": 1}, {"echo": True, "max_tokens": 0}],
        "logprobs": [{"logprobs": 2}],
        "logprob_token_ids": [{"logprobs": 1, "logprob_token_ids": [100, 101]}],
        "return_tokens_as_token_ids": [{"logprobs": 1, "return_tokens_as_token_ids": True}],
        "suffix": [{"suffix": "end"}],
        "prompt_embeds": [{"prompt": None, "prompt_embeds": "AAAA"}],
    },
    RESPONSES: _SAMPLING
    | {
        "model": [{}],
        "stream": [{}],
        "input": [
            {"input": "How are you?"},
            {"input": [USER]},
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "How?"}]}]},
        ],
        "instructions": [{"instructions": "Be brief."}],
        "max_output_tokens": [{"max_output_tokens": 3}],
        "stop": [{"stop": ["e"]}],
        "include": [{"include": ["message.output_text.logprobs"]}],
        "top_logprobs": [{"include": ["message.output_text.logprobs"], "top_logprobs": 2}],
        "metadata": [{"metadata": {"a": "b"}}],
        "store": [{"store": False}, {"store": True}],
        "background": [{"background": True}],
        "previous_response_id": [{"previous_response_id": "resp_x"}],
        "prompt": [{"prompt": {"id": "p"}}],
        "reasoning": [{"reasoning": {"effort": "low"}}],
        "include_reasoning": [{"include_reasoning": False}],
        "service_tier": [{"service_tier": "default"}],
        "text": [
            {"text": {"format": {"type": "text"}}},
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}}},
        ],
        "structured_outputs": [{"structured_outputs": {"choice": ["A", "B"]}}],
        "tools": [{"tools": [_OPENAI_TOOL]}],
        "tool_choice": [{"tools": [_OPENAI_TOOL], "tool_choice": "none"}],
        "parallel_tool_calls": [{"parallel_tool_calls": False}],
        "max_tool_calls": [{"max_tool_calls": 1}],
        "truncation": [{"truncation": "auto"}],
        "request_id": [{"request_id": "resp_mine"}],
        "enable_response_messages": [{"enable_response_messages": True}],
        "chat_template_kwargs": [{"chat_template_kwargs": {"enable_thinking": False}}],
    },
    MESSAGES: {
        "model": [{}],
        "stream": [{}],
        "messages": [
            {"messages": [USER]},
            {"messages": PARTS},
            {"messages": [USER, {"role": "assistant", "content": "I am"}]},
        ],
        "max_tokens": [{"max_tokens": 3}],
        "system": [{"system": "Be brief."}, {"system": [{"type": "text", "text": "Be brief."}]}],
        "stop_sequences": [{"stop_sequences": ["e"]}],
        # Nothing seeds the generator here: at most one token is likely enough.
        "temperature": [{"temperature": 0}, {"temperature": 0.001}],
        "top_p": [{"temperature": 1, "top_p": 0.001}],
        "top_k": [{"temperature": 1, "top_k": 1}],
        "tools": [_ANTHROPIC_NO_CALL],
        "tool_choice": [_ANTHROPIC_NO_CALL, {"tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "any"}}],
        "thinking": [
            {"thinking": {"type": "disabled"}},
            {"thinking": {"type": "adaptive"}},
            {
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "max_tokens": 1100,
                "stop_sequences": ["e"],
            },
        ],
        "output_config": [
            {"output_config": {"effort": "low"}},
            {"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
        ],
        "metadata": [{"metadata": {"user_id": "x"}}],
        "cache_salt": [{"cache_salt": "salt"}],
        "vllm_xargs": [{"vllm_xargs": {"x": 1}}],
        "chat_template_kwargs": [{"chat_template_kwargs": {"enable_thinking": False}}],
    },
    COUNT_TOKENS: {
        "model": [{}],
        "messages": [{"messages": [USER]}, {"messages": PARTS}],
        "system": [{"system": "Be brief."}, {"system": [{"type": "text", "text": "Be brief."}]}],
        "tools": [_ANTHROPIC_NO_CALL],
        "tool_choice": [_ANTHROPIC_NO_CALL, {"tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "any"}}],
        "thinking": [{"thinking": {"type": "disabled"}}],
        "output_config": [{"output_config": {"effort": "low"}}],
        "chat_template_kwargs": [{"chat_template_kwargs": {"enable_thinking": False}}],
    },
    TOKENIZE: {
        **{
            name: [fields for fields in TOKENIZED if name in fields]
            for name in dict.fromkeys(name for fields in TOKENIZED for name in fields if name != "unknown")
        },
        "chat_template": [{"messages": [USER], "chat_template": "{{ messages }}"}],
    },
    DETOKENIZE: {"model": [{}], "tokens": [{"tokens": []}, {"tokens": [100, 101]}, {"tokens": [-1]}]},
    EMBEDDINGS: {"input": [{}]},
    SCORE: {"text_1": [{}]},
    RERANK: {"query": [{}]},
    **{path: {"(none)": [{}]} for path in READ},
}

_UNKNOWN = "plain vLLM does not know it"
_MEDIA = "the demo's model reads only text"
_RENDER = "only vLLM's endpoints that render prompts read it"
_HANDOVER = "the service sets it itself, for the hand-over between engines"
_WATERMARK = "plain vLLM needs a watermark in its configuration"
_OFF_MODEL = "the demo's model generates text, so plain vLLM does not have this endpoint"
_ANY_ENDPOINT = {
    "kv_transfer_params": _HANDOVER,
    "ec_transfer_params": _HANDOVER,
    "mm_payload": _RENDER,
    "return_mm_kwargs": _RENDER,
    "watermarking": _WATERMARK,
}
_ANY_MEDIA = {"media_io_kwargs": _MEDIA, "mm_processor_kwargs": _MEDIA}
_ROUTES = "plain vLLM needs the option enable_return_routed_experts"


def _unknown(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), _UNKNOWN)


# Endpoint -> field -> reason
NOT_TRIED: dict[str, dict[str, str]] = {
    CHAT: _ANY_ENDPOINT
    | _ANY_MEDIA
    | {"routed_experts_prompt_start": _ROUTES, "return_token_offsets": _RENDER}
    | _unknown(
        "audio function_call functions metadata modalities moderation prediction prompt_cache_key "
        "prompt_cache_options prompt_cache_retention safety_identifier service_tier store verbosity "
        "web_search_options"
    ),
    COMPLETIONS: _ANY_ENDPOINT
    | {"routed_experts_prompt_start": _ROUTES, "return_token_offsets": _RENDER}
    | _unknown("best_of"),
    RESPONSES: _ANY_ENDPOINT
    | _ANY_MEDIA
    | {
        "prompt_cache_key": "plain vLLM documents that it ignores it",
        "previous_input_messages": "plain vLLM reads it only for models of OpenAI's Harmony format",
    }
    | _unknown(
        "access_programs background_options context_management conversation image moderation "
        "prompt_cache_options prompt_cache_retention safety_identifier stream_options"
    ),
    MESSAGES: _ANY_ENDPOINT
    | _unknown(
        "cache_control container diagnostics inference_geo service_tier speed user_profile_id workspace_id"
    ),
    COUNT_TOKENS: _unknown("cache_control speed user_profile_id workspace_id"),
    TOKENIZE: _ANY_MEDIA,
    DETOKENIZE: {},
    EMBEDDINGS: {"all others": _OFF_MODEL},
    SCORE: {"all others": _OFF_MODEL},
    RERANK: {"all others": _OFF_MODEL},
}

_OWN_ID = "the service gives each request its own id"
_NO_POOLING = "400 instead of 404, since the service has the endpoint"
_BEFORE_STREAM = "streamed: refused by status 400, where vLLM sends 200 and an error in the stream"
_SPOILS_OTHERS = "400, since vLLM would replace the log-probabilities of other requests of the batch"
# The differences that docs/http_api.md describes: (endpoint, field) -> what the service does
DIFFERENT: dict[tuple[str, str], str] = {
    (CHAT, "request_id"): _OWN_ID,
    (COMPLETIONS, "request_id"): _OWN_ID,
    (RESPONSES, "request_id"): _OWN_ID,
    (RESPONSES, "previous_response_id"): "400 instead of 404, since responses are not stored",
    (CHAT, "logprob_token_ids"): _SPOILS_OTHERS,
    (COMPLETIONS, "logprob_token_ids"): _SPOILS_OTHERS,
    (CHAT, "thinking_token_budget"): _BEFORE_STREAM,
    (COMPLETIONS, "thinking_token_budget"): _BEFORE_STREAM,
    (MESSAGES, "thinking"): _BEFORE_STREAM,
    (EMBEDDINGS, "input"): _NO_POOLING,
    (SCORE, "text_1"): _NO_POOLING,
    (RERANK, "query"): _NO_POOLING,
}


def requests_of(path: str, field: str, stream: bool) -> list[Fields]:
    """Return the complete bodies that try a field of an endpoint."""
    streamed = {"stream": stream} if path in STREAMING else {}
    return [{"model": MODEL} | DEFAULTS.get(path, {}) | streamed | fields for fields in TRIED[path][field]]


def is_different(path: str, field: str, stream: bool) -> bool:
    """Return whether the answers to a field are documented to differ."""
    note = DIFFERENT.get((path, field))
    return note is not None and (stream or note != _BEFORE_STREAM)
