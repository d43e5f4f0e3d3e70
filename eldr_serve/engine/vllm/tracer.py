"""A vLLM engine for calibration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams

from eldr_serve.engine.keys import CALIBRATE, ROUTES
from eldr_serve.engine.protocol import Sampling
from eldr_serve.engine.vllm.compat.checked import clear_start


class VllmTracer:
    """See protocol.Tracer.

    Args:
        kwargs: the result of `engine_kwargs("calibrate", ...)`, and the model.
        port: first port of NIXL's side channel; ranks of tensor parallelism take the following ones.

    Raises:
        UnsupportedEngineError: the engine cannot start, or could not count exactly; one sentence.
    """

    def __init__(self, kwargs: dict[str, Any], port: int) -> None:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
        with clear_start():
            self._llm = LLM(**kwargs)
        self.max_model_len: int = self._llm.llm_engine.vllm_config.model_config.max_model_len

    @property
    def tokenizer(self) -> Any:
        """See protocol.Tracer."""
        return self._llm.get_tokenizer()

    def trace(self, prompts: Sequence[list[int]], sampling: Sequence[Sampling]) -> list[dict[str, Any]]:
        """See protocol.Tracer."""
        params = [
            SamplingParams(
                max_tokens=one.max_tokens,
                temperature=one.temperature,
                ignore_eos=one.ignore_eos,
                seed=one.seed,
                extra_args={"kv_transfer_params": {CALIBRATE: True, ROUTES: one.routes}},
            )
            for one in sampling
        ]
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [
            {"token_ids": list(output.prompt_token_ids), **(output.kv_transfer_params or {})}
            for output in outputs
        ]
