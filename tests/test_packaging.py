"""However the project is installed, or not installed at all, `sanctuary_trainer.callbacks` is imported from it."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import sanctuary_trainer

ROOT = Path(__file__).resolve().parent.parent

LOOK = """
import json, sys
import sanctuary_trainer
light = "torch" not in sys.modules
import sanctuary_trainer.callbacks
from importlib.metadata import version, PackageNotFoundError
try: found = version("sanctuary-trainer")
except PackageNotFoundError: found = None
print(json.dumps({
    "light": light, "package": sanctuary_trainer.__file__, "callbacks": sanctuary_trainer.callbacks.__file__,
    "version": sanctuary_trainer.__version__, "metadata": found,
}))
"""


def execute(*command: object, cwd: Path) -> str:
    """Runs a command without the tests' PYTHONPATH, so that only what is installed is found; returns what it wrote."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def look(python: Path | str, cwd: Path) -> dict[str, object]:
    facts: dict[str, object] = json.loads(execute(python, "-c", LOOK, cwd=cwd).splitlines()[-1])
    return facts


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, so that builds leave nothing in the one that is tested."""
    copy = tmp_path_factory.mktemp("source") / "project"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("sanctuary_trainer", "callbacks"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheels(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel built from the tree, and the one built from the sdist, with the sdist beside them."""
    direct, through_sdist = tmp_path_factory.mktemp("direct"), tmp_path_factory.mktemp("sdist")
    build = (sys.executable, "-m", "build", "--no-isolation")
    execute(*build, "--wheel", "--outdir", direct, checkout, cwd=direct)
    shutil.rmtree(checkout / "build", ignore_errors=True)
    execute(*build, "--outdir", through_sdist, checkout, cwd=through_sdist)
    return {
        "wheel": next(direct.glob("*.whl")),
        "sdist": next(through_sdist.glob("*.tar.gz")),
        "wheel of the sdist": next(through_sdist.glob("*.whl")),
    }


@pytest.fixture
def environment(tmp_path: Path) -> Callable[..., Path]:
    """Makes a clean environment with what is given installed; returns its python. torch and the rest are borrowed."""

    def make(*what: object) -> Path:
        folder = tmp_path / "environment"
        venv.create(folder, with_pip=False)
        python = folder / "bin" / "python"
        site_packages = next(folder.glob("lib/python*/site-packages"))
        # A folder named in a .pth file is searched, but its own .pth files (an editable install) are not read.
        (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install = ("install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
        # --python: pip of the tests' environment, which the clean one lacks.
        execute(sys.executable, "-m", "pip", "--python", python, *install, *what, cwd=tmp_path)
        return python

    return make


@pytest.mark.parametrize("kind", ["wheel", "wheel of the sdist"])
def test_an_installed_wheel_holds_the_callbacks(
    kind: str, wheels: dict[str, Path], environment: Callable[..., Path], tmp_path: Path
) -> None:
    python = environment(wheels[kind])
    facts = look(python, tmp_path)
    installed = next(python.parent.parent.glob("lib/python*/site-packages")) / "sanctuary_trainer"
    assert facts == {
        "light": True,
        "package": str(installed / "__init__.py"),
        "callbacks": str(installed / "callbacks" / "__init__.py"),
        "version": sanctuary_trainer.__version__,
        "metadata": sanctuary_trainer.__version__,
    }
    assert "demo" in execute(python.parent / "sanctuary", "--help", cwd=tmp_path)


def test_an_editable_install_reads_the_checkout(
    checkout: Path, environment: Callable[..., Path], tmp_path: Path
) -> None:
    facts = look(environment("--editable", checkout), tmp_path)
    assert facts["package"] == str(checkout / "sanctuary_trainer" / "__init__.py")
    assert Path(str(facts["callbacks"])).resolve() == checkout / "callbacks" / "__init__.py"
    assert facts["metadata"] == sanctuary_trainer.__version__


def test_a_bare_checkout_works_where_it_lies(checkout: Path) -> None:
    facts = look(sys.executable, checkout)
    assert facts["package"] == str(checkout / "sanctuary_trainer" / "__init__.py")
    assert Path(str(facts["callbacks"])).resolve() == checkout / "callbacks" / "__init__.py"


def test_the_wheel_holds_each_module_once_and_nothing_else(wheels: dict[str, Path]) -> None:
    contents = [
        sorted(name for name in zipfile.ZipFile(wheels[kind]).namelist() if ".dist-info/" not in name)
        for kind in ("wheel", "wheel of the sdist")
    ]
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "sanctuary_trainer").rglob("*.py")}
    expected |= {f"sanctuary_trainer/{path.relative_to(ROOT)}" for path in (ROOT / "callbacks").rglob("*.py")}
    assert contents[0] == contents[1] == sorted(expected | {"sanctuary_trainer/py.typed"})
    with tarfile.open(wheels["sdist"]) as sdist:
        assert any(name.endswith("/callbacks/__init__.py") for name in sdist.getnames())


def test_callbacks_under_another_name_are_refused(checkout: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import callbacks"], cwd=checkout, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "sanctuary_trainer.callbacks" in done.stderr.splitlines()[-1]


def test_importing_the_public_names_brings_torch_and_no_other_heavy_package(
    record_property: Callable[[str, object], None],
) -> None:
    code = """
import sys, time, json, torch
before, started = set(sys.modules), time.process_time()
from sanctuary_trainer import *
seconds = time.process_time() - started
print(json.dumps({"seconds": seconds, "packages": sorted({name.split(".")[0] for name in set(sys.modules) - before})}))
"""
    facts = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True, timeout=100))
    record_property("seconds_of_cpu_after_torch", facts["seconds"])  # a report, not a claim: other tests run beside it
    heavy = {"accelerate", "datasets", "matplotlib", "pandas", "scipy", "sklearn", "tensorboard", "timm"}
    heavy |= {"torchmetrics", "torchvision", "tqdm", "transformers"}
    assert heavy & set(facts["packages"]) == set()


def test_the_command_that_ci_runs_is_the_one_in_the_readme() -> None:
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert len(commands) == 2, "README has one line that runs the demo and one that runs the tests"
    assert commands[0].endswith("sanctuary demo")
    assert commands[1].endswith("-m pytest")
    assert commands[1] in (ROOT / "CONTRIBUTING.md").read_text()
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_the_extra_dev_holds_all_others() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = re.fullmatch(rf"{project['name']}\[(.*)\]", extras["dev"][0])
    assert named is not None
    assert set(named[1].split(",")) == extras.keys() - {"dev"}
