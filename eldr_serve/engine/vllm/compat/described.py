"""The description of an engine that is not started, in a process of `eldr check`."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from eldr_serve.engine.vllm.compat.checked import internal_imports

with internal_imports():
    from vllm.config import parallel, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.layers.fused_moe import experts
    from vllm.model_executor.model_loader.utils import get_model_architecture, initialize_model
    from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.utils import select_common_block_size

from eldr_serve.engine.vllm.compat import moe
from eldr_serve.engine.vllm.compat.engine import check_engine
from eldr_serve.engine.vllm.compat.kv_cache import counted_group
from eldr_serve.engine.vllm.compat.moe import (
    avoid_kernels_that_hide_choices,
    check_kernel_of_ranks,
    reveals_experts,
)
from eldr_serve.engine.vllm.config import CONFIG_KEY
from eldr_serve.engine.vllm.eplb import read_experts_config
from eldr_serve.errors import ConfigurationError

# Copied from vLLM: names of functions that look for the GPU wheel's kernel libraries, which are absent here.
_GPU_WHEEL = (
    "has_deep_gemm",
    "has_flashinfer",
    "has_flashinfer_cutlass_fused_moe",
    "has_flashinfer_moe",
    "has_flashinfer_trtllm_fused_moe",
    "has_triton_kernels",
)
_SELECTORS = (
    "vllm.model_executor.kernels.linear",
    "vllm.model_executor.layers.fused_moe",
    "vllm.model_executor.layers.quantization",
    "vllm.utils",
    moe.__name__,
)


class _FirstRank:
    """Stand-in for the first rank of a process group: it has the group's size, but cannot communicate."""

    def __init__(self, size: int) -> None:
        self.world_size = size
        self.ranks = list(range(size))
        self.rank = self.rank_in_group = self.local_rank = 0
        self.is_first_rank = True
        self.is_last_rank = size == 1
        self.device_group = self.cpu_group = self
        self.device_communicator = None

    def size(self) -> int:
        return self.world_size


class _Weightless(TorchFunctionMode):
    """A mode in which tensors of more than 4096 elements are created without storage."""

    _MAKERS = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func in self._MAKERS and options.get("device") is None:
            tensor = func(*args, **options | {"device": "meta"})
            if tensor.numel() > 4096:
                return tensor
        return func(*args, **options)


@contextmanager
def _accept_eplb(capability: tuple[int, int] | None) -> Iterator[None]:
    """Make vLLM accept EPLB, which it has on GPUs only, if a GPU is described."""
    platform = parallel.current_platform

    class WithEplb(type(platform)):  # type: ignore[misc]
        def is_cuda_alike(self) -> bool:
            return capability is not None or super().is_cuda_alike()

    parallel.current_platform = WithEplb()
    try:
        yield
    finally:
        parallel.current_platform = platform


@contextmanager
def _select_kernels_for(capability: tuple[int, int] | None) -> Iterator[None]:
    """Make vLLM select kernels for a GPU of this compute capability; None: for this machine."""
    if capability is None:
        yield
        return
    major, minor = capability

    class Described(Platform):
        _enum = PlatformEnum.CUDA
        device_name = device_type = "cuda"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(major, minor)

        @classmethod
        def supports_fp8(cls) -> bool:
            return (major, minor) >= (8, 9)

    for module_info in pkgutil.iter_modules(experts.__path__, f"{experts.__name__}."):
        with suppress(ImportError, AttributeError):  # some modules need their kernel library
            importlib.import_module(module_info.name)
    replacements: dict[str, Any] = dict.fromkeys(_GPU_WHEEL, lambda: True)
    replacements |= {
        "current_platform": Described(),
        # For some all2all_backends vLLM rounds sizes up, with classes that it imports only on GPUs.
        "maybe_roundup_layer_hidden_size": lambda hidden_size, *_: hidden_size,
    }
    originals = [
        (module, name, vars(module)[name])
        for key, module in list(sys.modules.items())
        if key.startswith(_SELECTORS)
        for name in replacements.keys() & vars(module).keys()
    ]
    try:
        for module, name, _ in originals:
            setattr(module, name, replacements[name])
        yield
    finally:
        for module, name, value in originals:
            setattr(module, name, value)


def _block_sizes(declared: int | MultipleOf) -> str:
    return f"multiples of {declared.base}" if isinstance(declared, MultipleOf) else str(declared)


class DescribedEngine:
    """An engine's configuration and its first rank's model, whose tensors have no storage.

    vLLM builds both on its CPU platform; only kernels of MoE and linear layers are selected for the described
    GPU.

    Args:
        arguments: arguments of AsyncEngineArgs; the model is a folder with a config.json.
        capability: compute capability of the described GPU; None: the engine runs on a CPU.

    Raises:
        ValueError: vLLM refuses the arguments.
    """

    def __init__(self, arguments: dict[str, Any], capability: tuple[int, int] | None) -> None:
        ranks, data_ranks = (arguments.get(f"{kind}_parallel_size") or 1 for kind in ("tensor", "data"))
        all_arguments = arguments | {
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "distributed_executor_backend": "mp" if ranks > 1 else "uni",
        }
        if capability is None:
            all_arguments["enable_lora"] = False  # adapters on CPUs leave the experts' kernel as it is
        with _accept_eplb(capability):
            engine_args = AsyncEngineArgs(**all_arguments)
            self.config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        if capability is not None and self.config.model_config.use_mla:
            # The MLA backend for CPUs with AMX refuses some numbers of heads that a rank on a GPU may have.
            self.config.attention_config.backend = AttentionBackendEnum.CPU_MLA
        world = ranks * data_ranks
        sizes = {"WORLD": world, "TP": ranks, "DP": data_ranks, "EP": world}
        for name in ("WORLD", "TP", "EP", "PP", "DP", "DCP", "PCP", "EPLB"):
            setattr(parallel_state, f"_{name}", _FirstRank(sizes.get(name, 1)))
        get_model_architecture(self.config.model_config)  # this imports the model's modules for this machine
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.config.model_config.dtype)
        try:
            with set_current_vllm_config(self.config), _Weightless(), _select_kernels_for(capability):
                avoid_kernels_that_hide_choices(self.config)  # EldrWorker does the same
                self._model = initialize_model(self.config)
        finally:
            torch.set_default_dtype(default_dtype)
        self._capability = capability
        self._layers = self.config.compilation_config.static_forward_context

    def weight_bytes(self) -> int:
        """Return the size of the first rank's parameters, bytes."""
        return sum(p.numel() * p.element_size() for p in self._model.parameters())

    def kernels(self) -> set[tuple[str, bool]]:
        """Return (name, whether it reveals the experts that it chooses) of the MoE layers' kernels."""
        return {
            (kind.__name__, not method.is_monolithic or (kind is not type(method) and reveals_experts(kind)))
            for kind, method in self._kernels()
        }

    def _kernels(self) -> Iterator[tuple[Any, Any]]:
        """Yield (class of the kernel, vLLM's method that runs it) of each MoE layer."""
        for layer in self._layers.values():
            if getattr(layer, "router", None) is not None:
                method = layer._quant_method
                yield getattr(method, "experts_cls", None) or type(method), method

    def expert_shape(self) -> tuple[int, int]:
        """Return (MoE layers, experts of a layer); zeros without MoE layers."""
        all_routers = (getattr(layer, "router", None) for layer in self._layers.values())
        routers = [router for router in all_routers if router is not None]
        redundant = self.config.parallel_config.eplb_config.num_redundant_experts
        return len(routers), int(routers[0].global_num_experts) - redundant if routers else 0

    def check_counting(self) -> None:
        """Raise UnsupportedEngineError as EldrConnector and PlacedWorker would.

        Raises:
            UnsupportedEngineError: see above.
            ConfigurationError: attention on CPUs does not support the block size.
        """
        check_engine(self.config, "cpu" if self._capability is None else "cuda")
        for kind, method in self._kernels():
            if method.is_monolithic:
                check_kernel_of_ranks(kind, method.moe)
        if self._capability is not None and CONFIG_KEY in (self.config.additional_config or {}):
            read_experts_config(self.config)  # PlacedWorker does the same
        kv_cache = self._plan_kv_cache(2**60)
        counted_group(self.config, kv_cache)
        if self._capability is None:
            self._check_block_size(kv_cache)

    def _check_block_size(self, kv_cache: KVCacheConfig) -> None:
        """Raise ConfigurationError if attention on CPUs does not support blocks of this size."""
        for group in kv_cache.kv_cache_groups:
            backends = [self._layers[name].get_attn_backend() for name in group.layer_names]
            try:
                select_common_block_size(group.kv_cache_spec.block_size, list(dict.fromkeys(backends)))
            except ValueError as error:
                size = self.config.cache_config.block_size
                declared = [size for b in backends for size in b.get_supported_kernel_block_sizes()]
                sizes = sorted({_block_sizes(size) for size in declared})
                raise ConfigurationError(
                    f"block_size is {size}: attention on CPUs supports only {' and '.join(sizes)}",
                    field="block_size",
                ) from error

    def kv_cache(self, available: int) -> tuple[int, float]:
        """Return the capacity of a KV cache: tokens, and concurrent sequences of max_model_len tokens.

        Args:
            available: size of the KV cache of one rank, bytes.

        Raises:
            ValueError: the cache cannot hold one sequence.
        """
        kv_cache = self._plan_kv_cache(available)
        sequences = kv_cache_utils.get_max_concurrency_for_kv_cache_config(self.config, kv_cache)
        return int(sequences * self.config.model_config.max_model_len), sequences

    def _plan_kv_cache(self, available: int) -> KVCacheConfig:
        specs = {
            name: layer.get_kv_cache_spec(self.config)
            for name, layer in self._layers.items()
            if hasattr(layer, "get_kv_cache_spec") and getattr(layer, "router", None) is None
        }
        specs = {name: spec for name, spec in specs.items() if spec is not None}
        backends = [self._layers[name].get_attn_backend() for name in specs]
        layouts = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
        resolve_kv_cache_layout(self.config, [layouts], specs.values())
        (kv_cache,) = kv_cache_utils.get_kv_cache_configs(self.config, [specs], [available])
        return kv_cache
