"""`offline.routes`: published routes as calibration traces, what takes them, and bad files."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.papers.figures import director, eldr
from benchmarks.papers.figures.predicted_signatures import gptoss_prompts
from benchmarks.papers.reproduce import reproduce
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.expert_placement import ExpertPlacement
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.scheduling import StepCost
from offline.place import place
from offline.route_files import MODELS, read_trace_of_routes
from offline.scenario import Routes, ScenarioInputs, read_calibration_trace, read_scenario
from offline.simulate import replace_traces
from offline.simulation.calibration import FittedCost
from tests.support.in_process import command, sentence
from tests.support.shipped import ROOT
from tests.support.traces import route_file, route_records

DEEPSEEK, GPTOSS = "deepseek-v2-lite", "gpt-oss-20b"
SCENARIO = ROOT / "examples/scenarios/deepseek_v2_lite.yaml"
Record = dict[str, Any]


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return route_records(DEEPSEEK, each=40, tokens=(30, 50))


@pytest.fixture(scope="module")
def published(records: list[Record], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return route_file(tmp_path_factory.mktemp("published") / "routes.jsonl.gz", records)


@pytest.fixture(scope="module")
def traces(published: Path) -> tuple[Path, Path]:
    """Provide a trace of the published routes, with answers of equal length, and one of held-out samples."""
    out = published.with_name("trace.safetensors")
    equal = {"output_tokens": 14, "min_output_tokens": 14, "held_out": 0.3}
    done = command("offline.routes", published, model=DEEPSEEK, out=out, **equal)
    assert done.exit_code == 0, done.stderr
    return out, out.with_name("trace.held_out.safetensors")


def convert(file: Path, out: Path, **options: Any) -> CalibrationTrace:
    done = command("offline.routes", file, out=out, **options)
    assert done.exit_code == 0, done.stderr
    assert f"wrote {out}" in done.stdout
    return CalibrationTrace.load(out)


@pytest.mark.parametrize("name", [DEEPSEEK, GPTOSS])
@pytest.mark.parametrize("ids", [False, True])
def test_a_sample_becomes_the_counts_of_its_prompt_and_the_routes_of_its_answer(
    name: str, ids: bool, tmp_path: Path
) -> None:
    model, records = MODELS[name], route_records(name, each=2, tokens=(170, 180))
    chosen = [[model.alphabet.index(letter) for letter in record["routes"]] for record in records]
    if ids:
        records = [record | {"routes": own} for record, own in zip(records, chosen, strict=True)]
    trace = convert(route_file(tmp_path / "routes.jsonl.gz", records), tmp_path / "t.safetensors")
    assert (trace.model, trace.top_k, trace.ids) == (name, model.top_k, ["r0", "r1", "r2", "r3"])
    assert trace.domains == ["law", "intent"] * 2
    for n, record_routes in enumerate(chosen):
        routes = np.array(record_routes).reshape(-1, model.layers, model.top_k)
        prompt, end = (len(routes) // 2, len(routes)) if name == DEEPSEEK else (96, 160)
        assert trace.prompt_tokens[n] == prompt
        assert np.array_equal(trace.decode_routes(np.array([n])), routes[prompt:end])
        for layer in (0, model.layers - 1):
            counts = Counter(routes[:prompt, layer].ravel().tolist())
            assert {e: c for e, c in enumerate(trace.prefill_counts[n, layer].tolist()) if c} == counts


def test_options_say_which_tokens_are_prompt_and_answer(
    published: Path, records: list[Record], tmp_path: Path
) -> None:
    out = tmp_path / "t.safetensors"
    lengths = np.array([record["tokens"] for record in records])
    quarter = convert(published, out, prompt_share=0.25)
    assert quarter.prompt_tokens.tolist() == (lengths // 4).tolist()
    assert quarter.decode_steps.tolist() == (lengths - lengths // 4).tolist()
    ten = convert(published, out, prompt_tokens=10, output_tokens=25)
    assert set(ten.prompt_tokens.tolist()) == {10}
    assert ten.decode_steps.tolist() == np.minimum(lengths - 10, 25).tolist()
    assert min(ten.decode_steps) < 25
    long = convert(published, out, prompt_tokens=10, output_tokens=25, min_output_tokens=25)
    assert set(long.decode_steps.tolist()) == {25}
    assert len(long.ids) == (lengths >= 35).sum()


def test_samples_are_drawn_and_held_out_by_domain(published: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.safetensors"
    held_out = tmp_path / "t.held_out.safetensors"
    contents = []
    for seed in (0, 0, 1):
        fitted = convert(published, out, held_out=0.25, seed=seed)
        held_out_trace = CalibrationTrace.load(held_out)
        assert Counter(fitted.domains) == {"law": 30, "intent": 30}
        assert Counter(held_out_trace.domains) == {"law": 10, "intent": 10}
        assert not set(fitted.ids) & set(held_out_trace.ids)
        contents.append((out.read_bytes(), held_out.read_bytes()))
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]
    few = convert(published, out, domain="law", samples=6, held_out=0.5)
    assert Counter(few.domains) == {"law": 3}
    assert set(CalibrationTrace.load(held_out).domains) == {"law"}


def test_published_files_are_read_where_traces_are(published: Path, tmp_path: Path) -> None:
    assert read_calibration_trace(published, "routes").model == DEEPSEEK
    records = [record | {"prompt": "a b"} for record in route_records(GPTOSS, each=5, tokens=(150, 170))]
    records[0]["prompt"] = None  # this prompt is not published
    path = route_file(tmp_path / "routes.jsonl.gz", records)
    long = [record for record in records if record["decode_tokens"] >= 160]
    assert 1 < len(long) < 10
    assert read_calibration_trace(path, "gpt-oss").ids == [record["id"] for record in long]
    prompts = gptoss_prompts(path)
    assert prompts.trace.ids == [record["id"] for record in long if record["prompt"]]
    assert prompts.trace.routes is not None


# -- everything that takes a trace --------------------------------------------------------------------


def test_a_table_is_fitted_to_it(traces: tuple[Path, Path], tmp_path: Path) -> None:
    out, report = tmp_path / "table.safetensors", tmp_path / "report.json"
    done = command("offline.fit", trace=traces[0], workers=2, out=out, report=report)
    assert done.exit_code == 0, done.stderr
    table = RoutingTable.load(out)
    assert (table.model, table.num_layers, table.num_experts) == (DEEPSEEK, 26, 64)
    by_domain = json.loads(report.read_text())["clusters_by_domain"]
    assert sorted(map(sorted, by_domain.values())) == [[0, 28], [0, 28]]


def test_experts_are_placed_by_it(traces: tuple[Path, Path], published: Path, tmp_path: Path) -> None:
    for n, trace in enumerate((traces[0], published)):
        place(trace=trace, method="eplb", ranks=4, redundant=8, batch=16, out=tmp_path / f"{n}.json")
        assert ExpertPlacement.load(tmp_path / f"{n}.json").physical_to_logical.shape == (26, 72)


@pytest.mark.parametrize(
    ("figure", "requests"),
    [
        ("eldr rates", 60),
        ("eldr drift", 60),
        ("eldr scaling", 60),
        ("eldr prefix-cache", 60),
        ("metro fig5", 2),
        ("grace fig6", 2),
        pytest.param("director fig7", 2, marks=pytest.mark.slow),
    ],
)
def test_figures_are_reproduced_with_it(
    figure: str, requests: int, traces: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eldr, "RATES", (60,))
    monkeypatch.setattr(eldr, "OUTPUT_TOKENS", 8)
    monkeypatch.setattr(director, "RANKS", 4)
    monkeypatch.setattr(director, "CLUSTERS", ("H200",))
    out = tmp_path / "figure.json"
    reproduce(*figure.split(), trace=[traces[0]], requests=requests, out=out)
    assert json.loads(out.read_text())["rows"]


def small_scenario(tmp_path: Path) -> Path:
    """Copy the example with fewer requests and one seed."""
    path = tmp_path / "scenario.yaml"
    text = SCENARIO.read_text().replace("requests: 8000", "requests: 200").replace("[0, 1]", "[0]")
    path.write_text(text)
    return path


@pytest.mark.parametrize("workers", [8, 16])
def test_the_example_is_simulated_by_size_cost_and_held_out_samples(
    workers: int, traces: tuple[Path, Path], tmp_path: Path
) -> None:
    cost, out = tmp_path / "cost.json", tmp_path / "result.json"
    fitted = StepCost(fixed_s=0.001, per_expert_s=3e-6)
    FittedCost(cost=fitted, steps=1, rms_relative_error=0, median_relative_error=None, source="a test").save(
        cost
    )
    done = command(
        "offline.simulate",
        config=small_scenario(tmp_path),
        trace=traces[1],
        fit_trace=traces[0],
        cost=cost,
        workers=workers,
        out=out,
    )
    assert done.exit_code == 0, done.stderr
    result = json.loads(out.read_text())
    inputs = result["inputs"]
    assert inputs["cluster"]["decode"]["workers"] == workers
    assert StepCost(**inputs["cluster"]["decode"]["cost"]) == fitted
    assert inputs["arrivals"]["requests"] == 25 * workers
    assert inputs["arrivals"]["rate_per_s"] == 27 * workers
    active = {row["policy"]: row["active_experts"] for row in result["rows"]}
    assert active["marginal-cost"] < 0.9 * active["shortest-queue"]
    assert active["locality-band"] < 0.9 * active["shortest-queue"]


def test_tables_are_fitted_to_other_samples_than_those_that_run(
    traces: tuple[Path, Path], tmp_path: Path
) -> None:
    scenario = read_scenario(small_scenario(tmp_path))
    inputs = ScenarioInputs(replace_traces(scenario, traces[1], traces[0]), 0)
    assert inputs.table is not None
    assert inputs.table.cluster_sizes.sum() == len(CalibrationTrace.load(traces[0]).ids)
    assert set(inputs.requests.kind) == set(range(len(CalibrationTrace.load(traces[1]).ids)))
    law = scenario.experts.model_copy(update={"domains": ("law",)})
    inputs = ScenarioInputs(
        replace_traces(scenario.model_copy(update={"experts": law}), traces[1], traces[0]), 0
    )
    assert inputs.table is not None
    assert set(inputs.table.domains) == {"law"}


# -- bad input ----------------------------------------------------------------------------------------


def cut_short(path: Path, records: list[Record]) -> None:
    content = gzip.compress("".join(f"{json.dumps(record)}\n" for record in records).encode(), mtime=0)
    path.write_bytes(content[: len(content) // 2])


def write_changed(line: int, **changes: Any) -> Callable[[Path, list[Record]], None]:
    """Return a function that writes the file with changes of one record; None removes a field."""

    def write(path: Path, records: list[Record]) -> None:
        own_records = [dict(record) for record in records]
        own_records[line - 1] = {k: v for k, v in (own_records[line - 1] | changes).items() if v is not None}
        route_file(path, own_records)

    return write


def write_edited(line: int, edit: Callable[[str], Any]) -> Callable[[Path, list[Record]], None]:
    """Return a function that writes the file with other routes of one record."""
    return lambda path, records: write_changed(line, routes=edit(records[line - 1]["routes"]))(path, records)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (cut_short, "routes.jsonl.gz is cut short after line "),
        (lambda path, _: path.write_bytes(gzip.compress(b'{"id": "a", "dom')), "line 1 is not JSON"),
        (lambda path, _: path.write_bytes(gzip.compress(b"[1]\n")), "line 1 has no field 'id'"),
        (lambda path, _: path.write_bytes(gzip.compress(b"")), "is empty: get the whole file"),
        (write_changed(2, routes=None), "line 2 has no field 'routes'"),
        (write_changed(2, tokens=None), "line 2: tokens of deepseek-v2-lite is None, not a number of tokens"),
        (
            write_changed(1, tokens=None),
            "line 1 has no field 'tokens' (deepseek-v2-lite) or 'decode_tokens' (gpt",
        ),
        (write_edited(3, lambda routes: routes[:-1]), "line 3: routes are"),
        (write_edited(3, lambda routes: ""), "line 3: routes are 0 experts, not"),
        (write_edited(3, lambda routes: [0.5]), "line 3: routes are neither letters nor ids"),
        (
            write_edited(2, lambda routes: f"{routes[:163]}!{routes[164:]}"),
            "line 2: routes[163] is '!' (token 1, layer 1, choice 1), which names none of the 64 experts",
        ),
        (write_edited(2, lambda routes: f"é{routes[1:]}"), "line 2: routes[0] is 'é'"),
        (write_edited(2, lambda routes: [64] * len(routes)), "line 2: routes[0] is 64 (token 0"),
        (write_edited(2, lambda routes: [-1] * len(routes)), "line 2: routes[0] is -1 (token 0"),
        (
            write_edited(2, lambda routes: "A" * len(routes)),
            "routes name an expert of layer 0 twice for token 0",
        ),
        (write_changed(4, id="r0"), "line 4: id 'r0' is that of line 1"),
    ],
)
def test_bad_files_are_refused_in_one_sentence_and_nothing_is_written(
    write: Callable[[Path, list[Record]], None], message: str, records: list[Record], tmp_path: Path
) -> None:
    path = tmp_path / "routes.jsonl.gz"
    write(path, records)
    error = sentence(command("offline.routes", path, out=tmp_path / "t.safetensors"))
    assert message in error
    assert str(path) in error
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "mixtral"}, "unknown model 'mixtral': there are deepseek-v2-lite, gpt-oss-20b"),
        ({"model": GPTOSS}, "line 1: decode_tokens of gpt-oss-20b is None"),
        ({"prompt_share": 1.0}, "--prompt-share must be above 0 and below 1, got 1"),
        ({"prompt_share": 0.5, "prompt_tokens": 9}, "give --prompt-share or --prompt-tokens, not both"),
        ({"held_out": 1.0}, "--held-out must be at least 0 and below 1, got 1"),
        ({"output_tokens": 4, "min_output_tokens": 5}, "at most 4 output tokens are kept"),
        ({"prompt_tokens": 500}, "none of 80 samples is long enough"),
        ({"samples": 41}, "has 40 samples of domain 'intent' that are long enough, not 41: lower --samples"),
        ({"samples": 1, "held_out": 0.5}, "--samples is 1, which leaves none to hold out"),
        ({"domain": "code"}, "has 0 samples of domain 'code' that are long enough, not 1"),
        ({"out": "nowhere/t.safetensors"}, "nowhere does not exist"),
        ({"out": "t.json"}, "must end in .safetensors"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(
    options: dict[str, Any], message: str, published: Path, tmp_path: Path
) -> None:
    options = {"out": "t.safetensors"} | options
    options["out"] = tmp_path / options["out"]
    assert message in sentence(command("offline.routes", published, **options))
    assert not list(tmp_path.iterdir())


def test_bad_traces_and_sizes_of_a_simulation_are_refused(
    traces: tuple[Path, Path], published: Path, tmp_path: Path
) -> None:
    gptoss = route_file(tmp_path / "gptoss.jsonl.gz", route_records(GPTOSS, each=2, tokens=(170, 180)))
    path, out = small_scenario(tmp_path), tmp_path / "result.json"
    options = {"config": path, "out": out, "trace": traces[1]}
    for fit_trace, words in (
        (gptoss, "is of gpt-oss-20b with 24 x 32 experts, but"),
        (tmp_path / "nowhere.safetensors", "cannot be read"),
    ):
        assert words in sentence(command("offline.simulate", fit_trace=fit_trace, **options))
    scenario = read_scenario(path)
    bare = scenario.model_copy(update={"experts": None})
    with pytest.raises(UserInputError, match="--fit-trace needs --trace"):
        replace_traces(bare, None, traces[0])
    assert replace_traces(bare, published, None).experts == Routes(kind="routes", path=published)
    recorded = path.read_text().replace(
        "kind: poisson, rate_per_s: 216, requests: 200, output_tokens: 64", "kind: trace, path: trace.csv"
    )
    path.write_text(recorded)
    assert "--workers needs arrivals.rate_per_s and arrivals.requests" in sentence(
        command("offline.simulate", workers=16, **options)
    )
    assert not out.exists()


def test_reading_without_a_model_names_the_file_if_samples_are_short(tmp_path: Path) -> None:
    path = route_file(tmp_path / "routes.jsonl.gz", route_records(GPTOSS, each=1, tokens=(9, 10)))
    with pytest.raises(UserInputError, match=r"routes\.jsonl\.gz: no sample of gpt-oss-20b has an answer"):
        read_trace_of_routes(path)
