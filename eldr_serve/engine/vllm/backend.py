"""The vLLM backend, which runs in Ray Serve LLM's deployments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eldr_serve.engine.backend import Described, Device, EngineRole, EngineSpec
from eldr_serve.engine.protocol import Engine, Tracer
from eldr_serve.engine.vllm.config import ENVIRONMENT, engine_kwargs


class VllmBackend:
    """See backend.Backend."""

    describing: Mapping[str, str] = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # any value: nothing is allocated
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TARGET_DEVICE": "cpu",
    }

    def load(self) -> None:
        """See Backend."""
        import eldr_serve.engine.vllm.imports  # noqa: F401

    def check(self) -> None:
        """See Backend."""
        from eldr_serve.engine.vllm.compat.serve_llm import check_ray

        check_ray()

    def version(self) -> str:
        """See Backend."""
        import vllm

        return str(vllm.__version__)

    def requests(self) -> Mapping[str, Any]:
        """See Backend."""
        from eldr_serve.engine.vllm.requests import REQUESTS

        return REQUESTS

    def check_config(self, where: str, config: Mapping[str, Any]) -> None:
        """See Backend."""
        from eldr_serve.engine.vllm.check_config import check_config

        check_config(where, config)

    def spec(self, role: EngineRole, config: dict[str, Any], *, kv_lease_s: float) -> EngineSpec:
        """See Backend; the configuration is Ray Serve LLM's LLMConfig."""
        from eldr_serve.engine.vllm.compat.arguments import check_arguments
        from eldr_serve.engine.vllm.spec import VllmSpec, llm_config

        check_arguments("engine_kwargs", config.get("engine_kwargs") or {})
        return VllmSpec(llm_config(role, config, kv_lease_s=kv_lease_s))

    def compare(self, prefill: EngineSpec, decode: EngineSpec) -> None:
        """See Backend."""
        from eldr_serve.engine.vllm.agreement import compare_specs

        compare_specs(prefill, decode)

    def differences(self, prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> list[str]:
        """See Backend."""
        from eldr_serve.engine.vllm.agreement import differences

        return list(differences(prefill, decode))

    async def start(self, config: Any) -> Engine:
        """See Backend; takes an LLMConfig."""
        from eldr_serve.engine.vllm.engine import VllmEngine

        return await VllmEngine.start(config)

    def deployment_options(self, config: Any) -> dict[str, Any]:
        """See Backend; takes an LLMConfig."""
        from eldr_serve.engine.vllm.compat.serve_llm import deployment_options

        return deployment_options(config)

    def describe(
        self, model: Path, arguments: dict[str, Any], memory_gib: float, capability: tuple[int, int] | None
    ) -> Described:
        """See Backend."""
        from eldr_serve.engine.vllm.description import VllmDescribed

        return VllmDescribed(model, arguments, memory_gib, capability)

    def tracing(
        self, model: str, device: Device, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """See Backend."""
        return {"model": model, **engine_kwargs("calibrate", device=device, **arguments)}, dict(ENVIRONMENT)

    def tracer(self, settings: dict[str, Any], port: int) -> Tracer:
        """See Backend."""
        from eldr_serve.engine.vllm.tracer import VllmTracer

        return VllmTracer(settings, port)
