"""Time the fit of a routing table: IDF, greedy layer mask, balanced K-means.

    python -m benchmarks.papers.fit_time

A refit follows every change of the number of decode workers, so it must take only seconds.
"""

from __future__ import annotations

import time
from typing import Annotated

import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.synthetic import EXPERTS, LAYERS, TOP_K
from eldr_serve.commands.run import run
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting.table import fit_table
from loadgen.results import publish

BENCHMARKS = {"fit_time": "default"}


def _trace(n: int, rng: np.random.Generator) -> CalibrationTrace:
    taste = rng.normal(size=(12, LAYERS, EXPERTS)).astype(np.float32)
    tokens = np.full(n, 64, np.uint32)

    def counts() -> np.ndarray:
        result = np.zeros((n, LAYERS, EXPERTS), np.uint32)
        for request in range(n):
            scores = 2 * taste[request % 12] + rng.gumbel(size=(LAYERS, EXPERTS))
            np.put_along_axis(result[request], np.argpartition(-scores, TOP_K, axis=1)[:, :TOP_K], 64, axis=1)
        return result

    names = [str(i) for i in range(n)]
    return CalibrationTrace(
        model="m",
        top_k=TOP_K,
        prefill_counts=counts(),
        decode_counts=counts(),
        decode_steps=tokens,
        prompt_tokens=tokens,
        domains=[f"d{i % 12}" for i in range(n)],
        ids=names,
    )


def fit_time(
    rounds: Annotated[int, typer.Option(min=1, help="Timed fits for each size.")] = 3,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Time fits of 1,000 requests at the shape of Qwen3-30B-A3B for several numbers of workers."""
    rng = np.random.default_rng(seed)
    trace = _trace(1000, rng)
    rows = []
    for workers in (4, 16, 64):
        timed = []  # seconds of the parts: fit, signature, clustering, fit with report
        for _ in range(rounds):
            start = time.perf_counter()
            _, report = fit_table(trace, workers, seed=seed)
            parts = report["signature_s"], report["clustering_s"]
            timed.append((sum(parts), *parts, time.perf_counter() - start))
        names = ("fit_p50_s", "signature_p50_s", "clustering_p50_s", "with_report_p50_s")
        rows.append(
            {"requests": 1000, "workers": workers}
            | dict(zip(names, np.median(timed, axis=0).tolist(), strict=True))
            | {"largest_cluster": max(report["cluster_sizes"])}
        )
    publish(
        "fit_time",
        rows,
        inputs={"L": LAYERS, "E": EXPERTS, "top_k": TOP_K, "rounds": rounds},
        seed=seed,
        notes="synthetic trace of 12 domains",
        out=out,
    )


if __name__ == "__main__":
    run(fit_time)
