"""Asynchronous copies of tensors from the device to the host, in vLLM's workers; no step waits for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostCopy:
    """A copy of a tensor on the host, possibly still in progress.

    Args:
        host: destination of the copy.
        event: CUDA event that marks the end of the copy; None: it is complete.
        source: the device tensor, referenced until the copy is complete.
    """

    def __init__(self, host: NDArray[Any], event: Any = None, source: Tensor | None = None) -> None:
        self._host, self._event, self._source = host, event, source

    @property
    def ready(self) -> bool:
        """Return whether the copy is complete."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> NDArray[Any]:
        """Wait for the copy and return the values."""
        if self._event is not None:
            self._event.synchronize()
            self._event = self._source = None
        return self._host

    def __reduce__(self) -> tuple[type[HostCopy], tuple[NDArray[Any]]]:
        # A worker's output is pickled in a thread that has already waited for the step's tokens.
        return HostCopy, (self.wait(),)


class HostCopies:
    """Copies to the host: on CUDA to pinned memory in a separate stream; on CPU nothing is copied."""

    def __init__(self, device: torch.device | str) -> None:
        cuda = torch.device(device).type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if cuda else None

    def start(self, tensor: Tensor) -> HostCopy:
        """Copy a tensor that nothing will overwrite, after the pending work of the current stream."""
        if self._stream is None:
            return HostCopy(tensor.numpy())
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            event: Any = torch.cuda.Event()
            event.record()
        return HostCopy(host.numpy(), event, tensor)


def to_device(values: list[int], device: torch.device) -> Tensor:
    """Return int64[n] on the device; the host does not wait for the copy."""
    host = torch.from_numpy(np.array(values, np.int64))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
