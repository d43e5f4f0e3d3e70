"""Ray Serve LLM gives NIXL its ports and engine ids only for connector names that it knows."""

from __future__ import annotations

from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.llm._internal.serve.engines.vllm.kv_transfer.nixl import NixlConnectorBackend


def register_ray_backend() -> None:
    """Have Ray treat EldrConnector as NixlConnector; safe to call again. Checked on Ray 2.60.0."""
    if not KVConnectorBackendFactory.is_registered("EldrConnector"):
        KVConnectorBackendFactory.register_backend("EldrConnector", NixlConnectorBackend)
