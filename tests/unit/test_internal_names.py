"""Internal names of vLLM and Ray are used by the two `compat.py` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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
# Ray's documented packages; it marks the others with a leading underscore, but not all of them.
RAY_PUBLIC = {
    "ray", "ray.actor", "ray.exceptions", "ray.serve", "ray.util", "ray.serve.config", "ray.serve.deployment",
    "ray.serve.exceptions", "ray.serve.handle", "ray.serve.llm", "ray.serve.llm.deployment",
    "ray.serve.llm.ingress", "ray.serve.request_router", "ray.util.actor_pool", "ray.util.metrics",
}  # fmt: skip


def is_internal(name: str) -> bool:
    """Whether a dotted name is internal to vLLM or Ray; in both, one with a leading underscore is."""
    parts = name.split(".")
    if parts[0] not in ("ray", "vllm"):
        return False
    if any(part.startswith("_") for part in parts):
        return True
    module = name.rpartition(".")[0]
    public = RAY_PUBLIC if parts[0] == "ray" else {"vllm", *VLLM_EXTENSION_POINTS}
    return module not in {"", *public}


def test_only_compat_imports_internal_names() -> None:
    found = {
        f"{module} imports {name}"
        for module, path in modules()
        if module not in COMPAT
        for name in imports(path)
        if is_internal(name)
    }
    assert not found, "\n".join(sorted(found))


def private_calls_of_super(path: Path) -> Iterator[str]:
    """Names with a leading underscore that a file calls on `super()`, dunders aside."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                if name.startswith("_") and not name.startswith("__"):
                    yield name


def test_only_compat_extends_internal_methods() -> None:
    """Ruff's SLF001 refuses private names of other objects; this, those of classes that are extended."""
    ours = {"_fill", "_price"}  # of our own policies
    found = {
        f"{module} extends {name}"
        for module, path in modules()
        if module not in COMPAT
        for name in private_calls_of_super(path)
        if name not in ours
    }
    assert not found, "\n".join(sorted(found))
