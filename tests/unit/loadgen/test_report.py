"""The report renders in a real browser, without broken or fetched parts."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from loadgen.figures import policy_rows
from loadgen.report import html_report
from loadgen.sentences import client_sentences, step_sentences
from loadgen.statistics import LatencyObjective
from loadgen.trial import Trial
from tests.support.browser import render

POLICIES = ["shortest-queue", "random", "locality-band:band=0.1"]


def trials(engines: dict[str, float] | None) -> list[Trial]:
    rng = np.random.default_rng(2)
    all_trials = []
    for round_ in range(2):
        for number, policy in enumerate(POLICIES):
            requests = []
            for n in range(40):
                tpot = float(rng.lognormal(-4 - 0.1 * number, 0.2))
                ttft = float(rng.lognormal(-2, 0.4))
                requests.append(
                    {
                        "number": n,
                        "id": f"p{n}",
                        "due_s": n / 4,
                        "late_s": 0.001,
                        "ttft_s": ttft,
                        "tpot_s": tpot,
                        "itl_s": [tpot] * 7,
                        "end_s": ttft + 7 * tpot,
                        "handover_s": None if engines is None else 0.004,
                    }
                )
            requests[3] = {"number": 3, "id": "p3", "due_s": 0.75, "late_s": 0.0, "error": "HTTP 503"}
            load = [(t / 2, [int(rng.integers(9)), int(rng.integers(9))]) for t in range(20)]
            all_trials.append(Trial(policy, round_, requests, engines, 40, 20, load))
    return all_trials


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engines", "bad"),
    [
        (dict(active_experts=2500.0, steps=100.0, requests=800.0, seconds=3.0, token_seconds=24.0), True),
        (None, False),
    ],
)
async def test_the_report_renders_in_a_browser(
    tmp_path: Path, engines: dict[str, float] | None, bad: bool
) -> None:
    trials_of_engines = trials(engines)
    rows = policy_rows(
        POLICIES, trials_of_engines, warm_up_s=2, seconds=8, objective=LatencyObjective(500, 30), seed=0
    )
    page = tmp_path / "report.html"
    sentences, remarks = step_sentences(rows), client_sentences(rows, rounds=2)
    assert bool(sentences) == (engines is not None)
    page.write_text(
        html_report(
            rows,
            trials_of_engines,
            sentences=sentences,
            remarks=remarks,
            verdict="240 requests, 6 FAILED",
            bad=bad,
            notes="<b>not markup</b>",
            settings={"rate": 4.0, "commit": "abc"},
            warm_up_s=2,
            seconds=8,
        )
    )
    html, widths, picture = await render(page)
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"), float)
    assert pixels.shape[0] >= 2000
    assert pixels.std() > 20  # it is not blank
    colours = pixels.reshape(-1, 3) @ (65536, 256, 1)
    assert len(np.unique(colours)) > 100  # pictures, not only text
    # Each quarter of the page has content.
    assert all(quarter.std() > 5 for quarter in np.array_split(pixels, 4))
    assert len(widths) == 5
    assert min(widths) > 300  # no image is broken
    # Effects of placement, picture, clients' figures; problems of a run come before these.
    places = [*map(html.index, sentences), html.index("<img"), *map(html.index, remarks)]
    places.insert(0 if bad else len(places), html.index("6 FAILED"))
    assert len(places) > 2
    assert places == sorted(places)
    assert places[-1] < html.index("<table")
    assert ('class="bad"' in html) == bad
    for text in ("<title>Policies compared</title>", "&lt;b&gt;not markup", *POLICIES):
        assert text in html
