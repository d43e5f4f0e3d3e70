"""Expected decode steps of a deployment's engines, from kernel times that NVIDIA measured."""

from __future__ import annotations

from dataclasses import dataclass

from eldr_serve.errors import UserInputError
from eldr_serve.gpu_cost import kernel_times
from eldr_serve.gpu_cost.expected import CONTEXT_TOKENS, ExpectedStep, expected_steps
from eldr_serve.gpu_cost.fitting import fit
from eldr_serve.gpu_cost.readings import Readings, Setting
from eldr_serve.preflight.deployment import EngineDeployment
from eldr_serve.preflight.machine import Gpu

_SYSTEMS = {
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "A100-80G": "a100_sxm",
    "L40S": "l40s",
}
# Kernel times are read for tensor and expert parallelism alone, so these sizes must be 1.
_UNPRICED_SIZES = ("pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True)
class StepTimes:
    """Expected decode steps of one engine.

    Attributes:
        steps: the steps; empty if they are not known.
        why_not: the reason if they are not known, as the end of a sentence.
        source: origin of the times.
    """

    steps: tuple[ExpectedStep, ...] = ()
    why_not: str = ""
    source: str = ""

    def describe(self, role: str) -> str:
        """Return one line about the engines of a role."""
        if not self.steps:
            return f"{role}: expected decode step: {self.why_not}"

        def join(values: list[str]) -> str:
            return " / ".join(values)

        return (
            f"{role}: expected decode step at batch {join([str(s.requests) for s in self.steps])}: "
            f"{join([f'{1e3 * s.seconds:.1f}' for s in self.steps])} ms, of which active experts take "
            f"{join([f'{s.experts_share:.0%}' for s in self.steps])}; placement saves at most "
            f"{join([f'{s.most_saved:.0%}' for s in self.steps])}, if all requests of a batch used the same "
            f"experts instead of drawing their own ({CONTEXT_TOKENS:,} KV tokens each; {self.source})"
        )


def step_times(engines: EngineDeployment, gpu: Gpu | None) -> StepTimes | None:
    """Return the expected decode steps of engines on a GPU; None for prefill engines and for CPUs."""
    if engines.role == "prefill" or gpu is None:
        return None
    if not kernel_times.is_installed():
        return StepTimes(why_not=f"`pip install {kernel_times.REQUIREMENT}` shows it")
    setting = _setting(engines, gpu)
    if setting is None:
        return StepTimes(why_not="there are no kernel times for such engines")
    try:
        return times_of(kernel_times.read(setting, config=engines.model_config))
    except UserInputError as error:
        return StepTimes(why_not=str(error))


def times_of(readings: Readings) -> StepTimes:
    """Return the expected steps of a model on a GPU."""
    return StepTimes(tuple(expected_steps(fit(readings).cost, readings.shape)), source=readings.source)


def _setting(engines: EngineDeployment, gpu: Gpu) -> Setting | None:
    arguments = engines.spec.arguments()
    quantization = arguments.get("quantization")
    if (
        gpu.kind not in _SYSTEMS
        or quantization not in (None, "fp8")
        or any(arguments.get(name, 1) != 1 for name in _UNPRICED_SIZES)
    ):
        return None
    tp = int(arguments.get("tensor_parallel_size", 1))
    ep = tp if arguments.get("enable_expert_parallel") else 1
    return Setting(engines.spec.model_source, _SYSTEMS[gpu.kind], tp, ep, quantization)
