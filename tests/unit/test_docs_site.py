"""The documentation site builds strictly, fetches from no other host, and names existing commands."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

import eldr_serve
import eldr_serve.scheduling
from benchmarks.__main__ import NAMES
from benchmarks.papers.reproduce import PAPERS
from docs.generate.reference import MODULES, locust_help, module_app
from eldr_serve.cli import app
from eldr_serve.commands.lazy import resolve
from eldr_serve.metrics import METRICS, PREFIX
from eldr_serve.scheduling import make_policy
from tests.support.pages import PAGES, code_lines
from tests.support.processes import python
from tests.support.shipped import ROOT

_FETCHED = {"img": "src", "link": "href", "script": "src", "source": "src", "iframe": "src"}
_INLINE = re.compile(r"`((?:eldr|make|python -m) [^`]+)`")


class _Fetched(HTMLParser):
    """The addresses that a browser fetches with a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(_FETCHED.get(tag, "")) or ""
        if dict(attrs).get("rel") != "canonical":
            self.addresses.append(address)


def _build(*options: str) -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does, with further options."""
    (words,) = re.findall(
        r"^\t.*\$\(BIN\)/python (-m mkdocs build.*)$", (ROOT / "Makefile").read_text(), re.M
    )
    return python(*words.split(), *options, timeout_s=600, NO_MKDOCS_2_WARNING="1")


@pytest.mark.slow
@pytest.mark.parametrize("good", [True, False])
def test_a_page_outside_the_menu_and_each_dead_link_fail_the_build(good: bool, tmp_path: Path) -> None:
    links = ["index.md#heading"] if good else ["nowhere.md", "index.md#no-heading"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# Heading\n\n" + "".join(f"[on]({link})\n" for link in links))
    if not good:
        (tmp_path / "docs/orphan.md").write_text("# Orphan\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: docs\nsite_dir: site\nhooks: []\nplugins: []\n"
        "not_in_nav: ''\nnav: [index.md]\n"
    )
    done = _build("--config-file", str(config))
    assert (done.returncode == 0) == good, done.stderr
    if not good:  # each of the three is a warning, any of which fails a strict build
        assert done.stderr.count("WARNING") == 3, done.stderr
        assert all(word in done.stderr for word in ("nowhere.md", "no-heading", "orphan.md"))


@pytest.mark.slow
def test_the_site_builds_strictly_and_fetches_from_no_other_host(tmp_path: Path) -> None:
    done = _build("--site-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr  # dead links, dead anchors, pages outside the menu
    pages = sorted(tmp_path.rglob("*.html"))
    assert {"index.html", "reference/commands.html"} <= {str(p.relative_to(tmp_path)) for p in pages}
    assert not {
        address
        for page in pages
        for address in _Fetched(page).addresses
        if address.startswith(("http:", "https:", "//"))
    }
    styles = "".join(style.read_text() for style in tmp_path.rglob("*.css"))
    assert not re.findall(r"url\([\"']?(?:https?:)?//[^)]*\)|@import[^;]*//[^;]*", styles)
    assert str(ROOT) not in "".join(page.read_text() for page in pages)
    names = (tmp_path / "reference/python.html").read_text()
    for name in {*eldr_serve.__all__, *eldr_serve.scheduling.__all__}:
        assert re.search(rf'id="eldr_serve\.(scheduling\.)?{name}"', names), name
    reference = (tmp_path / "reference/commands.html").read_text()
    assert not [name for name in get_command(app).commands if f"eldr {name}" not in reference]
    assert not [name for name in (*MODULES, "locust") if name not in reference]
    metrics = (tmp_path / "reference/metrics.html").read_text()
    assert not [name for name in METRICS if f"{PREFIX}{name}" not in metrics]


def _shown_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield (page, words) of each of our commands on a page."""
    for page in PAGES:
        for line in [*code_lines(page), *_INLINE.findall(page.read_text())]:
            for part in re.split(r"&&|\s--\s|^\$ ", line):
                words = part.partition("#")[0].split()
                if words[:1] in (["eldr"], ["make"], ["locust"]) or words[:2] == ["python", "-m"]:
                    yield page.name, words


def _options_of(words: list[str]) -> set[str]:
    """Return the options of `python -m MODULE [COMMAND]`, or of locust with ours."""
    if words[0] == "locust":
        return set(re.findall(r"--[a-z][a-z-]*", locust_help()))
    command = get_command(module_app(words[2]))
    command = getattr(command, "commands", {}).get(words[3] if words[3:] else "", command)
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)}


def _has_target(words: list[str]) -> bool:
    """Return whether `eldr bench` or `eldr reproduce` has the named benchmark or figure."""
    named = [word for word in words[2:] if not word.startswith("-") and word != "..."]
    if words[1] == "bench":
        return {*named} <= {*NAMES, "NAME", "all"}
    return not named or {*named[1:2]} - {"FIGURE"} <= PAPERS.get(named[0], {}).keys()


@pytest.mark.slow
def test_every_command_that_a_page_shows_exists_with_its_options() -> None:
    group: Any = get_command(app)
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong, num_commands = [], 0
    for page, words in _shown_commands():
        line = f"{page}: {shlex.join(words)}"
        options = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--help"}
        if words[0] == "make":
            ok = all(word in targets for word in words[1:] if re.fullmatch("[a-z-]+", word))
        elif words[0] == "locust" or set(words[2:3]) & MODULES.keys():
            ok = options <= _options_of(words)
        elif words[0] == "python":
            path = ROOT / words[2].replace(".", "/")
            ok = "NAME" in words[2] or path.with_suffix(".py").exists() or path.is_dir()
            ok = ok or words[2].split(".")[0] not in {p.name for p in ROOT.iterdir()}
        elif len(words) < 2 or words[1].startswith("-"):
            ok = options <= {option for param in group.params for option in param.opts}
        elif ok := words[1] in group.commands:
            command = resolve(group.commands[words[1]])
            command = getattr(command, "commands", {}).get(words[2] if words[2:] else "", command)
            option_names = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
            ok = options <= option_names and (words[1] not in ("bench", "reproduce") or _has_target(words))
        num_commands += 1
        wrong += [] if ok or page.startswith("008-") else [line]  # 008 lists what was removed
    assert num_commands > 50
    assert not wrong


def test_the_predictor_on_the_page_is_valid() -> None:
    text = (ROOT / "docs/extend.md").read_text()
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[2], names)
    policy = make_policy("balance-route-horizon")
    half = names["HalfEndSoon"](policy.parameters.horizon)
    p, mu = half.predict(np.array([1, 2]), [None, None], np.array([5, 5]))
    assert p.shape == mu.shape == (2,)
    assert set(mu) == {policy.parameters.horizon / 2}
