"""Prompts of a capture, and signatures of them that placement can use.

Shapes: N prompts, L layers, E experts. A capture is a calibration trace with routes and token ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from benchmarks.papers.figures.common import Options
from benchmarks.papers.figures.eldr import TASKS
from benchmarks.papers.signature_methods import Prompts
from eldr_serve.arrays import Floats
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.online_predictor import OnlinePredictor
from eldr_serve.experts.signature_predictor import SignaturePredictor
from examples.demo_model import WEIGHTS
from offline.predictor import expert_frequencies, fit_signature_predictor, token_shares
from offline.route_files import MODELS, read_samples, trace_of_routes
from offline.scenario import read_calibration_trace

SIZES = (50, 100, 300, 1000)  # calibration prompts
USUAL = 300
Counts = NDArray[np.float32]
Index = NDArray[np.int64]


def prompts_of(options: Options) -> Prompts:
    """Return the prompts of the options' trace. Raise UserInputError if it lacks routes or token ids."""
    path = options.trace("a calibration trace with routes and token ids (offline.calibrate --routes)")
    trace = read_calibration_trace(path)
    if trace.routes is None or trace.token_ids is None:
        raise UserInputError(f"{path} has no routes or no token ids; make it with offline.calibrate --routes")
    return Prompts.from_trace(trace)


def members_of_group(trace: CalibrationTrace, group: str) -> Index:
    """Return the indices of a workload's prompts. Raise UserInputError if they are too few."""
    task = np.isin(trace.domains, TASKS)
    members = np.flatnonzero({"all": np.ones_like(task), "language": ~task, "task": task}[group])
    if len(members) <= 2 * USUAL:
        raise UserInputError(f"the trace has {len(members)} prompts of the workload {group}, too few")
    return members


def fit_and_test(trace: CalibrationTrace, group: str, size: int, seed: int) -> tuple[Index, Index]:
    """Return prompts to fit on, nested by size, and prompts to measure with, the same for every size."""
    order = np.random.default_rng(seed).permutation(members_of_group(trace, group))
    most = min(max(SIZES), len(order) // 2)
    return order[: min(size, most)], order[most:]


def members_by_domain(trace: CalibrationTrace, among: Index) -> list[Index]:
    """Return the prompts of each domain. Domains with less than 50 prompts are put together."""
    names = np.array(trace.domains)[among]
    parts = [among[names == name] for name in np.unique(names)]
    rare = [part for part in parts if len(part) < 50]
    return [part for part in parts if len(part) >= 50] + ([np.concatenate(rare)] if rare else [])


def gptoss_prompts(path: Path) -> Prompts:
    """Read the records that have a prompt. Their first steps replace prefill.

    The demo model's tokenizer replaces GPT-OSS's, which is not available.
    """
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    model, samples = read_samples(path, MODELS["gpt-oss-20b"])
    text = {str(record["id"]): record["prompt"] for record, _ in samples if record.get("prompt")}
    trace = trace_of_routes(model, [sample for sample in samples if str(sample.record["id"]) in text])
    tokens = [np.array(tokenizer.encode(text[name])) for name in trace.ids]
    return Prompts(trace, token_shares(tokens, len(tokenizer)), expert_frequencies(trace))


def fitted_predictor(trace: CalibrationTrace, fit: Index) -> SignaturePredictor:
    """Return a predictor that is fitted to the prompts with these indices."""
    return fit_signature_predictor(trace.subset_without_routes(fit))[0]


def predicted_counts(trace: CalibrationTrace, predictor: SignaturePredictor, members: Index) -> Counts:
    """Return float32[N, L, E]: predicted counts of the members, zeros elsewhere."""
    prompts = trace.prompts
    counts = np.zeros(trace.prefill_counts.shape, np.float32)
    for member in members:
        counts[member] = predictor.predict(prompts[member])
    return counts


def recent_mean_counts(trace: CalibrationTrace, predictor: SignaturePredictor, stream: Index) -> Counts:
    """Predict each prompt's counts by the mean over the prompts shortly before it in the stream."""
    predicted = np.zeros(trace.prefill_counts.shape, np.float32)
    mean = predictor.mean.copy()
    for member in stream:
        tokens = trace.prompt_tokens[member]
        predicted[member] = tokens * mean
        mean += (trace.prefill_counts[member] / tokens - mean) / 64
    return predicted


def online_counts(trace: CalibrationTrace, predictor: SignaturePredictor, stream: Index) -> Counts:
    """Predict each prompt, then learn its true counts. Use the recent mean while the predictor is off."""
    prompts = trace.prompts
    online = OnlinePredictor(predictor)
    counts = recent_mean_counts(trace, predictor, stream)
    for member in stream:
        predicted = online.predict(prompts[member])
        if predicted is not None:
            counts[member] = predicted
        online.observe(prompts[member], trace.prefill_counts[member])
    return counts


def scale_to_counts(trace: CalibrationTrace, frequencies: NDArray[Any]) -> Counts:
    """Return counts float32[N, L, E] of prompts with these frequencies per token [N, L*E]."""
    shape = trace.prefill_counts.shape
    return np.asarray((frequencies.reshape(shape) * trace.prompt_tokens[:, None, None]).astype(np.float32))


def decode_frequencies(trace: CalibrationTrace) -> Floats:
    """Return float64[N, L*E], the frequencies of decode."""
    return trace.decode_probability.reshape(len(trace.ids), -1).astype(np.float64)


def frequencies_of(trace: CalibrationTrace, counts: NDArray[Any], members: Index) -> Floats:
    """Return float64[n, L*E], the members' counts per token."""
    return np.asarray(counts[members].reshape(len(members), -1) / trace.prompt_tokens[members, None])
