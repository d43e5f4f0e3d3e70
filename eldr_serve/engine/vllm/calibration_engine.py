"""A vLLM engine for calibration, in the process that imports this module."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams

from eldr_serve.engine.calls import CALIBRATE_KEY, ROUTES_KEY
from eldr_serve.engine.protocol import Sampling
from eldr_serve.engine.vllm.compat.checked import start_errors


class VllmCalibrationEngine:
    """A vLLM engine that counts the experts of prefill and decode separately, for calibration.

    Args:
        kwargs: the result of `engine_kwargs("calibrate", ...)`, and the model.
        port: first port of NIXL's side channel; ranks of tensor parallelism take the following ones.

    Raises:
        UnsupportedEngineError: the engine cannot start, or could not count exactly.
    """

    def __init__(self, kwargs: dict[str, Any], port: int) -> None:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
        with start_errors():
            self._llm = LLM(**kwargs)
        self.max_model_len: int = self._llm.llm_engine.vllm_config.model_config.max_model_len

    @property
    def tokenizer(self) -> Any:
        """Return the model's tokenizer, with the interface of transformers."""
        return self._llm.get_tokenizer()

    def calibrate(self, prompts: Sequence[list[int]], sampling: Sequence[Sampling]) -> list[dict[str, Any]]:
        """Generate answers to tokenized prompts and return the counts of each.

        Returns:
            For each prompt, JSON types: its `token_ids`, `eldr_prefill` and `eldr_decode` (packed
            uint32[L,E]), `eldr_decode_steps`, and `eldr_routes` (packed int[steps,L,k]) or None.
        """
        params = [
            SamplingParams(
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                ignore_eos=settings.ignore_eos,
                seed=settings.seed,
                extra_args={"kv_transfer_params": {CALIBRATE_KEY: True, ROUTES_KEY: settings.routes}},
            )
            for settings in sampling
        ]
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [
            {"token_ids": list(output.prompt_token_ids), **(output.kv_transfer_params or {})}
            for output in outputs
        ]
