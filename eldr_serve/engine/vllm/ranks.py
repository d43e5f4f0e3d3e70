"""The ranks of an engine, and the GPUs that Ray must give them, where a deployment is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eldr_serve.errors import ConfigurationError


def model_ranks(kwargs: Mapping[str, Any]) -> int:
    """Return the number of ranks that a data-parallel rank's model is divided among."""
    return int(kwargs.get("tensor_parallel_size", 1) * kwargs.get("pipeline_parallel_size", 1))


def data_ranks(kwargs: Mapping[str, Any]) -> int:
    """Return the number of data-parallel ranks."""
    return int(kwargs.get("data_parallel_size") or 1)


def runs_in_one_process(kwargs: Mapping[str, Any], accelerator: str) -> bool:
    """Return whether scheduler and model run in one process, for each data-parallel rank.

    They do on a CPU unless the arguments name an executor. On a GPU they do if the arguments name "uni", or
    if they name no executor and have data-parallel ranks.
    """
    backend = kwargs.get("distributed_executor_backend")
    if model_ranks(kwargs) > 1:
        return False
    if backend is None:
        return accelerator == "cpu" or data_ranks(kwargs) > 1
    return bool(backend == "uni" and accelerator != "cpu")


def check_gpus(config: Mapping[str, Any]) -> None:
    """Raise ConfigurationError unless each data-parallel rank of an engine on GPUs would have a GPU.

    The ranks are processes that the replica starts, so the replica itself must have their GPUs. Ray's
    executor would start each rank's model in the first bundle of the replica's placement group.

    Args:
        config: the fields of Ray Serve LLM's LLMConfig, of engines on GPUs.
    """
    kwargs = config["engine_kwargs"]
    ranks, backend = data_ranks(kwargs), kwargs.get("distributed_executor_backend")
    if ranks == 1 or model_ranks(kwargs) > 1:  # the connector refuses ranks that are parallel in both ways
        return
    if backend not in (None, "uni"):
        raise ConfigurationError(
            f"engine_kwargs.distributed_executor_backend is {backend!r}: data-parallel ranks on GPUs are "
            "processes of their replica, so leave it out"
        )
    options = (config.get("deployment_config") or {}).get("ray_actor_options") or {}
    gpus = options.get("num_gpus", 0)
    if gpus != ranks:
        raise ConfigurationError(
            f"deployment_config.ray_actor_options.num_gpus is {gpus}: set it to {ranks}, one for each "
            "data-parallel rank, since the replica starts the ranks itself"
        )
