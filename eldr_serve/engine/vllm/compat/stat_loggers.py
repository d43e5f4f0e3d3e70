"""vLLM's stat loggers and its Ray metrics."""

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
    """Replace the Ray logger of a started engine by this subclass, and remove its text logger.

    Ray hard-codes the class of its logger. The text logger sums up stats for a line that a replica does not
    use; it is kept only if it was set to write a line for each step. Engines without a Ray logger do not
    change.

    Args:
        client: vLLM's client of its engine core.
        kind: class of the new logger.

    Raises:
        UnsupportedEngineError: vLLM's loggers are not where this version has them.
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
    for index, logger in reversed(list(enumerate(loggers))):
        if type(logger) is RayPrometheusStatLogger:
            loggers[index] = kind(config, logger.engine_indexes)
        elif _is_text(logger) and not keeps_text:
            del loggers[index]


def _is_text(logger: Any) -> bool:
    return isinstance(logger, PerEngineStatLoggerAdapter) and all(
        type(one) is LoggingStatLogger for one in logger.per_engine_stat_loggers.values()
    )
