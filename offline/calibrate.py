"""Run prompts through engines, and record the experts that they use in a CalibrationTrace.

    eldr calibrate --deployment deployments/cpu_demo.yaml --prompts prompts/ \\
        --out trace.safetensors

It uses a pool of Ray actors, one engine each, with the engine settings of the deployment's decode workers,
in a Ray job (`ray job submit`) or alone. Finished prompts are kept beside the output, so that an interrupted
run resumes.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import ray
import typer
import yaml
from ray.exceptions import RayTaskError
from ray.util.actor_pool import ActorPool

from eldr_serve.commands.run import run
from eldr_serve.data_root import model_folder
from eldr_serve.engine.active_backend import BACKEND
from eldr_serve.engine.calls import DECODE_COUNTS_KEY, DECODE_STEPS_KEY, PREFILL_COUNTS_KEY, ROUTES_KEY
from eldr_serve.engine.protocol import CalibrationEngine, Sampling
from eldr_serve.engine.routes import unpack_routes
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.sample import ExpertSample
from eldr_serve.experts.signature import unpack_counts
from eldr_serve.experts.signature_predictor import tokenizer_fingerprint
from eldr_serve.files import require_folders
from eldr_serve.signatures.window import SampleWindow, trace_of_samples
from loadgen.journal import Journal
from loadgen.progress import progress_bar
from loadgen.workload import WorkloadPrompt, balanced_sample, read_prompts, traffic_sample

_FIRST_PORT = 25600  # port of the first NIXL side channel; each engine has a range with a port per rank
_BATCH = 16  # prompts per call of an actor; a resumed run repeats at most one call of each actor


class EngineActor:
    """An engine that reports the experts of each prompt's prefill and decode."""

    def __init__(self, kwargs: dict[str, Any], port: int) -> None:
        self._engine = BACKEND.start_calibration(kwargs, port)

    def trace(self, prompts: list[WorkloadPrompt], sampling: Sampling, chat: bool) -> list[dict[str, Any]]:
        """Return the records of prompts from this engine. See trace_texts."""
        return trace_texts(self._engine, prompts, sampling, chat)


def trace_texts(
    engine: CalibrationEngine, prompts: Sequence[WorkloadPrompt], sampling: Sampling, chat: bool
) -> list[dict[str, Any]]:
    """Return one record per prompt. A prompt that exceeds the context loses the end of its text.

    Raises:
        UserInputError: the context has no room for a prompt beside its answer.
    """
    longest_prompt = engine.max_model_len - sampling.max_tokens
    if longest_prompt < 1:
        raise UserInputError(
            f"max_tokens is {sampling.max_tokens}, but the engine's context (max_model_len) has "
            f"{engine.max_model_len} tokens: set --max-tokens below that, so that a prompt fits too"
        )
    empty = prompt_tokens(engine.tokenizer, "", chat=True) if chat else []
    tokens = [cut_text(prompt_tokens(engine.tokenizer, p.text, chat), empty, longest_prompt) for p in prompts]
    return trace_tokens(engine, prompts, tokens, [sampling] * len(tokens))


def cut_text(tokens: list[int], empty: list[int], longest: int) -> list[int]:
    """Return at most `longest` tokens of a prompt, including those of the chat template after the text.

    Args:
        empty: the tokens of a prompt without text.
    """
    if len(tokens) <= longest:
        return tokens
    equal = (a == b for a, b in zip(reversed(tokens), reversed(empty), strict=False))
    num_after = min(sum(1 for _ in takewhile(bool, equal)), longest)
    return tokens[: longest - num_after] + tokens[len(tokens) - num_after :]


def trace_tokens(
    engine: CalibrationEngine,
    prompts: Sequence[WorkloadPrompt],
    tokens: Sequence[list[int]],
    sampling: Sequence[Sampling],
) -> list[dict[str, Any]]:
    """Return one record per prompt, given as token ids."""
    return [
        {"id": prompt.id, "domain": prompt.domain, **traced}
        for prompt, traced in zip(prompts, engine.calibrate(tokens, sampling), strict=True)
    ]


def prompt_tokens(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """Return the prompt's token ids, in the chat template if there is one and `chat` is set."""
    if chat and tokenizer.chat_template:
        message = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        return list(tokenizer.encode(rendered, add_special_tokens=False))
    return list(tokenizer.encode(text))


def decode_settings(deployment: Path) -> tuple[str, dict[str, Any], dict[str, str], dict[str, float]]:
    """Return model id, engine arguments, environment and resources of a deployment's decode workers.

    Raises:
        UserInputError: the file is not a deployment of eldr-serve.
    """
    try:
        document = yaml.safe_load(deployment.read_text())
        config = document["applications"][0]["args"]["decode_config"]
        loading = config["model_loading_config"]
        model_id, source = loading["model_id"], loading.get("model_source", loading["model_id"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, IndexError) as error:
        raise UserInputError(f"{deployment} is not a deployment with a decode_config ({error!r})") from error
    device = (config.get("accelerator_config") or {}).get("kind", "gpu")
    arguments = copy.deepcopy(config.get("engine_kwargs") or {})
    engine, environment = BACKEND.calibration_settings(model_folder(source) or source, device, arguments)
    environment |= (config.get("runtime_env") or {}).get("env_vars") or {}
    gpus = float(engine.get("tensor_parallel_size", 1)) if device == "gpu" else 0.0
    return model_id, engine, environment, {"num_gpus": gpus, "num_cpus": 0.1}


def build_trace(
    model_id: str, records: list[dict[str, Any]], top_k: int, routes: bool, vocabulary: Mapping[str, int]
) -> CalibrationTrace:
    """Build a CalibrationTrace of the records, in their order.

    Args:
        vocabulary: token id of each token, from the tokenizer that made the prompts' ids.

    Raises:
        UserInputError: an engine reported no counts.
    """
    missing = [r["id"] for r in records if not r.get(PREFILL_COUNTS_KEY)]
    if missing:
        raise UserInputError(
            f"the engine reported no expert counts for {len(missing)} prompts, first {missing[0]!r}"
        )
    window = SampleWindow(len(records))
    if window.add(map(_sample_of, records)) < len(records):
        why, number = window.refused.most_common(1)[0]
        raise UserInputError(f"the counts of {number} prompts cannot be used: {why}")
    trace = trace_of_samples(
        window.samples,
        model_id,
        tokenizer=tokenizer_fingerprint(vocabulary),
        vocabulary=1 + max(vocabulary.values()),
    )
    if trace.top_k != top_k:
        raise UserInputError(
            f"engines counted {trace.top_k} experts per token, but the model's configuration has {top_k}"
        )
    if not routes:
        return trace
    offsets = np.concatenate([[0], np.cumsum(trace.decode_steps, dtype=np.int64)])
    unpacked = np.concatenate([unpack_routes(record[ROUTES_KEY]) for record in records])
    return replace(trace, routes=unpacked, route_offsets=offsets)


def _sample_of(record: dict[str, Any]) -> ExpertSample:
    return ExpertSample(
        record["id"],
        record["domain"],
        np.array(record["token_ids"], np.uint32),
        unpack_counts(record[PREFILL_COUNTS_KEY]),
        unpack_counts(record[DECODE_COUNTS_KEY]),
        record[DECODE_STEPS_KEY],
    )


def calibrate(
    deployment: Annotated[
        Path, typer.Option(help="Deployment YAML; its decode_config sets model and engine.")
    ],
    prompts: Annotated[
        list[Path], typer.Option(help="JSONL (or .gz) file or folder of prompts; repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="CalibrationTrace file to write (safetensors).")],
    actors: Annotated[int, typer.Option(min=1, help="Number of engines.")] = 1,
    limit: Annotated[int, typer.Option(min=2, help="Maximum prompts, drawn at random.")] = 1000,
    balanced: Annotated[
        bool, typer.Option(help="Draw equally many of each domain, not in proportion.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=2, help="Maximum output tokens of a prompt.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 0.8,
    routes: Annotated[bool, typer.Option(help="Keep each decode step's experts, for replay.")] = False,
    chat: Annotated[bool, typer.Option(help="Wrap prompts in the chat template.")] = True,
    seed: Annotated[int, typer.Option(help="Seed for the choice of prompts and for sampling.")] = 0,
    dry_run: Annotated[bool, typer.Option(help="Print what would run, and stop.")] = False,
) -> None:
    """Capture prefill and decode expert counts of prompts on a pool of engines."""
    model_id, kwargs, environment, resources = decode_settings(deployment)
    kwargs["seed"] = seed
    draw = balanced_sample if balanced else traffic_sample
    sample = draw(read_prompts(prompts), limit, seed)
    if len({p.id for p in sample}) != len(sample):
        raise UserInputError("two prompts have the same id; ids must be unique over all files")
    require_folders(out)
    domains = sorted({p.domain for p in sample})
    typer.echo(
        f"{len(sample)} prompts of {len(domains)} domains, {max_tokens} tokens each, {actors} engine(s)"
    )
    if dry_run:
        return
    settings = {
        "model": model_id,
        "engine": kwargs,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "routes": routes,
        "chat": chat,
        "seed": seed,
        "token_ids": True,
    }
    journal = Journal(out.with_name(f"{out.name}.partial"), settings)
    todo = [p for p in sample if p.id not in journal.entries]
    if len(todo) < len(sample):
        typer.echo(f"resuming an interrupted run: {len(sample) - len(todo)} prompts are done")
    if todo:
        sampling = Sampling(max_tokens, temperature, routes=routes)
        _run_pool(todo, kwargs, environment, resources, actors, journal, (sampling, chat))
    records = [journal.get(p.id) for p in sample]
    trace = build_trace(model_id, records, _top_k(kwargs["model"]), routes, _vocabulary(kwargs["model"]))
    trace.save(out)
    journal.remove()
    typer.echo(f"wrote {out}: {len(records)} requests, {int(trace.decode_steps.sum())} decode steps")


def _run_pool(
    todo: list[WorkloadPrompt],
    kwargs: dict[str, Any],
    environment: dict[str, str],
    resources: dict[str, float],
    actors: int,
    journal: Journal,
    arguments: tuple[Any, ...],
) -> None:
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False, logging_level="warning")
    batches = [todo[i : i + _BATCH] for i in range(0, len(todo), _BATCH)]
    engine = ray.remote(EngineActor).options(**resources, runtime_env={"env_vars": environment})
    pool = [engine.remote(kwargs, _FIRST_PORT + 64 * n) for n in range(min(actors, len(batches)))]
    with progress_bar() as progress:
        bar = progress.add_task("starting engines", total=len(todo))
        work = ActorPool(pool)
        try:
            for records in work.map_unordered(
                lambda actor, batch: actor.trace.remote(batch, *arguments), batches
            ):
                for record in records:
                    journal.put(record["id"], record)
                progress.update(bar, advance=len(records), description="calibrating")
        except RayTaskError as error:  # its text contains the actor's traceback
            raise error.cause if isinstance(error.cause, UserInputError) else error from None
        finally:
            for actor in pool:
                ray.kill(actor)


def _vocabulary(model: str) -> dict[str, int]:
    from transformers import AutoTokenizer

    vocabulary: dict[str, int] = AutoTokenizer.from_pretrained(model).get_vocab()
    return vocabulary


def _top_k(model: str) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    text_config = getattr(config, "text_config", config)
    for name in ("num_experts_per_tok", "experts_per_token", "moe_topk", "top_k_experts"):
        if getattr(text_config, name, None):
            return int(getattr(text_config, name))
    raise UserInputError(f"the configuration of {model} does not set the number of experts that a token uses")


if __name__ == "__main__":
    run(calibrate)
