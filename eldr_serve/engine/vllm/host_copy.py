"""Tensors on their way from the device to the host, for which no step waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostCopy:
    """One tensor's values on the host, there or on their way.

    Args:
        host: where they are or will be.
        event: CUDA event after which they are there; None: they are.
        source: the device tensor, kept until then.
    """

    def __init__(self, host: NDArray[Any], event: Any = None, source: Tensor | None = None) -> None:
        self._host, self._event, self._source = host, event, source

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> NDArray[Any]:
        """The values, once they are there."""
        if self._event is not None:
            self._event.synchronize()
            self._event = self._source = None
        return self._host

    def __reduce__(self) -> tuple[type[HostCopy], tuple[NDArray[Any]]]:
        # A worker's output is pickled in a thread that has waited for the step's tokens already.
        return HostCopy, (self.wait(),)


class HostCopies:
    """Starts copies: on CUDA to pinned memory on a stream of their own, on CPU there is nothing to copy."""

    def __init__(self, device: torch.device | str) -> None:
        cuda = torch.device(device).type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if cuda else None

    def start(self, tensor: Tensor) -> HostCopy:
        """Copy a tensor that nothing will overwrite; work that is under way on it is waited for there."""
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
    """int64[n] on the device; the host does not wait for the copy."""
    host = torch.from_numpy(np.array(values, np.int64))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
