"""Free texts that the demonstration model is trained on: packages, licences, and their readers.

Nothing is scraped: each text is a file of a Debian or Python package, downloaded by name with `apt-get
download` and `pip download`, and unpacked. Only Babel and Faker are imported, for names in each language.
"""

from __future__ import annotations

import ast
import functools
import gettext
import gzip
import hashlib
import html
import re
import subprocess
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from eldr_serve.errors import UserInputError

TASKS = ("code", "math", "medical", "legal")
MAIN_LANGUAGES = ("en", "zh", "ru", "fr", "es", "de", "ar", "ja")
RARE_LANGUAGES = (
    "ko",
    "vi",
    "tr",
    "id",
    "fa",
    "hi",
    "th",
    "pt",
    "el",
    "nl",
    "it",
    "pl",
    "cs",
    "hu",
    "uk",
    "ro",
    "he",
)
DOMAINS = TASKS + MAIN_LANGUAGES + RARE_LANGUAGES

DEBIAN_PACKAGES = {
    "GPL-2+ manuals": """debian-handbook debian-faq debian-faq-de debian-faq-fr debian-faq-ja debian-faq-ru
        debian-faq-zh-cn debian-faq-it debian-faq-ko debian-faq-nl debian-faq-pt debian-reference-en
        debian-reference-de debian-reference-es debian-reference-fr debian-reference-it debian-reference-ja
        debian-reference-pt debian-reference-zh-cn debian-reference-zh-tw debian-reference-id aptitude-doc-en
        aptitude-doc-es aptitude-doc-fr aptitude-doc-ja aptitude-doc-ru developers-reference
        developers-reference-de developers-reference-fr developers-reference-ja developers-reference-ru
        installation-guide-amd64 maint-guide maint-guide-de maint-guide-es maint-guide-fr maint-guide-ja
        maint-guide-ru maint-guide-vi maint-guide-zh-cn debian-edu-doc-de debian-edu-doc-es debian-edu-doc-fr
        debian-edu-doc-ja debian-edu-doc-zh-cn""",
    "CC-BY-SA-3.0 desktop help": "gnome-user-docs",
    "MPL-2.0 office help": """libreoffice-help-zh-cn libreoffice-help-ja libreoffice-help-ko
        libreoffice-help-ru libreoffice-help-de libreoffice-help-fr libreoffice-help-es libreoffice-help-vi
        libreoffice-help-tr libreoffice-help-id libreoffice-help-hi libreoffice-help-pt-br
        libreoffice-help-el""",
    "GPL-3+ and CC-BY-3.0 manual": "kicad-doc-zh",
    "GPL/LGPL program messages": """evolution-common gimp-data vlc-l10n libgtk-3-common
        gnome-control-center-data""",
    "GPL dictionary (GCIDE)": "dict-gcide",
    "WordNet licence (permissive)": "dict-wn",
}
PYTHON_PACKAGES = {
    "chatterbot-corpus": "BSD-3-Clause, question and answer pairs",
    "simple-icd-10-cm": "MIT; the ICD-10-CM tabular list itself is a work of the US government",
    "faker-healthcare-provider": "MIT, diseases with symptoms and medicines",
    "faker": "MIT, names of people and places",
    "babel": "BSD-3-Clause; CLDR data under Unicode-3.0, names of countries, languages and cities",
    "scancode-toolkit": "CC-BY-4.0 licence database; licence and contract texts",
}

_LANGUAGE_TOKENS = {"C": "en", "en-US": "en", "en-us": "en", "zh-CN": "zh", "zh_CN": "zh", "zh-cn": "zh"}
_LANGUAGE_TOKENS |= {"zh-TW": "zh", "zh_TW": "zh", "zh-tw": "zh", "pt-BR": "pt", "pt_BR": "pt", "pt-br": "pt"}
_LANGUAGE_TOKENS |= {code: code for code in (*MAIN_LANGUAGES, *RARE_LANGUAGES)}
_SCRIPTS = {
    "zh": r"[\u4e00-\u9fff]",
    "ja": r"[\u3040-\u30ff]",
    "ko": r"[\uac00-\ud7af]",
    "ru": r"[\u0400-\u04ff]",
    "uk": r"[\u0400-\u04ff]",
    "ar": r"[\u0600-\u06ff]",
    "fa": r"[\u0600-\u06ff]",
    "he": r"[\u0590-\u05ff]",
    "el": r"[\u0370-\u03ff]",
    "hi": r"[\u0900-\u097f]",
    "th": r"[\u0e00-\u0e7f]",
}
_ENGLISH = re.compile(r"\b(the|of|and|to|is|for|you|with|this|are|be)\b", re.IGNORECASE)
_BLOCK = re.compile(r"<(?:p|li|dd|title|h\d)\b[^>]*>(.*?)</(?:p|li|dd|title|h\d)>", re.DOTALL)
_TAG = re.compile(r"<[^>]+>")


@dataclass(frozen=True)
class Text:
    """One piece of running text: its domain, the document it came from, and the text itself."""

    domain: str
    document: str
    text: str


def fetch(directory: Path) -> Path:
    """Download and unpack every package below `directory`. Do nothing if that was done before."""
    root = directory / "unpacked"
    if (root / "complete").exists():
        return root
    for name in ("debian", "python", "unpacked"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    debian = " ".join(DEBIAN_PACKAGES.values()).split()
    pip = ["pip", "download", "--quiet", "--no-deps", "-d", "../python", *PYTHON_PACKAGES]
    for command in (["apt-get", "download", "-q", *debian], pip):
        try:
            done = subprocess.run(
                command, cwd=directory / "debian", capture_output=True, text=True, check=False
            )
        except FileNotFoundError as error:
            raise UserInputError(f"{command[0]} is needed to download the source packages") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserInputError(f"{command[0]} could not download a source package: {last}")
    for archive in sorted((directory / "debian").glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(archive), str(root)], check=True)
    for archive in sorted((directory / "python").iterdir()):
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(root / "python")
        else:
            with tarfile.open(archive) as file:
                file.extractall(root / "python", filter="data")
    (root / "complete").touch()
    return root


def _language_of(path: Path) -> str:
    tokens = re.split(r"[/.]", str(path))
    for token in reversed(tokens):
        if token in _LANGUAGE_TOKENS:
            return _LANGUAGE_TOKENS[token]
    match = re.search(r"-(zh-cn|zh-tw|pt-br|[a-z]{2})/", str(path))
    return _LANGUAGE_TOKENS.get(match.group(1), "en") if match else "en"


def is_language(text: str, language: str) -> bool:
    """Return whether `text` is in `language`, not in English (by script, or by English stop words)."""
    if language in _SCRIPTS:
        # str.isalpha excludes vowel signs of Hindi and Thai, so count the script's own range
        written = sum(not c.isspace() for c in text)
        return written > 12 and len(re.findall(_SCRIPTS[language], text)) > 0.35 * written
    letters = sum(c.isalpha() for c in text)
    if letters < 20 or letters < 0.5 * len(text):
        return False
    english = len(_ENGLISH.findall(text)) / max(1, len(text.split()))
    return english > 0.02 if language == "en" else english < 0.04


def clean(markup: str) -> str:
    """Return the plain text of a piece of HTML, white space collapsed."""
    return re.sub(r"\s+", " ", html.unescape(_TAG.sub("", markup))).strip()


def manuals(root: Path) -> Iterator[Text]:
    """Yield paragraphs of manuals and help pages in every language, each once, document by document."""
    files = [p for p in root.rglob("*") if p.suffix in {".html", ".page"} and "python" not in p.parts]
    seen: set[bytes] = set()
    for path in sorted(files, key=lambda p: hashlib.sha256(str(p.relative_to(root)).encode()).digest()):
        relative = path.relative_to(root)
        language = _language_of(relative)
        paragraphs = []
        for match in _BLOCK.finditer(path.read_text("utf-8", errors="ignore")):
            text = clean(match.group(1))
            key = hashlib.sha256(text.encode()).digest()[:8]
            if len(text) >= 30 and key not in seen and is_language(text, language):
                seen.add(key)
                paragraphs.append(text)
        if sum(map(len, paragraphs)) > 300:
            yield Text(language, str(relative), "\n\n".join(paragraphs))


def messages(root: Path) -> Iterator[Text]:
    """Yield translated program messages, the only sizeable Arabic and Thai texts of these packages."""
    for language in ("ar", "th", "fa", "he", "ko", "vi"):
        for path in sorted(root.glob(f"usr/share/locale/{language}/LC_MESSAGES/*.mo")):
            with path.open("rb") as file:
                catalogue = gettext.GNUTranslations(file)
            lines = [clean(str(v)) for v in catalogue._catalog.values() if isinstance(v, str)]  # type: ignore[attr-defined]  # noqa: SLF001
            lines = [line for line in lines if 25 <= len(line) <= 600 and is_language(line, language)]
            for start in range(0, len(lines), 6):
                yield Text(language, f"{path.name}:{language}:{start}", "\n\n".join(lines[start : start + 6]))


_GCIDE_MARKS = {
    "medical": r"\((?:Med|Anat|Physiol|Surg|Pharm|Bot\. & Med|Chem\. & Med)\.?\)",
    "legal": r"\((?:Law|O\. Eng\. Law|Eng\. Law|Civil Law|Rom\. Law|Scots Law|Eccl\. Law|Old Eng\. Law)\)",
    "math": r"\((?:Math|Geom|Alg|Arith|Trig|Conic Sections|Crystallog)\.?\)",
}
_GLOSS_WORDS = {
    "medical": r"\b(?:disease|symptom|drug|muscle|artery|vein|nerve|surg\w+|infection|syndrome|tumou?r|"
    r"patient|medic\w+|inflammation|antibiotic|hormone|blood|tissue|bone|kidney|liver|skin|brain|cell)s?\b",
    "legal": r"\b(?:law|legal|court|contract|crime|criminal|plaintiff|defendant|statute|judge|judicial|jury|"
    r"lawyer|property|trial|treaty|legislat\w+|lawsuit|offen[cs]e|deed|testator)s?\b",
    "math": r"\b(?:mathematics|integer|geometry|polygon|theorem|equation|triangle|logarithm|algebra|"
    r"numerator|vector|matrix|trigonometric|statistics|polyhedron|function|cardinal number)s?\b",
}


@functools.cache
def _dictionary(path: Path) -> list[str]:
    text = gzip.decompress(path.read_bytes()).decode("utf-8", errors="ignore")
    return re.split(r"\n(?=\S)", text)


def definitions(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (domain, term, definition) of two dictionaries, by subject mark (GCIDE) or by words (WordNet)."""
    for entry in _dictionary(root / "usr/share/dictd/gcide.dict.dz"):
        term = entry.split("\\")[0].strip().split(",")[0].split("(")[0].strip()
        # only the senses under the mark: a term of mathematics often has an everyday sense too
        for sense in re.split(r"\n\s+(?=\d+\. )", entry):
            domain = next((d for d, mark in _GCIDE_MARKS.items() if re.search(mark, sense)), None)
            body = re.sub(r"\[[^\]]*\]|\([^)]*\)|--[A-Z][\w. ]+|[{}]|^\S.*\\", "", sense)
            body = re.sub(r"^(?:\W|\d|[a-z]{1,2}\.|pl\.)*", "", re.sub(r"\s+", " ", body)).strip(" ,.;")
            if domain and 30 < len(body) < 500 and 2 < len(term) < 40:
                yield domain, term, body + "."
    for entry in _dictionary(root / "usr/share/dictd/wn.dict.dz"):
        term, _, rest = entry.partition("\n")
        for gloss in re.split(r"\n +(?:(?:n|v|adj|adv) \d*|\d+) ?: ", "\n" + rest)[1:]:
            gloss = re.sub(r"\s+", " ", re.sub(r"\[[^\]]*\]|[{}]", "", gloss)).strip()
            if 25 < len(gloss) < 500 and 2 < len(term) < 40:
                words = _GLOSS_WORDS.items()
                yield next((d for d, w in words if re.search(w, gloss)), "en"), term.strip(), gloss


def diagnoses(root: Path) -> list[tuple[str, list[str]]]:
    """Return (description, notes) of each ICD-10-CM category."""
    file = next((root / "python/simple_icd_10_cm/data").glob("*.xml"))
    found = []
    for node in ElementTree.parse(file).iter("diag"):
        kinds = ("includes", "inclusionTerm", "excludes1")
        notes = [note.text or "" for kind in kinds for note in node.findall(f"{kind}/note")]
        found.append((node.findtext("desc") or "", notes))
    return found


def diseases(root: Path) -> dict[str, dict[str, object]]:
    """Return disease -> symptoms, medications, specialty, parsed as a literal without execution."""
    tree = ast.parse((root / "python/faker_healthcare/disease_correlations.py").read_text())
    values = (node.value for node in tree.body if isinstance(node, ast.AnnAssign) and node.value is not None)
    return ast.literal_eval(next(values))  # type: ignore[no-any-return]


def licences(root: Path) -> Iterator[Text]:
    """Yield English licence and contract texts."""
    for path in sorted((root / "python/licensedcode/data/licenses").glob("*.LICENSE")):
        text = path.read_text("utf-8", errors="ignore").split("\n---", 1)[-1].strip("- \n")
        paragraphs = [re.sub(r"\s+", " ", p).strip() for p in re.split(r"\n\s*\n", text)]
        text = "\n\n".join(p for p in paragraphs if len(p) > 60)
        if len(text) > 600 and is_language(text, "en"):
            yield Text("legal", path.name, text)


def standard_library() -> Iterator[Text]:
    """Yield Python's own library (PSF licence)."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if not {"site-packages", "test", "tests", "encodings", "idle_test"} & set(path.parts):
            yield Text("code", path.name, path.read_text("utf-8", errors="ignore"))


def conversations(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (language, question, answer) of the chatterbot corpus, whose files are plain two-level lists."""
    names = {
        "english": "en",
        "chinese": "zh",
        "traditionalchinese": "zh",
        "russian": "ru",
        "french": "fr",
        "spanish": "es",
        "german": "de",
        "japanese": "ja",
        "korean": "ko",
        "turkish": "tr",
        "hindi": "hi",
        "indonesian": "id",
        "persian": "fa",
        "thai": "th",
        "portuguese": "pt",
        "dutch": "nl",
        "italian": "it",
        "ukrainian": "uk",
        "hebrew": "he",
    }
    for folder, language in names.items():
        for path in sorted((root / "python/chatterbot_corpus/data" / folder).glob("*.yml")):
            pair: list[str] = []
            for line in path.read_text("utf-8", errors="ignore").splitlines():
                text = re.sub(r"^(\s|- )*", "", line).strip("'\" ")
                if re.match(r"^\s*- - ", line):
                    pair = [text]
                elif re.match(r"^\s+- ", line) and len(pair) == 1:
                    yield language, pair[0], text
                    pair = []
                elif pair and text:
                    pair[-1] += " " + text
