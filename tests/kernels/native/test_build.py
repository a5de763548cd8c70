"""The builder: once for a source and a CPU, whole or not at all, and a reason where it cannot."""

import itertools
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from k3compile.kernels.native import build

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder with one small source, an empty cache, and nothing loaded."""
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "small.cpp").write_text(SOURCE.replace("ANSWER", "42"))
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path / "cache")
    return folder


@pytest.fixture
def compiles(monkeypatch):
    """The names of what was compiled, in order."""
    seen, compile_to = [], build.compile_to

    def counting(target, *args):
        seen.append(target.name)
        compile_to(target, *args)

    monkeypatch.setattr(build, "compile_to", counting)
    return seen


def files(folder):
    return sorted(f.name for f in folder.iterdir() if f.suffix != ".lock")


def test_a_source_is_compiled_once_and_found_again(sources, compiles, tmp_path):
    assert build.library("small").answer() == 42
    build._LOADED.clear()
    assert build.library("small").answer() == 42
    assert files(tmp_path / "cache") == compiles
    assert len(compiles) == 1


def test_a_changed_source_header_or_flag_is_another_library(sources, compiles, monkeypatch):
    names = [build.digest("small", isa, build.find_compiler()) for isa in build.ISAS]
    (sources / "small.cpp").write_text(SOURCE.replace("ANSWER", "43"))
    names.append(build.digest("small", "portable", build.find_compiler()))
    (sources / "more.h").write_text("// nothing")
    names.append(build.digest("small", "portable", build.find_compiler()))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DMORE"))
    names.append(build.digest("small", "portable", build.find_compiler()))
    assert len(set(names)) == len(build.ISAS) + 3
    assert build.library("small", "portable").answer() == 43


def test_eight_that_want_the_same_library_compile_it_once(sources, compiles, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: build.built("small", "portable", tmp_path / "cache"), range(8)))
    assert len(set(found)) == 1
    assert files(tmp_path / "cache") == compiles == [found[0].name]


def test_a_compile_that_fails_says_why_once_and_leaves_nothing(sources, compiles, tmp_path):
    (sources / "small.cpp").write_text("this is no program\n")
    reasons = {build.unavailable("small") for _ in range(3)}
    (reason,) = reasons
    assert reason.startswith("no native small kernel: ")
    assert "this is no program" in reason or "does not name a type" in reason
    assert len(compiles) == 1, "a failure is remembered"
    assert files(tmp_path / "cache") == []
    with pytest.raises(build.CannotBuild, match="no native small kernel"):
        build.library("small")


def test_a_killed_compile_leaves_no_library(sources, tmp_path, monkeypatch):
    run = build.run

    def killed(command):
        if "-o" not in command:
            return run(command)
        with open(command[-1], "w") as part:
            part.write("half")
        raise build.CannotBuild("killed")

    monkeypatch.setattr(build, "run", killed)
    assert "killed" in build.unavailable("small")
    assert files(tmp_path / "cache") == []


def test_without_a_compiler_the_message_says_what_to_do(sources, monkeypatch):
    monkeypatch.setattr(build, "compilers", lambda: ["no-such-compiler", "nor-this"])
    assert build.unavailable("small") == (
        "no native small kernel: no C++ compiler (no-such-compiler, nor-this); install one, or set CXX"
    )


def test_a_library_that_cannot_be_loaded_is_a_reason_too(sources, tmp_path):
    build.built("small", "portable", tmp_path / "cache").write_text("no library")
    assert "small-portable" in build.unavailable("small", "portable")


def test_a_compile_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr(build, "COMPILE_SECONDS", 0.05)
    with pytest.raises(build.CannotBuild, match="took more than"):
        build.run(["sleep", "5"])


def test_an_unknown_instruction_set_is_a_mistake_of_the_caller(sources):
    with pytest.raises(
        ValueError, match="unknown instruction set 'sse9'; known: avx512_vnni, avx512, avx2, portable"
    ):
        build.library("small", "sse9")


BOTH = {"avx512_vnni": True, "avx512_vbmi": True}


@pytest.mark.parametrize(
    ("said", "capabilities", "isa"),
    [
        ("AVX512", BOTH, "avx512_vnni"),
        ("AVX512", {**BOTH, "avx512_vbmi": False}, "avx512"),
        ("AVX512", {**BOTH, "avx512_vnni": False}, "avx512"),
        ("AVX512", {}, "avx512"),
        ("AVX2", BOTH, "avx2"),  # what ATEN_CPU_CAPABILITY=avx2 asks for
        ("DEFAULT", BOTH, "portable"),
        ("VSX", {}, "portable"),
    ],
)
def test_the_best_instruction_set_is_the_one_torch_uses(monkeypatch, said, capabilities, isa):
    monkeypatch.setattr(build.torch.backends.cpu, "get_cpu_capability", lambda: said)
    monkeypatch.setattr(build.torch.cpu, "get_capabilities", lambda: capabilities)
    assert build.best_isa.__wrapped__() == isa


def test_each_instruction_set_has_those_below_it():
    flags = [set(build.ISAS[isa]) for isa in build.ISAS]
    assert all(lower < higher for higher, lower in itertools.pairwise(flags))


def test_the_compiler_is_torchs_own_choice_first():
    assert build.compilers()[0]
    assert subprocess.run([build.find_compiler(), "--version"], capture_output=True).returncode == 0
