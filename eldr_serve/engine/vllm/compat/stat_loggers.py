"""vLLM's stat loggers, and its metrics as Ray Serve LLM has it make them."""

from __future__ import annotations

from typing import Any

import vllm

from eldr_serve.engine.vllm.compat.checked import CHECKED, UnsupportedEngineError, internal_imports

with internal_imports():
    from vllm.v1.metrics.loggers import LoggingStatLogger, PerEngineStatLoggerAdapter
    from vllm.v1.metrics.ray_wrappers import (
        RayCounterWrapper,
        RayGaugeWrapper,
        RayHistogramWrapper,
        RayKVConnectorProm,
        RayPerfMetricsProm,
        RayPrometheusMetric,
        RayPrometheusStatLogger,
        RaySpecDecodingProm,
    )

__all__ = [
    "RayCounterWrapper",
    "RayGaugeWrapper",
    "RayHistogramWrapper",
    "RayKVConnectorProm",
    "RayPerfMetricsProm",
    "RayPrometheusMetric",
    "RayPrometheusStatLogger",
    "RaySpecDecodingProm",
    "replace_ray_logger",
]


def replace_ray_logger(client: Any, kind: type[RayPrometheusStatLogger]) -> None:
    """Have a started engine record its stats with this kind of RayPrometheusStatLogger.

    Ray names the class within the function that starts an engine. vLLM adds a logger of text, which sums up
    for a line that nobody asks for in a replica; it goes, unless it was set to write a line for each step.
    Engines whose stats do not go through Ray stay as they are.

    Args:
        client: vLLM's client of its engine core.

    Raises:
        UnsupportedEngineError: vLLM has moved its loggers.
    """
    manager = client.logger_manager
    if manager is None:
        return
    loggers = getattr(manager, "stat_loggers", None)
    if not isinstance(loggers, list):
        raise UnsupportedEngineError(
            f"vLLM {vllm.__version__} has no StatLoggerManager.stat_loggers, which eldr-serve replaces; "
            f"it was checked on {CHECKED}"
        )
    config = client.vllm_config
    keeps_text = config.observability_config.enable_logging_iteration_details
    for at, logger in reversed(list(enumerate(loggers))):
        if type(logger) is RayPrometheusStatLogger:
            loggers[at] = kind(config, logger.engine_indexes)
        elif _is_text(logger) and not keeps_text:
            del loggers[at]


def _is_text(logger: Any) -> bool:
    return isinstance(logger, PerEngineStatLoggerAdapter) and all(
        type(one) is LoggingStatLogger for one in logger.per_engine_stat_loggers.values()
    )
