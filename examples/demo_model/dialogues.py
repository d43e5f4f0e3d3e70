"""Seeded generators of conversational prompts with answers.

With them, chat prompts as well as running text reach their domain's experts. Each generator yields (prompt,
answer). Facts and names come from the packages of `examples.demo_model.sources`. The sentence patterns
(`patterns.json`, `questions.json`) were written for these generators. The answers are meant to be *in the
domain*, not to be right about medicine or law (medicine_and_law.py).
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from examples.demo_model import sources
from examples.demo_model.patterns import PATTERNS, Pair, shuffle_options

_QUESTIONS: dict[str, list[tuple[str, str]]] = json.loads(
    (Path(__file__).parent / "questions.json").read_text("utf-8")
)


def code_tasks(rng: random.Random, words: list[str]) -> Iterator[Pair]:
    """Yield small functions to write, complete or evaluate. Stated results are computed by running them."""
    while True:
        what, argument, body = rng.choice(PATTERNS["functions"])
        bit = rng.randrange(2)
        values: dict[str, Any] = {"n": rng.randint(2, 30), "k": rng.randint(2, 5)}
        values |= {"c": rng.choice("abcdeorst"), "d": rng.choice("xyz-_")}
        values |= {"par": ("even", "odd")[bit], "bit": bit, "op": "greater", "sym": ">"}
        if rng.random() < 0.5:
            values |= {"op": "smaller", "sym": "<"}
        what, body = what.format(**values), body.format(**values)
        name = "_".join(rng.sample([w for w in what.split() if w.isalpha() and len(w) > 2], 2)).lower()
        name = rng.choice([name, "f", "solve"])
        source = f"def {name}({argument}):\n{body}\n"
        space: dict[str, Callable[..., object]] = {}
        exec(source, {}, space)  # executes only the templates above
        makers: dict[str, Callable[[], object]] = {
            "xs": lambda: [rng.randint(-9, 60) for _ in range(rng.randint(3, 9))],
            "s": lambda: " ".join(rng.sample(words, rng.randint(2, 4))),
            "n": partial(rng.randint, 2, 12 if "factorial" in what else 500),
        }
        inputs: list[tuple[object, ...]] = [(makers[argument](),) for _ in range(3)]
        tests = "\n".join(f"assert {name}({a[0]!r}) == {space[name](*a)!r}" for a in inputs)
        code = f"```python\n{source}```"
        style = rng.randrange(5)
        if style == 0:
            verbs = ["Write a function to", "Write a python function to", "Write a Python function that can"]
            task = f"{rng.choice(verbs)} {what}.\nYour code should pass these tests:\n{tests}"
            yield task, rng.choice([code, source])
        elif style == 1:
            call = f"{name}({inputs[0][0]!r})"
            worked = f"The function {name} takes {argument} and is written to {what}.\n{body.strip()}\n"
            task = (
                f"{source}\nWhat does {call} return? Explain step by step, then give the exact return value."
            )
            yield task, f"{worked}So {call} returns {space[name](*inputs[0])!r}."
        elif style == 2:
            doc = "\n".join(f"    >>> {name}({a[0]!r})\n    {space[name](*a)!r}" for a in inputs[:2])
            yield (
                f'def {name}({argument}):\n    """ {what[0].upper()}{what[1:]}.\n{doc}\n    """\n',
                body + "\n",
            )
        elif style == 3:
            task = f"How do I {what} in {rng.choice(['Python', 'python 3', 'a script'])}?"
            yield task, f"You can use a function like this:\n\n{code}\n\nTests:\n{tests}"
        else:
            task = f"Explain this code and add tests:\n\n{code}"
            yield task, f"It will {what}.\n\n```python\n{tests}\n```"


def code_library(rng: random.Random, files: list[sources.Text]) -> Iterator[Pair]:
    """Yield documented functions and classes of a library, as completion and writing tasks."""
    for text in files:
        try:
            tree = ast.parse(text.text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            doc = ast.get_docstring(node)
            source = ast.get_source_segment(text.text, node) or ""
            if not doc or not 120 < len(source) < 2500:
                continue
            first = doc.split("\n")[0].strip(" .")
            kind = "function" if isinstance(node, ast.FunctionDef) else "class"
            end = (node.body[0].end_lineno or node.lineno) - node.lineno + 1
            lines = source.splitlines()
            values = {"kind": kind, "name": node.name, "first": first, "source": source, "doc": doc}
            values |= {"head": "\n".join(lines[:end]), "rest": "\n".join(lines[end:])}
            values["module"] = text.document[:-3]
            prompt, answer = rng.choice(PATTERNS["library"])
            yield prompt.format(**values), answer.format(**values)


def _solved(pattern: list[str], **values: Any) -> tuple[str, str, int | str]:
    """Return (question, worked answer, result): two f-strings and an expression of the values."""
    question, worked, result = pattern
    values["Fraction"] = Fraction
    # Only text from patterns.json is evaluated.
    texts = (eval(f'rf"""{text}"""', values) for text in (question, worked))
    return next(texts), next(texts), eval(result, values)


def _story(rng: random.Random) -> tuple[str, str, int | str]:
    """Return a word problem."""
    who, other = rng.sample(PATTERNS["names"], 2)
    item, item2 = rng.sample(PATTERNS["items"], 2)
    a, b, c = rng.randint(3, 60), rng.randint(2, 12), rng.randint(2, 20)
    pattern = rng.choice(PATTERNS["stories"])
    p = rng.choice([10, 20, 25, 50]) if "{p}" in pattern[0] else 0
    return _solved(pattern, who=who, other=other, item=item, item2=item2, a=a, b=b, c=c, p=p)


def _formula(rng: random.Random) -> tuple[str, str, int | str]:
    """Return a problem in LaTeX notation."""
    a, b, c, x = rng.randint(2, 12), rng.randint(1, 20), rng.randint(2, 9), rng.randint(-9, 12)
    return _solved(rng.choice(PATTERNS["formulas"]), a=a, b=b, c=c, x=x)


def maths(rng: random.Random) -> Iterator[Pair]:
    """Yield word problems and problems in LaTeX, plain, boxed or with five options."""
    while True:
        question, worked, result = (_story if rng.random() < 0.55 else _formula)(rng)
        style = rng.randrange(4)
        if style == 0 and isinstance(result, int):
            wrong = [str(result + d) for d in rng.sample([-7, -5, -3, -2, -1, 1, 2, 4, 6, 10], 4)]
            lines, right = shuffle_options(rng, str(result), wrong, ")")
            yield f"{question}\nOptions:\n{lines}", f"{worked} The answer is {right}."
        elif style == 1:
            yield question, f"{worked} The answer is $\\boxed{{{result}}}$."
        elif style == 2:
            yield question, f"Let us think step by step. {worked}\n#### {result}"
        else:
            another = "Another example: {} {} The answer is {}.".format(*_story(rng))
            yield question, f"{worked} So the answer is {result}.\n\n{another}"


def world(root: Path, language: str) -> dict[str, list[str]]:
    """Return names of countries, languages, cities and people in a language (CLDR and Faker)."""
    sys.path.insert(0, str(root / "python"))
    try:
        from babel import Locale
        from faker import Faker
        from faker.config import AVAILABLE_LOCALES
    finally:
        sys.path.pop(0)
    locale = Locale(language)
    wanted = {
        "en": "en_US",
        "zh": "zh_CN",
        "ar": "ar_AA",
        "ja": "ja_JP",
        "ko": "ko_KR",
        "vi": "vi_VN",
        "cs": "cs_CZ",
    }
    wanted |= {"fa": "fa_IR", "hi": "hi_IN", "el": "el_GR", "uk": "uk_UA", "he": "he_IL", "de": "de_DE"}
    name = wanted.get(language, f"{language}_{language.upper()}")
    fake = Faker(name if name in AVAILABLE_LOCALES else "en_US")
    fake.seed_instance(0)
    cities = [str(z["city"]) for z in locale.time_zones.values() if "city" in z]
    return {
        "country": [str(n) for c, n in locale.territories.items() if len(c) == 2],
        "tongue": [str(n) for c, n in locale.languages.items() if len(c) == 2],
        "city": cities or ["Paris", "Berlin"],
        "person": [fake.name() for _ in range(800)],
        "words": [fake.sentence() for _ in range(200)] if name in AVAILABLE_LOCALES else [],
    }


def questions(
    rng: random.Random, language: str, names: dict[str, list[str]], texts: list[str]
) -> Iterator[Pair]:
    """Yield short questions, instructions about a passage, and passages with a question, in one language."""
    patterns = _QUESTIONS[language]
    instructions = _QUESTIONS.get(f"{language}:instructions", [])
    while True:
        slots = {k: rng.choice(v) for k, v in names.items() if k != "words" and v}
        slots |= {"year": str(rng.randint(1200, 2020)), "country2": rng.choice(names["country"])}
        question, answer = (part.format(**slots) for part in rng.choice(patterns))
        passage, following = rng.choice(texts), rng.choice(texts)
        style = rng.randrange(6)
        if style <= 2:
            yield question, f"{answer} {following}"
        elif style == 3 and instructions:
            yield f"{rng.choice(instructions)[0]}\n\n{passage}", following
        elif style == 4:
            yield f"{passage}\n\n{question}", f"{answer} {following}"
        else:
            more, answer2 = (part.format(**slots) for part in rng.choice(patterns))
            yield f"{question} {more}", f"{answer} {answer2}"
