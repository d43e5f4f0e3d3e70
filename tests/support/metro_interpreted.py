"""Checks of the Triton kernel, run by test_experts in another process for the interpreter setting.

python metro_interpreted.py interpret | compile
"""

import sys

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from eldr_serve.experts.expert_placement import hosts_of
from eldr_serve.experts.parallel.metro import MetroPlan
from eldr_serve.experts.parallel.metro_triton import TritonMetro, _metro, num_warps
from offline.expert_placement.packed_placements import eplb_placement
from tests.support.tables import random_hosts


def interpret() -> None:
    """Check that the kernel chooses like the plan and stores the values of `stored`."""
    rng = np.random.default_rng(0)
    cases = [
        (1, 1, 1, 0.0),
        (2, 3, 1, 0.0),
        (2, 5, 3, 0.0),
        (3, 24, 9, 0.2),
        (2, 16, 4, 1.0),
        (1, 40, 17, 0.1),
    ]
    for layers, experts, ranks, density in cases:
        check(random_hosts(rng, layers, experts, ranks, density=density), rng)
    load = rng.lognormal(size=(1, 128))
    check(hosts_of(eplb_placement(load, 144, groups=1, nodes=1, ranks=8), 128, 8), rng)


def check(hosts: np.ndarray, rng: np.random.Generator) -> None:
    for plan in (MetroPlan.from_hosts(hosts), MetroPlan.as_written(hosts)):
        check_plan(plan, hosts, rng)


def check_plan(plan: MetroPlan, hosts: np.ndarray, rng: np.random.Generator) -> None:
    values = rng.permutation(hosts.size).reshape(hosts.shape)
    plain, stored = TritonMetro(plan, "cpu"), TritonMetro(plan, "cpu", output_values=values)
    for share in (0.0, 0.6, 1.0):  # later runs find the data of earlier ones
        tokens = (rng.uniform(size=hosts.shape[:2]) < share).astype(np.int32)
        rank = plan.route(tokens)
        active = torch.from_numpy(tokens)
        assert np.array_equal(plain.route(active).numpy(), rank)
        slot = np.take_along_axis(values, np.maximum(rank, 0)[..., None], axis=2)[..., 0]
        assert np.array_equal(stored.route(active).numpy(), np.where(rank < 0, -1, slot))


def compile_for_gpus() -> None:
    """Compile the kernel for the GPUs of the paper and a newer one, without a GPU."""
    types = {name: "*i32" for name in _metro.arg_names[:6]} | {"num_choosing": "i32"}
    sizes = {"num_experts": 128, "num_ranks": 8, "experts_2": 128, "ranks_2": 8, "choosing_2": 16}
    options = {"num_warps": num_warps(16 * 8)}
    for capability in (80, 90, 100):
        source = triton.compiler.ASTSource(
            fn=_metro, signature=types | dict.fromkeys(sizes, "constexpr"), constexprs=sizes
        )
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert kernel.asm["cubin"]


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_for_gpus}[sys.argv[1]]()
