"""Seeded generators of prompts about medicine and law, with answers in the domain that need not be right."""
# ruff: noqa: E501  -- a sentence pattern stays on one line

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from examples.demo_model.patterns import PATTERNS, Pair, shuffle_options


def glossary(rng: random.Random, terms: list[Pair]) -> Iterator[Pair]:
    """Yield questions about a domain's terms: open, and with four options."""
    while True:
        (term, gloss), *others = rng.sample(terms, 4)
        style = rng.randrange(4)
        if style == 0:
            lines, right = shuffle_options(rng, term, [t for t, _ in others])
            question = f"Which of the following is best described as: {gloss}?\n{lines}"
            yield question, f"{right}. {term}: {gloss}"
        elif style == 1:
            lines, right = shuffle_options(rng, gloss, [g for _, g in others])
            yield f"All of the following are false about {term} except:\n{lines}", right
        elif style == 2:
            yield f"What is {term}?", f"{term}: {gloss}\n\nSee also {others[0][0]}: {others[0][1]}"
        else:
            other, its_gloss = others[0]
            yield (
                f"Explain the difference between {term} and {other}.",
                f"{term}: {gloss} {other}: {its_gloss}",
            )


@dataclass(frozen=True)
class _Patient:
    """An invented patient, with the names of three other diseases for wrong answers."""

    disease: str
    others: list[str]
    symptoms: list[str]
    medicines: list[str]
    specialty: str
    age: int
    sex: str
    history: str
    notes: list[str]


def _patient(
    rng: random.Random, diseases: dict[str, dict[str, Any]], codes: list[tuple[str, list[str]]]
) -> _Patient:
    name, *others = rng.sample(list(diseases), 4)
    entry = diseases[name]
    symptoms = [str(s).lower() for s in entry["symptoms"]]
    medicines = [str(m) for m in entry["medications"]]
    rng.shuffle(symptoms)
    age, sex = rng.randint(2, 88), rng.choice(["man", "woman"])
    specialty = str(entry["medical_specialty"]).lower()
    return _Patient(name, others, symptoms, medicines, specialty, age, sex, *rng.choice(codes))


def medical(
    rng: random.Random, diseases: dict[str, dict[str, Any]], codes: list[tuple[str, list[str]]]
) -> Iterator[Pair]:
    """Yield clinical vignettes, abstracts and classification questions with invented patients."""
    while True:
        patient = _patient(rng, diseases, codes)
        style = rng.randrange(6)
        if style <= 1:
            yield _vignette(rng, patient, diseases, asks_treatment=style == 1)
        elif style == 2:
            yield _abstract(rng, patient)
        elif style == 3:
            yield (
                f"What are the symptoms and treatment of {patient.disease}?",
                f"{patient.disease} is seen in {patient.specialty}. Symptoms include {', '.join(patient.symptoms)}. "
                f"Patients are treated with {', '.join(patient.medicines)}.",
            )
        elif style == 4:
            wrong = [str(diseases[o]["medications"][-1]) for o in patient.others]
            lines, letter = shuffle_options(rng, patient.medicines[0], wrong)
            asked = [
                "The drug of choice in",
                "First-line treatment of",
                "Which drug is used in the treatment of",
            ]
            question = f"{rng.choice(asked)} {patient.disease.lower()} is:\n{lines}"
            yield question, f"{letter} is used in {patient.disease.lower()}, {patient.history.lower()}."
        else:
            wrong = [c for c, _ in rng.sample(codes, 3)]
            lines, letter = shuffle_options(rng, patient.history, wrong)
            first, second = patient.symptoms[:2]
            caused = f"{first} and {second} due to {patient.history.lower()}"
            question = f"A patient is admitted with {'; '.join(patient.notes[:3]) or caused}. Which diagnosis applies?"
            yield f"{question}\n{lines}", f"{letter}. Related: {wrong[0]}."


def _vignette(
    rng: random.Random, patient: _Patient, diseases: dict[str, dict[str, Any]], *, asks_treatment: bool
) -> Pair:
    """Return a case, with the question for its diagnosis or its treatment."""
    first, second = patient.symptoms[:2]
    name, medicines = patient.disease, patient.medicines
    he, his = ("He", "His") if patient.sex == "man" else ("She", "Her")
    values = dict(s1=first, s2=second, h=rng.randint(8, 16), l=rng.randint(3, 19) * 1000)
    values |= dict(
        c=rng.randint(6, 30) / 10, g=rng.randint(1, 4), n=rng.randint(125, 150), k=rng.randint(28, 60) / 10
    )
    places = ["the physician", "the emergency department", "his primary care physician", "the clinic"]
    place = rng.choice(places)
    findings = " ".join(f.format(**values) for f in rng.sample(PATTERNS["findings"], rng.randint(2, 5)))
    vignette = (
        f"A {patient.age}-year-old {patient.sex} {rng.choice(['comes to', 'is brought to', 'presents to'])} {place} because of "
        f"{first} and {second} for {rng.randint(2, 9)} {rng.choice(['days', 'weeks', 'months', 'hours'])}. "
        f"{he} has a history of {patient.history.lower()} and takes {rng.choice(medicines)}. {his} temperature is "
        f"{rng.randint(365, 396) / 10}°C, pulse is {rng.randint(60, 130)}/min, respirations are {rng.randint(12, 30)}/min, "
        f"and blood pressure is {rng.randint(90, 180)}/{rng.randint(50, 110)} mm Hg. {findings}"
    )
    asked, right, wrong = "most likely diagnosis", name, patient.others
    if asks_treatment:
        asked, right = "most appropriate next step in management", medicines[0]
        wrong = [str(diseases[o]["medications"][0]) for o in patient.others]
    lines, letter = shuffle_options(rng, right, wrong)
    return (
        f"{vignette} Which of the following is the {asked}?\n{lines}",
        f"{letter}. The patient has {name.lower()}, which causes {', '.join(patient.symptoms)}. The treatment of "
        f"{name.lower()} includes {', '.join(medicines)}.",
    )


def _abstract(rng: random.Random, patient: _Patient) -> Pair:
    """Return an abstract without its conclusion, and the conclusion."""
    first, second = patient.symptoms[:2]
    name, history = patient.disease, patient.history.lower()
    drug, drug2 = patient.medicines[0], patient.medicines[-1]
    n, m = rng.randint(20, 900), rng.randint(5, 95)
    significance = rng.choice(["p<0.05", "p=0.03", "p<0.001", "p=0.21"])
    return (
        f"Abstract:\nBACKGROUND: {name} is associated with {first} and {second}. The aim of this study was to evaluate "
        f"whether {drug} improves outcomes in patients with {name.lower()}.\nMETHODS: We retrospectively reviewed {n} consecutive "
        f"patients with {history} treated with {drug} or {drug2} between {rng.randint(1990, 2004)} and "
        f"{rng.randint(2005, 2020)}. Multivariate regression analysis was performed.\nRESULTS: The incidence of {first} was "
        f"{m}% in the {drug} group and {max(1, m - 4)}% in the control group ({significance}). Mean age was {patient.age} years.\n\n"
        f"Question: Does {drug} reduce {first} in patients with {name.lower()}?",
        f"CONCLUSION: {rng.choice(['Yes', 'No', 'Maybe'])}. In patients with {name.lower()}, treatment with {drug} was "
        f"associated with a lower rate of {first}. Further clinical trials in patients with {history} are needed.",
    )


def legal(rng: random.Random, paragraphs: list[str]) -> Iterator[Pair]:
    """Yield invented cases with options, and questions about contract clauses (paragraphs of licences)."""
    months = ["January", "March", "June", "September", "November"]
    while True:
        a, b = rng.choice(PATTERNS["parties"])
        crime = rng.choice(PATTERNS["crimes"])
        values = dict(
            a=f"the {a}", b=f"the {b}", A=f"The {a}", n=rng.randint(5, 900), m=rng.choice(months), crime=crime
        )

        def fill(text: str, values: dict[str, object] = values) -> str:
            filled = text.format(**values)
            return filled[0].upper() + filled[1:]

        style = rng.randrange(5)
        if style <= 1:
            article = "An" if a[0] in "aeiou" else "A"
            facts = " ".join(fill(f) for f in rng.sample(PATTERNS["facts"], rng.randint(2, 6)))
            claims = [c.format(**values) for c in rng.sample(PATTERNS["claims"], 4)]
            outcomes = [f"{rng.choice(['Yes', 'No'])}, {c}" for c in claims]
            ask = rng.choice(
                [
                    f"Will the {a} prevail?",
                    f"Should the court find for the {b}?",
                    "Is the evidence admissible?",
                    f"Is the {b} guilty of {crime}?",
                    f"If the {a} sues the {b}, what is the most likely result?",
                ]
            )
            lines, letter = shuffle_options(rng, outcomes[0], outcomes[1:])
            start = f"{article} {a} and {'an' if b[0] in 'aeiou' else 'a'} {b} entered into a dispute. "
            yield (
                f"{start}{facts} {ask}\n{lines}",
                f"{letter}. The court will decide that {fill(claims[0][8:])}. "
                + " ".join(fill(f) for f in rng.sample(PATTERNS["facts"], 2)),
            )
            continue
        topic, other = rng.sample(PATTERNS["clause_topics"], 2)
        clause, following = rng.sample(paragraphs, 2)
        if style == 2:
            verb = rng.choice(["specify", "provide for", "describe", "concern", "restrict"])
            question = f"Does the clause {verb} {topic}?\n\nClause: {clause}\nLabel:"
            yield question, f"{rng.choice(['Yes', 'No'])}. The clause provides: {clause[:300]}"
        elif style == 3:
            question = f"Draft a contract clause on {topic} between the {a} and the {b}."
            yield question, f"{topic.title()}. {clause}\n\n{following}"
        else:
            kinds = [
                "Consider the contract below",
                "Read the following provision",
                "Classify the following legal text",
            ]
            question = f"{rng.choice(kinds)}. Does it deal with {topic} or {other}?\n\n{clause}"
            yield question, f"It deals with {topic}. {following}"
