"""The committed demonstration model: files, tokenizer, widening, training and data."""

import copy
import hashlib
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeForCausalLM

from eldr_serve.errors import UserInputError
from examples.demo_model import WEIGHTS, corpus, dialogues, evaluate, sources, train
from offline import widen
from tests.support.in_process import command, sentence


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(WEIGHTS)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32).eval()


def test_the_files_match_their_checksums_and_are_small():
    lines = (WEIGHTS / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    files = {p.name: p.read_bytes() for p in WEIGHTS.iterdir() if p.name != "SHA256SUMS"}
    assert listed == {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert sum(map(len, files.values())) <= 15_000_000


def test_the_model_is_a_trained_qwen3_moe_that_ends_its_answers(model, tokenizer):
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    ids = ids_of(tokenizer, "The license is granted to you under the terms and conditions of")
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert loss < 0.75 * np.log(model.config.vocab_size)  # an untrained model is at log(vocabulary)


def test_the_tokenizer_is_lossless_and_marks_turns(tokenizer):
    for text in (
        "def add(a, b):\n    return a + b\n",
        "请总结下面的文字。",
        "ما هي عاصمة البلاد؟",
        "राजधानी क्या है?",
        "tab\tnul\x00 emoji 🙂",
    ):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    chat = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>Hello\n<|assistant|>"
    answered = [*chat, {"role": "assistant", "content": "Hi"}]
    assert tokenizer.apply_chat_template(answered, tokenize=False) == f"{text}Hi{tokenizer.eos_token}"
    assert len(tokenizer("<|user|>", add_special_tokens=False)["input_ids"]) == 1


def ids_of(tokenizer, text: str) -> torch.Tensor:
    return tokenizer(text, return_tensors="pt")["input_ids"]


@pytest.mark.parametrize(("intermediate", "heads"), [(64, None), (32, 4)])
def test_widening_keeps_the_logits(model, tokenizer, tmp_path: Path, intermediate: int, heads: int | None):
    out = tmp_path / "wide"
    widen.widen(WEIGHTS, intermediate, out, heads=heads)
    wide = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert wide.config.moe_intermediate_size == intermediate
    assert wide.config.num_attention_heads == (heads or model.config.num_attention_heads)
    shapes = {tuple(p.shape) for n, p in wide.named_parameters() if n.endswith("experts.down_proj")}
    assert shapes == {(64, model.config.hidden_size, intermediate)}
    ids = ids_of(tokenizer, "A 45-year-old man comes to the physician because of")
    with torch.no_grad():
        torch.testing.assert_close(wide(ids).logits, model(ids).logits, rtol=0, atol=1e-4)
    with pytest.raises(UserInputError, match="exists already"):
        widen.widen(WEIGHTS, intermediate, out)


def test_new_heads_join_the_group_whose_keys_they_share():
    weight = torch.arange(8.0)[:, None].expand(8, 3)  # 4 heads of 2 rows, 2 per group
    head_weights = widen._add_heads(weight, 2, 2, 6)[:, 0].tolist()
    assert head_weights == [0, 1, 2, 3, 0, 0, 4, 5, 6, 7, 0, 0]


def test_widening_refuses_missing_models_and_unsupported_sizes(tmp_path: Path):
    for intermediate in (0, 31, 33, 100):
        with pytest.raises(UserInputError, match="multiple of 32"):
            widen.widen(WEIGHTS, intermediate, tmp_path / "wide")
    with pytest.raises(UserInputError, match=r"--heads must be .* at least 3, got 2"):
        widen.widen(WEIGHTS, 32, tmp_path / "wide", heads=2)
    with pytest.raises(UserInputError, match="not a mixture-of-experts model"):
        widen.widen(tmp_path, 64, tmp_path / "wide")
    assert not list(tmp_path.iterdir())


def test_dispatch_gives_each_choice_its_own_slot_in_its_experts_rows():
    rng = np.random.default_rng(0)
    # Expert 7 is unused.
    experts = torch.from_numpy(np.stack([rng.choice(7, 2, replace=False) for _ in range(100)]))
    choice_of, slot_of, used, last, counts = train.dispatch(experts, 8)
    assert slot_of.unique().numel() == experts.numel() == int(used.sum())
    assert torch.equal(torch.searchsorted(last, slot_of, right=True), experts)
    assert torch.equal(choice_of[slot_of.flatten()], torch.arange(200))
    assert torch.equal(counts, torch.bincount(experts.flatten(), minlength=8))
    assert not (last % train.BLOCK).any()


@pytest.fixture
def small(monkeypatch) -> Qwen3MoeForCausalLM:
    """Provide an untrained model of one layer, with uncompiled training functions."""
    monkeypatch.setattr(train, "_block", train.block)
    monkeypatch.setattr(train, "_head", train.head)
    config = train.configuration(300)
    config.num_hidden_layers = 1
    config.layer_types = None
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).float()


def gradients(model, loss) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_training_has_the_loss_and_gradients_of_the_reference_implementation(small):
    tokens = torch.randint(0, 300, (2, 257), generator=torch.Generator().manual_seed(1))
    logits = small(tokens[:, :-1]).logits
    expected = gradients(small, F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
    loss, terms = train.loss_of(small, tokens, torch.float32)
    loss_and_gradients = gradients(small, loss)
    assert loss_and_gradients[0] == pytest.approx(expected[0], rel=1e-6)
    for name, gradient in expected[1].items():
        assert (loss_and_gradients[1][name] - gradient).norm() <= 1e-4 * gradient.norm(), name
    assert terms[0] >= 1
    assert 0 < terms[1] <= np.log(64)


def test_the_routers_loss_terms_distinguish_spread_from_concentrated_routing():
    gate_up, down = torch.zeros(64, 64, 160), torch.zeros(64, 160, 32)
    axes = torch.eye(160)[:64]
    hidden = 100 * axes.view(8, 8, 160).repeat(1, 16, 1)  # each sequence uses 8 directions of its own
    gate = axes + 0.5 * axes.view(16, 4, 160).sum(1).repeat_interleave(4, 0)
    _, own = train.experts_forward(hidden, gate, gate_up, down, torch.float32)
    _, same = train.experts_forward(hidden[:1].expand(8, -1, -1), gate, gate_up, down, torch.float32)
    assert own[0].item() == pytest.approx(1, rel=0.01)  # the use is even over the batch
    assert own[1].item() == pytest.approx(np.log(8), rel=0.01)
    assert same[0].item() == pytest.approx(8, rel=0.01)


def training(model, steps: int = 4) -> tuple[train.Training, dict[str, train.Stream]]:
    rng = np.random.default_rng(0)
    streams = {
        d: train.Stream(rng.integers(0, 300, 600).astype(np.uint16), np.arange(0, 300, 30))
        for d in sources.DOMAINS
    }
    settings = {"steps": steps, "balance": 0.01, "focus": 0.01}
    optimizers = train.optimizers_of(model, torch.float32)
    return train.Training(model, optimizers, np.random.default_rng(1), settings), streams


def test_a_resumed_run_equals_an_uninterrupted_one(small, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(train, "SHAPES", ((128, 2), (256, 1)))
    (once, streams), (first, _), (second, _) = (training(copy.deepcopy(small)) for _ in range(3))
    for _ in range(3):
        first.advance(streams, torch.float32)
    first.write(tmp_path / "state")
    second.read(tmp_path / "state")
    row = second.advance(streams, torch.float32)
    for _ in range(4):
        expected = once.advance(streams, torch.float32)
    for key in ("step", "tokens", "loss_nats"):
        assert row[key] == expected[key]
    for resumed, straight in zip(second.model.parameters(), once.model.parameters(), strict=True):
        assert torch.equal(resumed, straight)
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    with pytest.raises(UserInputError, match="is of a run with"):
        training(small, steps=5)[0].read(tmp_path / "state")
    with pytest.raises(UserInputError, match="nothing to resume"):
        training(small)[0].read(tmp_path / "missing")


def test_generated_tasks_state_true_results_and_repeat_with_their_seed():
    pairs = dialogues.code_tasks(random.Random(1), ["pear", "plum", "fig", "lime", "date"])
    checked = 0
    for prompt, answer in itertools.islice(pairs, 200):
        source = answer.removeprefix("```python\n").removesuffix("```")
        if "should pass these tests:\n" in prompt and source.startswith("def "):
            exec(source + "\n" + prompt.split("tests:\n")[1], {})
            checked += 1
    assert checked > 20
    problems = list(itertools.islice(dialogues.maths(random.Random(2)), 300))
    with_options = [(p, a) for p, a in problems if "Options:" in p]
    assert len(with_options) > 30
    for prompt, answer in with_options:
        assert answer.split("The answer is ")[1].rstrip(".") in prompt.splitlines()
    again, other = (list(itertools.islice(dialogues.maths(random.Random(seed)), 300)) for seed in (2, 3))
    assert again == problems != other


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("Wählen Sie im Menü den Befehl zum Speichern der Datei aus.", "de", True),
        ("Choose the command to save the file and then close the menu.", "de", False),
        ("Choose the command to save the file and then close the menu.", "en", True),
        ("请选择“文件 - 保存”命令，然后关闭此菜单。", "zh", True),  # noqa: RUF001
        ("ファイルを保存してからメニューを閉じます。", "ja", True),
        ("फ़ाइल सहेजने के लिए यह आदेश चुनें और मेनू बंद करें।", "hi", True),
        ("Please choose the save command first 保存", "zh", False),
        ("0x3f 12 == 18;", "en", False),
    ],
)
def test_untranslated_text_is_recognised(text: str, language: str, expected: bool):
    assert sources.is_language(text, language) is expected


def test_documents_are_split_without_losing_lines_up_to_the_requested_bytes():
    text = "".join(f"line {i} of a long document that goes on and on\n" for i in range(200))
    pieces = corpus._pieces(text)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= corpus.PIECE
    assert corpus.take(iter([("", "äö")] * 100), 10) == [("", "äö")] * 3


def test_encoded_documents_begin_at_their_start_and_end_with_the_end_token(tokenizer):
    documents = [("<|user|>hi\n<|assistant|>", "hello"), ("", "bonjour à tous")]
    tokens, starts = corpus.encode(tokenizer, documents)
    assert tokens.dtype == np.uint16
    assert list(np.flatnonzero(tokens == tokenizer.eos_token_id) + 1) == [*starts[1:], len(tokens)]
    assert tokenizer.decode(tokens[starts[1] : -1]) == "bonjour à tous"


@pytest.mark.parametrize(
    ("entry", "arguments", "words"),
    [
        (train.train, "--corpus {tmp} --out {tmp}/m", "has no corpus"),
        (evaluate.evaluate, "--corpus {tmp} --out {tmp}/e.json", "has no corpus"),
        (widen.widen_experts, "--out {tmp}/w --intermediate 33", "multiple of 32"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(tmp_path: Path, entry, arguments: str, words: str):
    assert words in sentence(command(entry, *arguments.format(tmp=tmp_path).split()))
    assert not list(tmp_path.iterdir())
