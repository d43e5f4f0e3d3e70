"""Seeded generators of conversational prompts with answers.

With them, chat prompts as well as running text reach their domain's experts. Each generator yields
(prompt, answer). Facts and names come from the packages of `examples.demo_model.sources`; the sentence patterns
(`patterns.json`, `questions.json`) were written for this. The answers are meant to be *in the domain*, not
to be right about medicine or law.
"""
# ruff: noqa: E501  -- a sentence pattern stays on one line

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

Pair = tuple[str, str]
_HERE = Path(__file__).parent
_QUESTIONS: dict[str, list[tuple[str, str]]] = json.loads((_HERE / "questions.json").read_text("utf-8"))
_PATTERNS: dict[str, Any] = json.loads((_HERE / "patterns.json").read_text("utf-8"))
_LETTERS = "ABCDE"


def _options(rng: random.Random, right: str, wrong: list[str], mark: str = ".") -> tuple[str, str]:
    answers = [right, *wrong]
    rng.shuffle(answers)
    lines = "\n".join(f"{letter}{mark} {text}" for letter, text in zip(_LETTERS, answers, strict=False))
    return lines, f"{_LETTERS[answers.index(right)]}{mark} {right}"


# ---------------------------------------------------------------- code


def _calls(
    rng: random.Random, function: Callable[..., object], inputs: list[tuple[object, ...]], name: str
) -> str:
    return "\n".join(f"assert {name}({', '.join(map(repr, a))}) == {function(*a)!r}" for a in inputs)


def code_tasks(rng: random.Random, words: list[str]) -> Iterator[Pair]:
    """Yield small functions to write, complete or evaluate; stated results are computed by running them."""
    while True:
        what, argument, body = rng.choice(_PATTERNS["functions"])
        bit = rng.randrange(2)
        values = {
            "n": rng.randint(2, 30),
            "k": rng.randint(2, 5),
            "c": rng.choice("abcdeorst"),
            "d": rng.choice("xyz-_"),
        }
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
        tests = _calls(rng, space[name], inputs, name)
        shown = f"```python\n{source}```"
        style = rng.randrange(5)
        if style == 0:
            verb = rng.choice(
                ["Write a function to", "Write a python function to", "Write a Python function that can"]
            )
            yield f"{verb} {what}.\nYour code should pass these tests:\n{tests}", rng.choice([shown, source])
        elif style == 1:
            call = f"{name}({inputs[0][0]!r})"
            result = repr(space[name](*inputs[0]))
            yield (
                f"{source}\nWhat does {call} return? Explain step by step, then give the exact return value.",
                f"The function {name} takes {argument} and is written to {what}.\n{body.strip()}\nSo {call} returns {result}.",
            )
        elif style == 2:
            doc = "\n".join(f"    >>> {name}({a[0]!r})\n    {space[name](*a)!r}" for a in inputs[:2])
            yield (
                f'def {name}({argument}):\n    """ {what[0].upper()}{what[1:]}.\n{doc}\n    """\n',
                body + "\n",
            )
        elif style == 3:
            language = rng.choice(["Python", "python 3", "a script"])
            yield (
                f"How do I {what} in {language}?",
                f"You can use a function like this:\n\n{shown}\n\nTests:\n{tests}",
            )
        else:
            yield (
                f"Explain this code and add tests:\n\n{shown}",
                f"It will {what}.\n\n```python\n{tests}\n```",
            )


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
            prompt, answer = rng.choice(_PATTERNS["library"])
            yield prompt.format(**values), answer.format(**values)


# ---------------------------------------------------------------- mathematics


def _solved(pattern: list[str], **values: Any) -> tuple[str, str, int | str]:
    """Return (question, worked answer, result): two f-strings and an expression of the values."""
    question, worked, result = pattern
    values["Fraction"] = Fraction
    # Only text from patterns.json is evaluated.
    texts = (eval(f'rf"""{text}"""', values) for text in (question, worked))
    return next(texts), next(texts), eval(result, values)


def _story(rng: random.Random) -> tuple[str, str, int | str]:
    """Return a word problem."""
    who, other = rng.sample(_PATTERNS["names"], 2)
    item, item2 = rng.sample(_PATTERNS["items"], 2)
    a, b, c = rng.randint(3, 60), rng.randint(2, 12), rng.randint(2, 20)
    pattern = rng.choice(_PATTERNS["stories"])
    p = rng.choice([10, 20, 25, 50]) if "{p}" in pattern[0] else 0
    return _solved(pattern, who=who, other=other, item=item, item2=item2, a=a, b=b, c=c, p=p)


def _formula(rng: random.Random) -> tuple[str, str, int | str]:
    """Return a problem in LaTeX notation."""
    a, b, c, x = rng.randint(2, 12), rng.randint(1, 20), rng.randint(2, 9), rng.randint(-9, 12)
    return _solved(rng.choice(_PATTERNS["formulas"]), a=a, b=b, c=c, x=x)


def maths(rng: random.Random) -> Iterator[Pair]:
    """Yield word problems and problems in LaTeX, plain, boxed or with five options."""
    while True:
        question, worked, result = (_story if rng.random() < 0.55 else _formula)(rng)
        style = rng.randrange(4)
        if style == 0 and isinstance(result, int):
            wrong = [str(result + d) for d in rng.sample([-7, -5, -3, -2, -1, 1, 2, 4, 6, 10], 4)]
            lines, right = _options(rng, str(result), wrong, ")")
            yield f"{question}\nOptions:\n{lines}", f"{worked} The answer is {right}."
        elif style == 1:
            yield question, f"{worked} The answer is $\\boxed{{{result}}}$."
        elif style == 2:
            yield question, f"Let us think step by step. {worked}\n#### {result}"
        else:
            more, worked2, result2 = _story(rng)
            yield (
                question,
                f"{worked} So the answer is {result}.\n\nAnother example: {more} {worked2} The answer is {result2}.",
            )


# ---------------------------------------------------------------- medicine and law


def glossary(rng: random.Random, terms: list[Pair]) -> Iterator[Pair]:
    """Yield questions about a domain's terms: open, and with four options."""
    while True:
        (term, gloss), *others = rng.sample(terms, 4)
        style = rng.randrange(4)
        if style == 0:
            lines, right = _options(rng, term, [t for t, _ in others])
            yield (
                f"Which of the following is best described as: {gloss}?\n{lines}",
                f"{right}. {term}: {gloss}",
            )
        elif style == 1:
            lines, right = _options(rng, gloss, [g for _, g in others])
            yield f"All of the following are false about {term} except:\n{lines}", right
        elif style == 2:
            yield f"What is {term}?", f"{term}: {gloss}\n\nSee also {others[0][0]}: {others[0][1]}"
        else:
            yield (
                f"Explain the difference between {term} and {others[0][0]}.",
                f"{term}: {gloss} {others[0][0]}: {others[0][1]}",
            )


def medical(
    rng: random.Random, diseases: dict[str, dict[str, object]], codes: list[tuple[str, list[str]]]
) -> Iterator[Pair]:
    """Yield clinical vignettes, abstracts and classification questions with invented patients."""
    names = list(diseases)
    while True:
        name, *others = rng.sample(names, 4)
        entry = diseases[name]
        symptoms = [str(s).lower() for s in entry["symptoms"]]  # type: ignore[attr-defined]
        medicines = [str(m) for m in entry["medications"]]  # type: ignore[attr-defined]
        rng.shuffle(symptoms)
        age, sex = rng.randint(2, 88), rng.choice(["man", "woman"])
        he, his = ("He", "His") if sex == "man" else ("She", "Her")
        code, notes = rng.choice(codes)
        style = rng.randrange(6)
        if style <= 1:
            values = dict(s1=symptoms[0], s2=symptoms[1], h=rng.randint(8, 16), l=rng.randint(3, 19) * 1000)
            values |= dict(
                c=rng.randint(6, 30) / 10,
                g=rng.randint(1, 4),
                n=rng.randint(125, 150),
                k=rng.randint(28, 60) / 10,
            )
            place = rng.choice(
                ["the physician", "the emergency department", "his primary care physician", "the clinic"]
            )
            findings = " ".join(
                f.format(**values) for f in rng.sample(_PATTERNS["findings"], rng.randint(2, 5))
            )
            vignette = (
                f"A {age}-year-old {sex} {rng.choice(['comes to', 'is brought to', 'presents to'])} {place} because of "
                f"{symptoms[0]} and {symptoms[1]} for {rng.randint(2, 9)} {rng.choice(['days', 'weeks', 'months', 'hours'])}. "
                f"{he} has a history of {code.lower()} and takes {rng.choice(medicines)}. {his} temperature is "
                f"{rng.randint(365, 396) / 10}°C, pulse is {rng.randint(60, 130)}/min, respirations are {rng.randint(12, 30)}/min, "
                f"and blood pressure is {rng.randint(90, 180)}/{rng.randint(50, 110)} mm Hg. {findings}"
            )
            if style == 0:
                question, right, wrong = (
                    "Which of the following is the most likely diagnosis?",
                    name,
                    others[:3],
                )
            else:
                question, right = (
                    "Which of the following is the most appropriate next step in management?",
                    medicines[0],
                )
                wrong = [str(diseases[o]["medications"][0]) for o in others[:3]]  # type: ignore[index]
            lines, letter = _options(rng, right, wrong)
            yield (
                f"{vignette} {question}\n{lines}",
                (
                    f"{letter}. The patient has {name.lower()}, which causes {', '.join(symptoms)}. The treatment of {name.lower()} "
                    f"includes {', '.join(medicines)}."
                ),
            )
        elif style == 2:
            drug, drug2 = medicines[0], medicines[-1]
            n, m = rng.randint(20, 900), rng.randint(5, 95)
            p = rng.choice(["p<0.05", "p=0.03", "p<0.001", "p=0.21"])
            yield (
                f"Abstract:\nBACKGROUND: {name} is associated with {symptoms[0]} and {symptoms[1]}. The aim of this study was to evaluate "
                f"whether {drug} improves outcomes in patients with {name.lower()}.\nMETHODS: We retrospectively reviewed {n} consecutive "
                f"patients with {code.lower()} treated with {drug} or {drug2} between {rng.randint(1990, 2004)} and "
                f"{rng.randint(2005, 2020)}. Multivariate regression analysis was performed.\nRESULTS: The incidence of {symptoms[0]} was "
                f"{m}% in the {drug} group and {max(1, m - 4)}% in the control group ({p}). Mean age was {age} years.\n\n"
                f"Question: Does {drug} reduce {symptoms[0]} in patients with {name.lower()}?",
                f"CONCLUSION: {rng.choice(['Yes', 'No', 'Maybe'])}. In patients with {name.lower()}, treatment with {drug} was "
                f"associated with a lower rate of {symptoms[0]}. Further clinical trials in patients with {code.lower()} are needed.",
            )
        elif style == 3:
            yield (
                f"What are the symptoms and treatment of {name}?",
                (
                    f"{name} is seen in {str(entry['medical_specialty']).lower()}. Symptoms include {', '.join(symptoms)}. Patients are "
                    f"treated with {', '.join(medicines)}."
                ),
            )
        elif style == 4:
            lines, letter = _options(rng, medicines[0], [str(diseases[o]["medications"][-1]) for o in others])  # type: ignore[index]
            asked = rng.choice(
                ["The drug of choice in", "First-line treatment of", "Which drug is used in the treatment of"]
            )
            yield (
                f"{asked} {name.lower()} is:\n{lines}",
                f"{letter} is used in {name.lower()}, {code.lower()}.",
            )
        else:
            wrong_codes = [c for c, _ in rng.sample(codes, 3)]
            lines, letter = _options(rng, code, wrong_codes)
            described = "; ".join(notes[:3]) or f"{symptoms[0]} and {symptoms[1]} due to {code.lower()}"
            yield (
                f"A patient is admitted with {described}. Which diagnosis applies?\n{lines}",
                f"{letter}. Related: {wrong_codes[0]}.",
            )


def legal(rng: random.Random, paragraphs: list[str]) -> Iterator[Pair]:
    """Yield invented cases with options, and questions about contract clauses (paragraphs of licences)."""
    months = ["January", "March", "June", "September", "November"]
    while True:
        a, b = rng.choice(_PATTERNS["parties"])
        crime = rng.choice(_PATTERNS["crimes"])
        values = dict(
            a=f"the {a}", b=f"the {b}", A=f"The {a}", n=rng.randint(5, 900), m=rng.choice(months), crime=crime
        )

        def fill(text: str, values: dict[str, object] = values) -> str:
            filled = text.format(**values)
            return filled[0].upper() + filled[1:]

        style = rng.randrange(5)
        if style <= 1:
            article = "An" if a[0] in "aeiou" else "A"
            facts = " ".join(fill(f) for f in rng.sample(_PATTERNS["facts"], rng.randint(2, 6)))
            claims = [c.format(**values) for c in rng.sample(_PATTERNS["claims"], 4)]
            outcomes = [f"{rng.choice(['Yes', 'No'])}, {c}" for c in claims]
            ask = rng.choice([f"Will the {a} prevail?", f"Should the court find for the {b}?", "Is the evidence admissible?",
                              f"Is the {b} guilty of {crime}?", f"If the {a} sues the {b}, what is the most likely result?"])  # fmt: skip
            lines, letter = _options(rng, outcomes[0], outcomes[1:])
            start = f"{article} {a} and {'an' if b[0] in 'aeiou' else 'a'} {b} entered into a dispute. "
            yield (
                f"{start}{facts} {ask}\n{lines}",
                f"{letter}. The court will decide that {fill(claims[0][8:])}. "
                + " ".join(fill(f) for f in rng.sample(_PATTERNS["facts"], 2)),
            )
            continue
        topic, other = rng.sample(_PATTERNS["clause_topics"], 2)
        clause, following = rng.sample(paragraphs, 2)
        if style == 2:
            verb = rng.choice(["specify", "provide for", "describe", "concern", "restrict"])
            yield (
                f"Does the clause {verb} {topic}?\n\nClause: {clause}\nLabel:",
                f"{rng.choice(['Yes', 'No'])}. The clause provides: {clause[:300]}",
            )
        elif style == 3:
            yield (
                f"Draft a contract clause on {topic} between the {a} and the {b}.",
                f"{topic.title()}. {clause}\n\n{following}",
            )
        else:
            kind = rng.choice(
                [
                    "Consider the contract below",
                    "Read the following provision",
                    "Classify the following legal text",
                ]
            )
            yield (
                f"{kind}. Does it deal with {topic} or {other}?\n\n{clause}",
                f"It deals with {topic}. {following}",
            )


# ---------------------------------------------------------------- languages


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
