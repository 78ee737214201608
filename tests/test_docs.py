"""README and docs/ say what is true: their code runs, prints what they show, and what they name is there."""

import ast
import contextlib
import importlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_layering import ROOMS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", flags=re.MULTILINE | re.DOTALL)
COMPARED = ROOT / "docs" / "comparison.md"  # its scripts need the other trainers


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_page(text: str) -> list[str]:
    """Run the python blocks of one page in one namespace; returns what each printed."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed = []
    for code, _ in BLOCK.findall(text):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "<docs>", "exec"), namespace)
        printed.append(out.getvalue())
    return printed


@pytest.mark.parametrize("page", [p for p in PAGES if p != COMPARED and "```python" in p.read_text()], ids=relative)
def test_a_block_prints_what_the_page_says(page: Path) -> None:
    pytest.importorskip("sklearn")
    text = page.read_text()
    for (code, shown), printed in zip(BLOCK.findall(text), run_page(text), strict=True):
        if shown:
            assert printed.splitlines()[-len(shown.splitlines()) :] == shown.splitlines(), code


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    named += [(path, name) for name, path in re.findall(r"\[(test_\w+)\]\((tests/[\w/]+\.py)\)", text)]
    missing = [f"{path}::{name}" for path, name in named if name not in functions_of(ROOT / path)]
    assert missing == []


def functions_of(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_rooms_in_the_docs_are_those_of_the_house() -> None:
    """The table under "Rooms" in docs/architecture.md, in the order in which imports point up."""
    section = (ROOT / "docs" / "architecture.md").read_text().split("## Rooms")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", section, flags=re.MULTILINE) == list(ROOMS)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["sanctuary_trainer", "sanctuary_trainer.callbacks", "sanctuary_trainer.tasks"])
def test_the_reference_holds_every_public_name_once(name: str) -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    named = re.findall(rf"^::: {re.escape(name)}\.(\w+)$", pages, flags=re.MULTILINE)
    assert sorted(named) == sorted(importlib.import_module(name).__all__)
