"""The internal names of vLLM's Responses API (OpenAI's)."""

from __future__ import annotations

import eldr_serve.engine.vllm.imports  # noqa: F401

from eldr_serve.engine.vllm.compat.checked import internal_imports

with internal_imports():
    from vllm.entrypoints.openai.responses.api_router import (
        _convert_stream_to_sse_events as to_response_events,
    )
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

__all__ = ["ResponsesRequest", "to_response_events"]
