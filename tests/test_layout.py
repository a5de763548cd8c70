"""The house keeps its shape: imports point one way, files stay small, every module has its test."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "k3compile": ROOT / "k3compile",
    "k3compile.passes": ROOT / "passes",
    "k3compile.kernels": ROOT / "kernels",
    "k3compile.runtime": ROOT / "runtime",
}
MAY_IMPORT = {
    "k3compile": {"k3compile", "k3compile.passes", "k3compile.kernels", "k3compile.runtime"},
    "k3compile.passes": {"k3compile.passes", "k3compile.kernels"},
    "k3compile.kernels": {"k3compile.kernels"},
    "k3compile.runtime": {"k3compile.runtime", "k3compile.kernels"},
}
READS_ENVIRONMENT = {"k3compile/options.py", "runtime/parallel/launch.py", "runtime/parallel/ranks.py"}
READS_ENVIRONMENT |= {"k3compile/cli/main.py"}  # sets what torch reads before it is there
WITHOUT_TORCH = ["runtime/scheduler.py", "runtime/request.py", "runtime/engine_config.py"]
SHIPPED = "k3compile/data/"  # the trained tiny model: what its training script writes, and nothing else
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 400, 60


@cache
def sources() -> list[Path]:
    return sorted(p for folder in FOLDERS.values() for p in folder.rglob("*.py"))


class File(NamedTuple):
    """What the tests ask of a file, read once; a whole syntax tree a file is too much to keep."""

    docstring: str | None
    imports: list[ast.Import | ast.ImportFrom]
    functions: list[tuple[int, str, int]]  # line, name, lines
    environment: list[int]  # lines


@cache
def read(path: Path) -> File:
    tree = ast.parse(path.read_text())
    found = File(ast.get_docstring(tree), [], [], [])
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.imports.append(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.functions.append((node.lineno, node.name, node.end_lineno - node.lineno + 1))
        elif isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb"}:
            found.environment.append(node.lineno)
    return found


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def package_of(path: Path) -> str:
    """k3compile.kernels for kernels/kda.py; the longest folder that holds it."""
    return max((n for n, f in FOLDERS.items() if path.is_relative_to(f)), key=len)


def dotted(path: Path) -> str:
    package = package_of(path)
    parts = path.relative_to(FOLDERS[package]).with_suffix("").parts
    return ".".join([package, *[p for p in parts if p != "__init__"]])


@cache
def imports(path: Path) -> list[tuple[str, int]]:
    """Every absolute module name the file imports, relative imports resolved, with the line."""
    base = dotted(path).split(".")
    if path.name != "__init__.py":
        base = base[:-1]
    found = []
    for node in read(path).imports:
        if isinstance(node, ast.Import):
            found += [(a.name, node.lineno) for a in node.names]
        else:
            head = base[: len(base) - node.level + 1] if node.level else []
            module = ".".join([*head, *([node.module] if node.module else [])])
            found += [(f"{module}.{a.name}", node.lineno) for a in node.names]
    return found


def owner(module: str) -> str | None:
    """The one of our packages a dotted name belongs to."""
    return max((n for n in FOLDERS if (module + ".").startswith(n + ".")), key=len, default=None)


def test_imports_point_one_way():
    wrong = [
        f"{relative(path)}:{line} imports {name}"
        for path in sources()
        for name, line in imports(path)
        if owner(name) and owner(name) not in MAY_IMPORT[package_of(path)]
    ]
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_a_folder_under_its_bare_name():
    files = [*sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    bare = {"passes", "kernels", "runtime"}
    wrong = []
    for path in files:
        for node in read(path).imports:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            wrong += [f"{relative(path)}:{node.lineno} {n}" for n in names if n.split(".")[0] in bare]
    assert not wrong, "a second copy of each module would register its ops twice:\n" + "\n".join(wrong)


def test_the_environment_is_read_in_one_place():
    wrong = []
    for path in sources():
        if relative(path) in READS_ENVIRONMENT:
            continue
        wrong += [f"{relative(path)}:{line}" for line in read(path).environment]
    assert not wrong, f"only {sorted(READS_ENVIRONMENT)} may: {wrong}"


def test_triton_stays_in_triton_files():
    wrong = [
        f"{relative(path)}:{line}"
        for path in sources()
        for name, line in imports(path)
        if name.split(".")[0] == "triton" and not path.name.endswith("_triton.py")
    ]
    assert not wrong


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_planner_imports_no_torch(name):
    assert not [i for i in imports(ROOT / name) if i[0].split(".")[0] == "torch"]


def test_files_and_functions_stay_small():
    wrong = []
    for path in sources():
        lines = len(path.read_text().splitlines())
        if lines > LINES_OF_A_FILE:
            wrong.append(f"{relative(path)}: {lines} lines")
        for line, name, length in read(path).functions:
            if length > LINES_OF_A_FUNCTION:
                wrong.append(f"{relative(path)}:{line} {name}: {length} lines")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is():
    wrong = [relative(p) for p in sources() if not read(p).docstring]
    assert not wrong


def test_tests_mirror_the_source():
    missing = []
    for path in sources():
        if path.name == "__init__.py":
            continue
        folder = ROOT / "tests" / path.parent.relative_to(ROOT)
        if not list(folder.glob(f"test_{path.stem}.py")) + list(folder.glob(f"test_{path.stem}_*.py")):
            missing.append(f"{relative(path)} has no {folder.relative_to(ROOT)}/test_{path.stem}.py")
    assert not missing, "\n".join(missing)


def test_pyproject_ships_every_folder():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {dotted(p) for p in sources() if p.name == "__init__.py"}
    assert listed == found


def test_what_git_tracks_is_source_and_not_output():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [n for n in tracked.stdout.split() if not n.startswith(SHIPPED)]
    large = [n for n in names if (ROOT / n).exists() and (ROOT / n).stat().st_size > 400_000]
    assert not large
    assert not [n for n in names if n.endswith((".pyc", ".safetensors", ".log"))]
