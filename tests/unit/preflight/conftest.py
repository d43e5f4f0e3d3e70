"""Fixtures of the tests of GPU costs, for expected steps in `eldr check`."""

from tests.unit.gpu_cost.conftest import kernels, no_kernels

__all__ = ["kernels", "no_kernels"]
