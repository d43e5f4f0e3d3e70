"""Greedy answers of one plain vLLM engine without connector and router: a script with JSON in and out."""

import json
import sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    job = json.loads(sys.argv[1])
    llm = LLM(
        model=job["model"],
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=64,
        enforce_eager=True,
        block_size=32,
    )
    params = SamplingParams(max_tokens=job["max_tokens"], temperature=0.0)
    # One at a time: engines are not batch-invariant.
    completions = [llm.generate([p], params, use_tqdm=False)[0].outputs[0].text for p in job["prompts"]]
    chats = [
        llm.chat([{"role": "user", "content": p}], params, use_tqdm=False)[0].outputs[0].text
        for p in job["prompts"]
    ]
    with open(job["out"], "w") as file:
        json.dump({"completions": completions, "chats": chats}, file)
