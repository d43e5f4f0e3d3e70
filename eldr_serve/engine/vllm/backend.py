"""vLLM as a kind of engine in Ray Serve LLM's deployments: configuration, checks, start and calibration.

Every process may import this module: its methods import the engine software when they need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eldr_serve.engine.backend_protocol import EngineSpec
from eldr_serve.engine.protocol import CalibrationEngine, Device, Engine, EngineRole
from eldr_serve.engine.vllm.config import ENVIRONMENT, engine_kwargs

if TYPE_CHECKING:
    from eldr_serve.engine.vllm.description import VllmDescribed
    from eldr_serve.engine.vllm.spec import VllmSpec


class VllmBackend:
    """The implementation of EngineBackend with vLLM, the default of `eldr_serve.engine.active_backend`."""

    describe_environment: Mapping[str, str] = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # any value: nothing is allocated
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TARGET_DEVICE": "cpu",
    }

    def import_software(self) -> None:
        """Import vLLM and Ray Serve LLM."""
        import eldr_serve.engine.vllm.imports  # noqa: F401

    def check_versions(self) -> None:
        """Raise RuntimeError if Ray is not a supported version."""
        from eldr_serve.engine.vllm.compat.serve_llm import check_ray

        check_ray()

    def version(self) -> str:
        """Return the version of vLLM."""
        import vllm

        return str(vllm.__version__)

    def request_types(self) -> Mapping[str, Any]:
        """Return vLLM's types of clients' requests by method."""
        from eldr_serve.engine.vllm.requests.request_parsing import REQUESTS

        return REQUESTS

    def check_config(self, where: str, config: Mapping[str, Any]) -> None:
        """Check names and simple values of an LLMConfig without importing vLLM."""
        from eldr_serve.engine.vllm.check_config import check_config

        check_config(where, config)

    def spec(self, role: EngineRole, config: dict[str, Any], *, kv_lease_s: float) -> VllmSpec:
        """Return the specification of the engines; `config` has the fields of Ray's LLMConfig."""
        from eldr_serve.engine.vllm.compat.arguments import check_arguments
        from eldr_serve.engine.vllm.spec import VllmSpec, make_llm_config

        check_arguments("engine_kwargs", config.get("engine_kwargs") or {})
        return VllmSpec(make_llm_config(role, config, kv_lease_s=kv_lease_s))

    def compare(self, prefill: EngineSpec, decode: EngineSpec) -> None:
        """Raise ConfigurationError unless two VllmSpecs agree on the fields that must be equal."""
        from eldr_serve.engine.vllm.agreement import compare_specs

        compare_specs(prefill, decode)

    def differences(self, prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> list[str]:
        """Return one sentence for each field that must be equal but differs."""
        from eldr_serve.engine.vllm.agreement import differences

        return list(differences(prefill, decode))

    async def start(self, config: Any) -> Engine:
        """Start the engine of a replica, configured by an LLMConfig."""
        from eldr_serve.engine.vllm.engine import VllmEngine

        return await VllmEngine.start(config)

    def deployment_options(self, config: Any) -> dict[str, Any]:
        """Return the options of an LLMConfig's Ray Serve deployment, with the resources of a replica."""
        from eldr_serve.engine.vllm.compat.serve_llm import deployment_options

        return deployment_options(config)

    def describe(
        self, model: Path, arguments: dict[str, Any], memory_gib: float, capability: tuple[int, int] | None
    ) -> VllmDescribed:
        """Return an engine as it would be on a machine, without starting it."""
        from eldr_serve.engine.vllm.compat.checked import configuration_errors

        with configuration_errors():
            from eldr_serve.engine.vllm.description import VllmDescribed

            return VllmDescribed(model, arguments, memory_gib, capability)

    def calibration_settings(
        self, model: str, device: Device, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return vLLM's arguments for `start_calibration`, and the environment variables of its process."""
        # Calibration uses vLLM's class LLM, which has no data-parallel ranks.
        rank_arguments = {name: value for name, value in arguments.items() if name != "data_parallel_size"}
        return {"model": model, **engine_kwargs("calibrate", device=device, **rank_arguments)}, dict(
            ENVIRONMENT
        )

    def start_calibration(self, settings: dict[str, Any], port: int) -> CalibrationEngine:
        """Start vLLM's offline engine for calibration."""
        from eldr_serve.engine.vllm.calibration_engine import VllmCalibrationEngine

        return VllmCalibrationEngine(settings, port)
