"""Internal names of vLLM and Ray are imported by the two `compat.py` alone."""

from __future__ import annotations

import pytest
from shipped import imports, modules

COMPAT = {"eldr_serve.engine.compat", "eldr_serve.serving.compat"}
# vLLM's extension points: what a class that it is told to load must subclass or is handed, and what requests
# carry. Beside them only what `import vllm` itself exports is public; vLLM marks nothing else as such.
VLLM_EXTENSION_POINTS = {
    "vllm.config": "handed to all of them",
    "vllm.distributed.kv_transfer.kv_connector.v1.base": "kv_connector_module_path",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": "what such a connector reports",
    "vllm.sampling_params": "what requests carry",
    "vllm.v1.core.sched.async_scheduler": "scheduler_cls",
    "vllm.v1.core.sched.scheduler": "scheduler_cls",
    "vllm.v1.metrics.loggers": "stat_loggers",
    "vllm.v1.worker.gpu_worker": "worker_cls",
}


def is_internal(name: str) -> bool:
    """Whether a dotted name is internal to vLLM or Ray; in both, one with a leading underscore is."""
    parts = name.split(".")
    if parts[0] not in ("ray", "vllm"):
        return False
    if any(part.startswith("_") for part in parts):
        return True
    module = name.rpartition(".")[0]
    return parts[0] == "vllm" and module not in ("", "vllm") and module not in VLLM_EXTENSION_POINTS


@pytest.mark.parametrize(
    ("name", "internal"),
    [
        ("vllm", False),
        ("vllm.SamplingParams", False),
        ("vllm._custom_ops", True),
        ("vllm.config.VllmConfig", False),
        ("vllm.v1.core.sched.scheduler.Scheduler", False),
        ("vllm.v1.metrics.utils.create_metric_per_engine", True),
        ("ray.serve.request_router.RequestRouter", False),
        ("ray.serve._private.common.ReplicaID", True),
        ("ray.llm._internal.serve.core.protocol.RawRequestInfo", True),
        ("numpy._core.multiarray", False),
    ],
)
def test_the_rule(name: str, internal: bool) -> None:
    assert is_internal(name) == internal


def test_only_compat_imports_internal_names() -> None:
    found = {
        f"{module} imports {name}"
        for module, path in modules()
        if module not in COMPAT
        for name in imports(path)
        if is_internal(name)
    }
    assert not found, "\n".join(sorted(found))
