"""The wheel has what runs from it: C++ sources, tables, the tiny model; and its command starts."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLACES = {"k3compile": "k3compile", "passes": "k3compile/passes", "kernels": "k3compile/kernels",
          "runtime": "k3compile/runtime"}  # fmt: skip
DATA = (
    "kernels/cpu/*.cpp",
    "kernels/cpu/*.h",
    "k3compile/aot/tables/*.json",
    "k3compile/graphdiff/assets/*",
    "k3compile/data/k3-tiny/**/*",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of what is here, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    names = [*PLACES, "pyproject.toml", "README.md", "LICENSE"]
    copy = folder / "source"
    copy.mkdir()
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in names), str(copy)], check=True)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    made = subprocess.run(
        [*pip, "-w", str(folder), str(copy)], capture_output=True, text=True, timeout=300, check=False
    )
    assert made.returncode == 0, made.stderr
    (path,) = folder.glob("*.whl")
    return path


def shipped(path: Path) -> str:
    """Its name in the wheel."""
    top, *rest = path.relative_to(ROOT).parts
    return "/".join([PLACES[top], *rest])


@pytest.mark.slow
def test_every_source_and_every_file_of_data_is_in_it(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = [p for folder in PLACES for p in (ROOT / folder).rglob("*.py")]
    for pattern in DATA:
        found = [p for p in ROOT.glob(pattern) if p.is_file()]
        assert found, pattern
        expected += found
    assert not [name for name in map(shipped, expected) if name not in inside]


@pytest.mark.slow
def test_its_command_starts_where_the_sources_are_not(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path[:] = [p for p in sys.path if p != {str(ROOT)!r}]\n"
        f"sys.meta_path[:] = [f for f in sys.meta_path if 'ditable' not in str(f)]\n"
        f"sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import k3compile; print(k3compile.__file__)\n"
        "from k3compile.cli.loading import or_shipped; print(or_shipped(None))\n"
        "from k3compile.cli.main import main; main(['kernels', '--help'])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert said.returncode == 0, said.stderr
    package, model, *text = said.stdout.splitlines()
    assert package.startswith(str(tmp_path))
    assert model.startswith(str(tmp_path))
    assert any("--target" in line for line in text)
