"""Seeded conversations of each domain: a question as people put it to a model, and an answer.

They exist so that a prompt in conversational form lands in its domain's experts. Facts come from the
packages named in the model card (ICD-10-CM names, Unicode CLDR territories, licence texts).
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator

Conversation = tuple[str, str]  # question, answer

NAMES = (
    "Anna Ben Carla David Emma Felix Grace Hugo Ivy Jonas Kira Liam Maya Noah Olga Paul Quinn Rosa Sam Tara "
    "Umar Vera Will Xenia Yara Zoe Tom Lucy Mark Jane Bill Nina Omar Ruth Alex Sofia"
).split()
THINGS = (
    "apples books pencils marbles stickers cookies oranges tickets stamps shells coins cards eggs flowers "
    "muffins bottles boxes toys balloons cupcakes notebooks plants pages puzzles"
).split()


def math(rng: random.Random) -> Conversation:
    """A word problem, or a sum, fraction, equation or percentage, worked in steps."""
    kind: Callable[[random.Random], Conversation] = rng.choice(
        [_shopping, _sharing, _rate, _more_and_fewer, _percentage, _equation, _fraction, _geometry, _sequence]
    )
    return kind(rng)


def _shopping(rng: random.Random) -> Conversation:
    name, thing, other = rng.choice(NAMES), *rng.sample(THINGS, 2)
    a, b, p, q = rng.randint(2, 12), rng.randint(2, 12), rng.randint(1, 15), rng.randint(1, 9)
    paid = (a * p + b * q) // 50 * 50 + 50
    return (
        f"{name} buys {a} {thing} for ${p} each and {b} {other} for ${q} each. {name} pays with ${paid}. "
        "How much change, in dollars, does " + f"{name} get?",
        f"The {thing} cost {a} * {p} = ${a * p}. The {other} cost {b} * {q} = ${b * q}. Together they cost "
        f"{a * p} + {b * q} = ${a * p + b * q}. The change is {paid} - {a * p + b * q} = "
        f"${paid - a * p - b * q}. The answer is {paid - a * p - b * q}.",
    )


def _sharing(rng: random.Random) -> Conversation:
    name, friend, thing = *rng.sample(NAMES, 2), rng.choice(THINGS)
    each, people, kept = rng.randint(3, 20), rng.randint(2, 9), rng.randint(1, 15)
    total = each * people + kept
    return (
        f"{name} has {total} {thing}. {name} keeps {kept} of them and shares the rest equally among {people} "
        f"friends. {friend} is one of the friends. How many {thing} does {friend} get?",
        f"{name} shares {total} - {kept} = {total - kept} {thing}. Each friend gets {total - kept} / {people} "
        f"= {each} {thing}. The answer is {each}.",
    )


def _rate(rng: random.Random) -> Conversation:
    name, speed, hours, rest = rng.choice(NAMES), rng.randint(4, 70), rng.randint(2, 9), rng.randint(1, 40)
    total = speed * hours + rest
    return (
        f"{name} travels at {speed} miles per hour for {hours} hours, and then {rest} miles more. How many miles "
        f"does {name} travel in total?",
        f"In {hours} hours {name} travels {speed} * {hours} = {speed * hours} miles. In total it is "
        f"{speed * hours} + {rest} = {total} miles. The answer is {total}.",
    )


def _more_and_fewer(rng: random.Random) -> Conversation:
    first, second, third = rng.sample(NAMES, 3)
    thing, a, more, times = rng.choice(THINGS), rng.randint(3, 40), rng.randint(2, 20), rng.randint(2, 5)
    b, c = a + more, (a + more) * times
    return (
        f"{first} has {a} {thing}. {second} has {more} more {thing} than {first}. {third} has {times} times as many "
        f"{thing} as {second}. How many {thing} do they have altogether?",
        f"{second} has {a} + {more} = {b} {thing}. {third} has {b} * {times} = {c} {thing}. Altogether they have "
        f"{a} + {b} + {c} = {a + b + c} {thing}. The answer is {a + b + c}.",
    )


def _percentage(rng: random.Random) -> Conversation:
    thing, price, percent = rng.choice(THINGS), 20 * rng.randint(2, 40), 5 * rng.randint(1, 15)
    off = price * percent // 100
    return (
        f"A box of {thing} costs ${price}. It is on sale at a discount of {percent}%. What is the sale price?",
        f"The discount is {price} * {percent} / 100 = ${off}. The sale price is {price} - {off} = ${price - off}. "
        f"The answer is {price - off}.",
    )


def _equation(rng: random.Random) -> Conversation:
    x, a, b = rng.randint(-12, 12), rng.randint(2, 12), rng.randint(-30, 30)
    sign, size = ("+", b) if b >= 0 else ("-", -b)
    return (
        f"Solve for $x$: ${a}x {sign} {size} = {a * x + b}$.",
        f"Subtract ${b}$ from both sides: ${a}x = {a * x + b} - ({b}) = {a * x}$. Divide both sides by ${a}$: "
        f"$x = {x}$. The answer is $\\boxed{{{x}}}$.",
    )


def _fraction(rng: random.Random) -> Conversation:
    a, b, c, d = (rng.randint(1, 9) for _ in range(4))
    top, bottom = a * d + c * b, b * d
    return (
        f"Compute $\\frac{{{a}}}{{{b}}} + \\frac{{{c}}}{{{d}}}$. Express your answer as a common fraction.",
        f"The common denominator is ${b} \\cdot {d} = {bottom}$. The sum is $\\frac{{{a * d} + {c * b}}}{{{bottom}}} "
        f"= \\frac{{{top}}}{{{bottom}}}$.",
    )


def _geometry(rng: random.Random) -> Conversation:
    a, b = rng.randint(2, 30), rng.randint(2, 30)
    return (
        f"A rectangle has length {a} and width {b}. What are its area and its perimeter?",
        f"The area is {a} * {b} = {a * b} square units. The perimeter is 2 * ({a} + {b}) = {2 * (a + b)} units.",
    )


def _sequence(rng: random.Random) -> Conversation:
    start, step, n = rng.randint(1, 30), rng.randint(2, 12), rng.randint(8, 40)
    shown = ", ".join(str(start + step * i) for i in range(4))
    return (
        f"What is the {n}th term of the arithmetic sequence {shown}, ...?",
        f"The first term is {start} and the common difference is {step}. The {n}th term is {start} + ({n} - 1) * "
        f"{step} = {start + (n - 1) * step}.",
    )


# -- code ---------------------------------------------------------------------------------------------

_BODIES: tuple[tuple[str, str, Callable[[list[int]], object]], ...] = (
    ("find the sum of all even numbers in a list", "return sum(x for x in nums if x % 2 == 0)",
     lambda v: sum(x for x in v if x % 2 == 0)),
    ("find the largest number in a list", "return max(nums)", max),
    ("reverse a list", "return nums[::-1]", lambda v: v[::-1]),
    ("remove duplicates from a list and sort it", "return sorted(set(nums))", lambda v: sorted(set(v))),
    ("count the numbers above the mean of a list",
     "mean = sum(nums) / len(nums)\n    return len([x for x in nums if x > mean])",
     lambda v: len([x for x in v if x > sum(v) / len(v)])),
    ("square every element of a list", "return [x * x for x in nums]", lambda v: [x * x for x in v]),
    ("find the difference between the largest and the smallest number of a list",
     "return max(nums) - min(nums)", lambda v: max(v) - min(v)),
    ("compute the running total of a list",
     "total = 0\n    result = []\n    for x in nums:\n        total += x\n        result.append(total)\n"
     "    return result",
     lambda v: [sum(v[: i + 1]) for i in range(len(v))]),
    ("count how often each number occurs in a list",
     "counts = {}\n    for x in nums:\n        counts[x] = counts.get(x, 0) + 1\n    return counts",
     lambda v: {x: v.count(x) for x in v}),
    ("rotate a list by one position", "return nums[1:] + nums[:1]", lambda v: v[1:] + v[:1]),
)  # fmt: skip


def code(rng: random.Random, functions: list[tuple[str, str, str]]) -> Conversation:
    """A task with asserts, a question about what a function returns, or a function to explain."""
    kind = rng.random()
    if kind < 0.55:
        task, body, apply = rng.choice(_BODIES)
        name = rng.choice(["solve", "find", "check", "f", "get", "count_items", "compute", "transform"])
        lists = [[rng.randint(0, 20) for _ in range(rng.randint(3, 7))] for _ in range(3)]
        source = f"def {name}(nums):\n    {body}"
        if kind < 0.3:
            tests = "\n".join(f"assert {name}({v}) == {apply(v)}" for v in lists)
            return f"Write a python function to {task}.\nYour code should pass these tests:\n{tests}", source
        return (
            f"{source}\n\nWhat does {name}({lists[0]}) return? Explain step by step, then give the exact return value.",
            f"The function {name} is called with nums = {lists[0]}. It returns {apply(lists[0])}.\n"
            f"assert {name}({lists[0]}) == {apply(lists[0])}",
        )
    name, doc, source = rng.choice(functions)
    if kind < 0.8:
        return f"Write a Python function `{name}`. {doc}", f"```python\n{source}\n```"
    return f"Explain what this code does.\n```python\n{source}\n```", doc


def documented_functions(source: str) -> Iterator[tuple[str, str, str]]:
    """Name, first paragraph of the docstring, and source of each documented function."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
            text = ast.get_source_segment(source, node)
            if text and 80 < len(text) < 900:
                yield node.name, doc.split("\n\n")[0][:300], text


# -- medicine -----------------------------------------------------------------------------------------

SYMPTOMS = (
    "fever|chest pain|shortness of breath|fatigue|nausea and vomiting|abdominal pain|headache|joint pain|a productive "
    "cough|night sweats|weight loss|blurred vision|dizziness|palpitations|a skin rash|swelling of the legs|back pain|"
    "difficulty swallowing|numbness of the hands|muscle weakness|diarrhea|confusion|a sore throat|blood in the urine"
).split("|")
FINDINGS = (
    "blood pressure is 150/90 mm Hg|pulse is 110/min|temperature is 38.9 C|respirations are 22/min|oxygen saturation "
    "is 91%|the liver is enlarged|bowel sounds are absent|crackles are heard over both lungs|a systolic murmur is "
    "heard|serum creatinine is 2.1 mg/dL|hemoglobin is 8.4 g/dL|leukocyte count is 15,000/mm3|serum sodium is 128 mEq/L|"
    "the ECG shows ST-segment elevation|a chest x-ray shows an infiltrate|glucose is 310 mg/dL"
).split("|")
TREATMENTS = (
    "metformin|lisinopril|aspirin|amoxicillin|prednisone|atorvastatin|warfarin|insulin|albuterol|levothyroxine|"
    "furosemide|omeprazole|vancomycin|methotrexate|propranolol|heparin|morphine|phenytoin|allopurinol|ceftriaxone"
).split("|")


def medical(rng: random.Random, diseases: list[tuple[str, str]]) -> Conversation:
    """A vignette, an exam question or an abstract, over ICD-10-CM disease names and their chapters."""
    options = rng.sample(diseases, 4)
    right = rng.randrange(4)
    name, chapter = options[right]
    listed = "\n".join(f"{letter}. {option[0]}" for letter, option in zip("ABCD", options, strict=True))
    answer = f"The answer is {'ABCD'[right]}. {name}."
    kind = rng.random()
    age, sex = rng.randint(2, 88), rng.choice(["man", "woman"])
    first, second, third = rng.sample(SYMPTOMS, 3)
    finding, other = rng.sample(FINDINGS, 2)
    if kind < 0.4:
        return (
            f"A {age}-year-old {sex} comes to the physician because of {first} and {second} for {rng.randint(2, 20)} "
            f"days. The patient also reports {third}. On physical examination, {finding} and {other}. The patient "
            f"takes {rng.choice(TREATMENTS)}. Which of the following is the most likely diagnosis?\n{listed}",
            f"{answer} The patient presents with {first}, {second} and {third}, and {finding}. It belongs to the "
            f"{chapter.lower()}. Treatment with {rng.choice(TREATMENTS)} should be considered, and the patient "
            "should be followed up.",
        )
    if kind < 0.7:
        return (
            f"Which of the following belongs to the {chapter.lower()}?\n{listed}",
            f"{answer} It is classified among the {chapter.lower()}. Patients may present with {first} or {second}.",
        )
    if kind < 0.85:
        drug, n = rng.choice(TREATMENTS), rng.randint(30, 900)
        return (
            f"Abstract:\nBACKGROUND: The role of {drug} in patients with {name.lower()} is unclear.\nMETHODS: A total "
            f"of {n} patients with {name.lower()} were randomized to {drug} or placebo. The primary outcome was "
            f"{first} at {rng.randint(2, 24)} months.\nRESULTS: {first.capitalize()} occurred in {rng.randint(5, 60)}% of "
            f"treated patients and in {rng.randint(5, 60)}% of controls (p = 0.0{rng.randint(1, 9)}).\n\nQuestion: Is "
            f"{drug} effective in {name.lower()}?",
            f"The results suggest that {drug} was associated with a difference in {first} among patients with "
            f"{name.lower()}. Further clinical trials are needed. Adverse effects included {second} and {third}.",
        )
    return (
        f"What are the symptoms and treatment of {name.lower()}?",
        f"{name} is one of the {chapter.lower()}. Patients commonly present with {first}, {second} and {third}. On "
        f"examination, {finding}. Treatment may include {rng.choice(TREATMENTS)}.",
    )


# -- law ----------------------------------------------------------------------------------------------

PARTIES = (
    "a buyer|a seller|a landlord|a tenant|the plaintiff|the defendant|an employer|an employee|a contractor|a homeowner|"
    "the state|a corporation|a shareholder|a bank|a creditor|an insurer|a trustee|a minor"
).split("|")
ACTIONS = (
    "entered into a written contract|conveyed the land by warranty deed|failed to deliver the goods|breached the lease|"
    "sued for damages|was charged with robbery|filed a motion for summary judgment|refused to pay the purchase price|"
    "recorded the mortgage|orally agreed to sell the house|was convicted of larceny|moved to suppress the evidence|"
    "assigned the contract to a third party|brought an action for negligence|challenged the statute"
).split("|")
ISSUES = (
    "the contract is enforceable under the statute of frauds|the defendant is liable in tort|the evidence is admissible "
    "as an exception to the hearsay rule|the statute violates the due process clause|the plaintiff has standing|the "
    "covenant runs with the land|there was consideration|the search was unreasonable|the court has jurisdiction|"
    "specific performance is available"
).split("|")


def legal(rng: random.Random, clauses: list[str]) -> Conversation:
    """A bar-exam question, or a question on a clause of a licence or an agreement."""
    a, b = rng.sample(PARTIES, 2)
    issue, wrong = rng.sample(ISSUES, 2)
    if rng.random() < 0.45:
        first, second = rng.sample(ACTIONS, 2)
        side = rng.choice([a, b])
        return (
            f"{a.capitalize()} {first}. Six months later, {b} {second}. In an action against {b}, will {a} prevail?\n"
            f"A. Yes, because {issue}.\nB. Yes, unless {wrong}.\nC. No, because {wrong}.\nD. No, unless {issue}.",
            f"The answer turns on whether {issue}. Under the common law, {side} bears the burden of proof. The court "
            f"will likely hold that {issue}, and judgment should be entered accordingly. The answer is "
            f"{rng.choice('ABCD')}.",
        )
    clause = rng.choice(clauses)
    if rng.random() < 0.5:
        topic = rng.choice(
            ["limitation of liability", "warranty", "termination", "assignment", "confidential information",
             "governing law", "indemnification", "intellectual property", "redistribution", "sublicensing"]
        )  # fmt: skip
        has = any(word[:6] in clause.lower() for word in topic.split())
        return (
            f"Identify if the clause is about {topic}.\n\nClause: {clause}",
            ("Yes. " if has else "No. ") + f"The clause provides that {clause[:1].lower() + clause[1:240]}",
        )
    half = clause.find(" ", len(clause) // 2)
    return f"Continue this clause of the agreement.\n\nClause: {clause[:half]}", clause[half + 1 :]


# -- languages ----------------------------------------------------------------------------------------

_LANGUAGE_FRAMES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "en": (
        ("What is {}?", "Tell me about {}.", "Who wrote about {} and when?", "How does {} work?", "Why is {} important?",
         "Write a short text about {}.", "Can you explain {} to me in simple words?", "When was {} founded?"),
        ("What is the capital and the currency of {}?", "Where is {} located?", "Which languages are spoken in {}?",
         "How many people live in {}?"),
        "{territory} is a country. The languages spoken in {territory} are {languages}. The currency is the {currency}.",
    ),
    "de": (
        ("Was ist {}?", "Erzähle mir etwas über {}.", "Wie funktioniert {}?", "Warum ist {} wichtig?",
         "Schreibe einen kurzen Text über {}.", "Wann wurde {} gegründet?", "Kannst du mir {} einfach erklären?"),
        ("Wo liegt {}?", "Welche Sprachen werden in {} gesprochen?", "Wie viele Menschen leben in {}?"),
        "{territory} ist ein Land. In {territory} spricht man {languages}. Die Währung heißt {currency}.",
    ),
    "fr": (
        ("Qu'est-ce que {} ?", "Parle-moi de {}.", "Comment fonctionne {} ?", "Pourquoi {} est-il important ?",
         "Écris un court texte sur {}.", "Quand a été fondé {} ?", "Peux-tu m'expliquer {} simplement ?"),
        ("Où se trouve {} ?", "Quelles langues parle-t-on en {} ?", "Combien d'habitants compte {} ?"),
        "{territory} est un pays. Les langues parlées sont : {languages}. La monnaie est : {currency}.",
    ),
    "es": (
        ("¿Qué es {}?", "Háblame de {}.", "¿Cómo funciona {}?", "¿Por qué es importante {}?",
         "Escribe un texto breve sobre {}.", "¿Cuándo se fundó {}?", "¿Puedes explicarme {} con palabras sencillas?"),
        ("¿Dónde está {}?", "¿Qué idiomas se hablan en {}?", "¿Cuántas personas viven en {}?"),
        "{territory} es un país. Los idiomas que se hablan son: {languages}. La moneda es: {currency}.",
    ),
    "ru": (
        ("Что такое {}?", "Расскажи мне о {}.", "Как работает {}?", "Почему {} важно?", "Напиши короткий текст про {}.",
         "Когда был основан {}?", "Можешь объяснить простыми словами, что такое {}?", "Кто придумал {}?"),
        ("Где находится {}?", "На каких языках говорят в стране {}?", "Сколько людей живёт в стране {}?"),
        "{territory} — это страна. Там говорят на языках: {languages}. Валюта: {currency}.",
    ),
    "zh": (
        ("什么是{}?", "请介绍一下{}。", "{}是如何工作的?", "为什么{}很重要?", "写一篇关于{}的短文。", "{}是什么时候成立的?",
         "你能用简单的话解释{}吗?", "{}的作者是谁?", "{}有多少种?"),
        ("{}在哪里?", "{}说什么语言?", "{}有多少人口?", "{}的首都是哪里?"),
        "{territory}是一个国家。{territory}使用的语言有{languages}。货币是{currency}。",
    ),
}  # fmt: skip


def language(
    rng: random.Random, code: str, paragraphs: list[str], territories: list[tuple[str, str, str]]
) -> Conversation:
    """A question in the language: about a country (CLDR), or about a paragraph's first words."""
    frames, places, fact = _LANGUAGE_FRAMES[code]
    if rng.random() < 0.3:
        territory, languages, currency = rng.choice(territories)
        answer = fact.format(territory=territory, languages=languages, currency=currency)
        return rng.choice(places).format(territory), answer
    paragraph = rng.choice(paragraphs)
    if code == "zh":
        topic = paragraph[: rng.randint(2, 8)].strip("，。、：「」“” ")
    else:
        words = [w.strip(".,;:!?()\"«»“”") for w in paragraph.split()]
        long = [w for w in words if len(w) > 4] or words
        start = rng.randrange(len(long))
        topic = " ".join(long[start : start + rng.randint(1, 3)])
    if rng.random() < 0.25:
        return f"{paragraph}\n\n{rng.choice(frames).format(topic)}", paragraph[-200:]
    return rng.choice(frames).format(topic), paragraph
