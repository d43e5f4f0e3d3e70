"""Run an in-process prefill engine whose prompts are never read, and record which free their blocks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

STEPS = 20  # steps of a tiny model: far below a second, while the lease is 300 s


def main(model: str, out: str, asynchronous: bool) -> None:
    from vllm import LLM, SamplingParams

    from eldr_serve.engine.vllm.compat.nixl import get_kv_transfer_group
    from eldr_serve.engine.vllm.config import engine_kwargs

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=24,
        **engine_kwargs(
            "prefill", device="cpu", block_size=32, async_scheduling=asynchronous, kv_lease_s=300.0
        ),
    )
    engine = llm.llm_engine
    core = engine.engine_core.engine_core  # the engine core runs in this process

    def abandon(name: str) -> None:
        llm.collective_rpc("eldr_abandon", args=([name],))

    def prefill(name: str, *, named: bool = True, stop_after: int | None = None) -> list[str]:
        """Add a prompt of 100 tokens and run it to its end, and return ids of finished prompts."""
        params = {"do_remote_decode": True} | ({"eldr_request": name} if named else {})
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
        # The engine's id differs from the caller's name: a client may choose it by a header.
        engine.add_request(f"client-{name}", {"prompt_token_ids": list(range(1, 101))}, sampling)
        ended: list[str] = []
        for _ in range(STEPS if stop_after is None else stop_after):
            ended += [o.request_id for o in engine.step() if o.finished]
        return ended

    def used() -> int:
        """Return the blocks in use after some more steps."""
        for _ in range(STEPS):
            engine.step()
        return round(core.scheduler.kv_cache_manager.usage * 23)

    connector = get_kv_transfer_group()  # worker side
    report: dict[str, object] = {"idle": used()}

    report["ended"] = prefill("after")
    report["held"] = used()
    abandon("after")
    report["abandoned after its end"] = used()

    abandon("before")
    prefill("before")
    report["abandoned before it came"] = used()

    prefill("during", stop_after=1)
    abandon("during")
    report["abandoned while it was computed"] = used()

    prefill("heartbeat")
    (held_name,) = connector.connector_worker._reqs_to_send
    abandon("heartbeat")
    connector.connector_worker._handle_heartbeat(held_name)
    report["abandoned, prolonged by a heartbeat"] = used()

    prefill("other")
    abandon("oth")
    report["another was abandoned"] = used()
    abandon("other")
    prefill("nameless", named=False)
    abandon("nameless")
    report["without a name"] = used()

    abandoned = connector.worker_side.abandoned
    report["remembered"] = [len(abandoned._names), len(abandoned._abandoned)]
    Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "async")
