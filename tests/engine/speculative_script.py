"""Run one in-process engine with speculative decoding. Record the verified tokens and the counts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[7, 8, 9, 10] * 12, [5, 6] * 20 + [7], [3] * 33, [11, 12, 13] * 9]
TOKENS = 24
DRAFTS = 3


def main(model: str, drafter: str, out: str, role: Any, method: str, mode: str) -> None:
    from vllm import LLM, SamplingParams

    from eldr_serve.engine.vllm.config import engine_kwargs
    from eldr_serve.engine.vllm.kv.scheduler_side import EldrConnectorScheduler

    drafting: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTS}
    # A draft model and the MTP layer have their own experts, which must not be counted.
    drafting |= {"prompt_lookup_max": 3} if method == "ngram" else {"model": drafter}
    steps: list[Any] = []  # maps from a prompt's number to (position of its first token, its drafts)
    plan = EldrConnectorScheduler.plan_step

    def planned(self: EldrConnectorScheduler, scheduler_output: Any) -> Any:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        steps.append(
            {
                int(name.split("-")[0]): (
                    self._requests[name].num_computed_tokens,
                    list(drafts.get(name, ())),
                )
                for name in scheduler_output.num_scheduled_tokens
            }
        )
        return plan(self, scheduler_output)

    EldrConnectorScheduler.plan_step = planned  # type: ignore[method-assign]
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        num_gpu_blocks_override=64,
        disable_log_stats=False,
        **engine_kwargs(role, device="cpu", speculative_config=drafting, async_scheduling=mode == "async"),
    )
    engine = llm.llm_engine
    records: list[dict[str, Any]] = []
    known = engine.engine_core.engine_core.scheduler.make_stats

    def make_stats(spec_decoding_stats: Any = None, kv_connector_stats: Any = None, *a: Any, **k: Any) -> Any:
        records.extend(kv_connector_stats.data["steps"] if kv_connector_stats else [])
        return known(spec_decoding_stats, kv_connector_stats, *a, **k)

    engine.engine_core.engine_core.scheduler.make_stats = make_stats
    params = SamplingParams(
        max_tokens=TOKENS,
        temperature=0.0,
        detokenize=False,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"do_remote_decode": True}} if role == "prefill" else None,
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    report = {
        "drafting": engine.vllm_config.speculative_config is not None,
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "prompt_counts": [(output.kv_transfer_params or {}).get("eldr_expert_counts") for output in outputs],
        "steps": steps,
        "records": records,
    }
    Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main(*sys.argv[1:])
