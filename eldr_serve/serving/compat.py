"""The internal names of Ray Serve LLM that this package leans on. Checked on Ray 2.60.0."""

from __future__ import annotations

import inspect

import ray
from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
from ray.llm._internal.serve.core.ingress.ingress import DEFAULT_ENDPOINTS
from ray.llm._internal.serve.core.ingress.utils import _sanitize_chat_completion_request as picklable_chat
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from ray.serve.llm.ingress import OpenAiIngress

__all__ = ["DEFAULT_ENDPOINTS", "RawRequestInfo", "check_ray", "picklable_chat", "to_model_metadata"]

_CHECKED = "2.60"


def check_ray() -> None:
    """Raise RuntimeError with one sentence if this Ray is not laid out as the checked one."""
    hook = getattr(OpenAiIngress, "_get_response", None)
    known = hook is not None and {"body", "call_method", "raw_request"} <= set(
        inspect.signature(hook).parameters
    )
    if not known:
        raise RuntimeError(
            f"ray {ray.__version__} has no OpenAiIngress._get_response(body, call_method, raw_request), "
            f"which eldr-serve extends; it was checked on ray {_CHECKED}"
        )
