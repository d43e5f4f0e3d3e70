"""Workloads and stream timing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from loadgen.workload import Prompt, balanced_sample, read_prompts, write_prompts
from tools.cli import BadInput
from tools.sse import StreamError, read_stream


class Clock:
    """Advances by 0.1 s a reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


def event(**choice: object) -> str:
    return "data: " + json.dumps({"choices": [choice]})


def test_times_and_text_of_a_chat_stream() -> None:
    lines = [
        event(delta={"role": "assistant", "content": ""}),
        "",
        ": a comment",
        event(delta={"content": "one"}),
        event(delta={"content": " two"}).encode(),
        event(delta={"content": ""}),  # half a character
        event(delta={"content": "three"}, finish_reason="length"),
        'data: {"choices": [], "usage": {"completion_tokens": 4}}',
        "data: [DONE]",
        event(delta={"content": "after the end"}),
    ]
    timing = read_stream(lines, 0.0, Clock())
    assert timing.text == "one twothree"
    assert timing.token_times_s == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert timing.ttft_s == pytest.approx(0.2)
    assert timing.tpot_s == pytest.approx(0.1)
    assert (timing.completion_tokens, timing.finish_reason) == (4, "length")


def test_tokens_that_come_together_count_as_many() -> None:
    lines = [event(text="a"), event(text="bcd"), 'data: {"usage": {"completion_tokens": 4}}', "data: [DONE]"]
    assert read_stream(lines, 0.0, Clock()).tpot_s == pytest.approx(0.1 / 3)


def test_one_token_has_no_tpot() -> None:
    assert read_stream([event(text="a"), "data: [DONE]"], 0.0, Clock()).tpot_s is None


@pytest.mark.parametrize(
    "lines",
    [
        [event(text="a")],
        ['data: {"error": {"message": "lost"}}', "data: [DONE]"],
        ["data: {not json", "data: [DONE]"],
    ],
)
def test_a_stream_that_fails_is_an_error(lines: list[str]) -> None:
    with pytest.raises(StreamError):
        read_stream(lines, 0.0)


def test_prompts_of_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "1", "domain": "code", "prompt": "x"}\n\n{"prompt": "y"}\n')
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write('{"id": "3", "domain": "zh", "prompt": "z"}\n')
    (tmp_path / "notes.txt").write_text("not a prompt")
    assert [p.text for p in read_prompts([tmp_path])] == ["x", "y", "z"]
    assert read_prompts([tmp_path / "a.jsonl"])[1] == Prompt("a.jsonl:3", "", "y")


@pytest.mark.parametrize("content", ["{}", "[1]", "not json", '{"prompt": "a"}\n{"text": "b"}', ""])
def test_a_file_that_is_not_a_workload_is_refused_whole(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(BadInput):
        read_prompts([tmp_path / "a.jsonl"])


def test_missing_empty_and_cut_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 100)[:-20])
    for path in (tmp_path / "nowhere", tmp_path / "cut.jsonl.gz"):
        with pytest.raises(BadInput):
            read_prompts([path])
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput):
        read_prompts([tmp_path / "empty"])


def test_a_balanced_sample_gives_each_domain_its_share() -> None:
    prompts = [
        Prompt(f"{d}{n}", d, "") for d, size in (("a", 100), ("b", 100), ("c", 5)) for n in range(size)
    ]
    sample = balanced_sample(prompts, 45, seed=1)
    assert len(sample) == len({p.id for p in sample}) == 45
    sizes = {d: sum(p.domain == d for p in sample) for d in "abc"}
    assert sizes == {"a": 20, "b": 20, "c": 5}
    assert sample == balanced_sample(prompts, 45, seed=1)
    assert len(balanced_sample(prompts, 1000)) == 205


def test_written_prompts_are_read_as_they_were(tmp_path: Path) -> None:
    prompts = [Prompt("1", "code", 'x\n"y"'), Prompt("2", "zh", "\u4f60\u2028\u597d")]
    write_prompts(tmp_path / "a.jsonl", prompts)
    assert read_prompts([tmp_path]) == prompts
