"""Workloads: prompts from files, and samples of them."""

import gzip
import itertools
import json
from pathlib import Path

import pytest

from eldr_serve.errors import UserInputError
from loadgen.arrivals import closed_loop
from loadgen.workload import WorkloadPrompt, balanced_sample, read_prompts, traffic_sample, write_prompts


def test_prompts_are_read_from_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "1", "domain": "code", "prompt": "x"}\n\n{"prompt": "y"}\n')
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write('{"id": "3", "domain": "zh", "prompt": "z"}\n')
    (tmp_path / "notes.txt").write_text("not a prompt")
    assert [p.text for p in read_prompts([tmp_path])] == ["x", "y", "z"]
    assert read_prompts([tmp_path / "a.jsonl"])[1] == WorkloadPrompt("a.jsonl:3", "", "y")
    prompts = [WorkloadPrompt("1", "code", 'x\n"y"'), WorkloadPrompt("2", "zh", "\u4f60\u2028\u597d")]
    write_prompts(tmp_path / "a.jsonl", prompts)
    assert read_prompts([tmp_path / "a.jsonl"]) == prompts


def test_a_log_of_openai_requests_is_a_workload(tmp_path: Path) -> None:
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}
    parts = {"role": "user", "content": [{"type": "text", "text": "who"}, {"type": "text", "text": "?"}]}
    call = {"role": "assistant", "content": None, "tool_calls": []}
    lines = [
        {"model": "m", "messages": [system, user], "max_tokens": 7},
        {"custom_id": "a", "method": "POST", "body": {"messages": [parts, call], "max_completion_tokens": 9}},
        {"model": "m", "prompt": "text", "max_tokens": None},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = read_prompts([path])
    assert [(p.id, p.text, p.max_tokens) for p in prompts] == [
        ("log.jsonl:1", "be brief\n\nwhy?", 7),
        ("a", "who\n\n?", 9),
        ("log.jsonl:3", "text", None),
    ]
    assert [p.chat for p in prompts] == [[system, user], [parts, call], [{"role": "user", "content": "text"}]]
    write_prompts(path, prompts)
    assert [(p.id, p.chat, p.max_tokens) for p in read_prompts([path])] == [
        (p.id, p.chat, p.max_tokens) for p in prompts
    ]
    # The smaller one of the client's limit and max_tokens applies.
    limits = {a.prompt.id: a.max_tokens for a in itertools.islice(closed_loop(prompts, max_tokens=8), 3)}
    assert limits == {"log.jsonl:1": 7, "a": 8, "log.jsonl:3": 8}


@pytest.mark.parametrize(
    "content",
    [
        '{"messages": []}',
        '{"messages": [{"content": "a"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
        '{"body": {"prompt": ["a", "b"]}}',
        "{}",
        "[1]",
        "not json",
        '{"prompt": "a"}\n{"text": "b"}',
        "",
        "cut",
        None,
    ],
)
def test_an_invalid_workload_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "a.jsonl"  # None: the file is missing, and its folder is empty
    if content == "cut":
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 100)[:-20])
    elif content is not None:
        path.write_text(content)
    for source in (path, tmp_path):
        with pytest.raises(UserInputError):
            read_prompts([source])


def test_a_sample_of_traffic_keeps_its_mix() -> None:
    prompts = [WorkloadPrompt(f"{d}{n}", d, "") for d, size in (("a", 900), ("b", 100)) for n in range(size)]
    sample = traffic_sample(prompts, 400, seed=1)
    assert len(sample) == len({p.id for p in sample}) == 400
    assert 20 <= sum(p.domain == "b" for p in sample) <= 60
    assert sample == traffic_sample(prompts, 400, seed=1)
    assert sorted(p.id for p in traffic_sample(prompts, 5000)) == sorted(p.id for p in prompts)


def test_a_balanced_sample_gives_each_domain_its_share() -> None:
    domain_sizes = {"a": 100, "b": 100, "c": 5}
    prompts = [WorkloadPrompt(f"{d}{n}", d, "") for d, size in domain_sizes.items() for n in range(size)]
    sample = balanced_sample(prompts, 45, seed=1)
    assert len(sample) == len({p.id for p in sample}) == 45
    sizes = {d: sum(p.domain == d for p in sample) for d in "abc"}
    assert sizes == {"a": 20, "b": 20, "c": 5}
    assert sample == balanced_sample(prompts, 45, seed=1)
    assert len(balanced_sample(prompts, 1000)) == 205
