"""The bare string works with nothing of ours imported, and importing the entry costs nothing."""

import os
import subprocess
import sys

import pytest
import torch

import k3compile
from k3compile import entry, report


def run(code: str, **env: str) -> str:
    """Standard output of a fresh Python; its standard error on failure."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.inductor
def test_the_bare_string_compiles_a_linear_layer_with_nothing_imported():
    run("import torch; torch.compile(torch.nn.Linear(4, 4), backend='k3')(torch.ones(1, 4))")


def test_the_bare_string_is_found_without_our_import_and_keeps_a_report(tmp_path):
    code = (
        "import sys, torch; fn = torch.compile(torch.sin, backend='k3', options={'inner': 'eager'});"
        "assert 'k3compile.backend' not in sys.modules;"
        "assert torch.equal(fn(torch.ones(3)), torch.ones(3).sin());"
        "import k3compile.report; print(k3compile.report.latest().status)"
    )
    assert run(code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)) == "compiled\n"


def test_importing_the_entry_imports_torch_alone():
    code = (
        "import sys, time, torch; start = time.perf_counter(); import k3compile.entry;"
        "took = time.perf_counter() - start;"
        "ours = sorted(m for m in sys.modules if m.startswith('k3compile'));"
        "print(ours, took < 0.1)"
    )
    assert run(code) == "['k3compile', 'k3compile.entry'] True\n"


@pytest.mark.slow
def test_a_broken_part_of_ours_breaks_no_other_backend(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['k3compile.backend'] = None\n")
    code = (
        "import torch; assert torch.compile(torch.sin, backend='eager')(torch.ones(3)).sum() > 2;"
        "import torch._dynamo as d; assert 'k3' in d.list_backends()"
    )
    run(code, PYTHONPATH=str(tmp_path))


def test_an_unknown_option_reaches_the_user_with_the_nearest_name():
    fn = torch.compile(lambda x: x + 1, backend="k3", options={"iner": "eager"})
    with pytest.raises(Exception, match=r"unknown k3 compile option 'iner'.*did you mean 'inner'"):
        fn(torch.ones(2))


def test_an_unknown_mode_reaches_the_user():
    fn = torch.compile(lambda x: x + 1, backend="k3", mode="quick")
    with pytest.raises(Exception, match="unknown mode 'quick'"):
        fn(torch.ones(2))


def test_torch_dynamo_reset_forgets_our_reports(own_reports):
    torch.compile(lambda x: x + 1, backend="k3", options={"inner": "eager"})(torch.ones(2))
    assert report.all()
    torch._dynamo.reset()
    assert not report.all()
    assert torch._dynamo.backends.registry.lookup_backend("k3") is entry.k3


def test_public_names_are_lazy_and_a_wrong_one_is_named():
    from k3compile.options import CompileOptions

    assert k3compile.CompileOptions is CompileOptions
    assert all(getattr(k3compile, name) for name in k3compile.__all__)
    assert set(k3compile.__all__) <= set(dir(k3compile))
    with pytest.raises(AttributeError, match=r"no attribute 'Compiler'.*CompileOptions"):
        _ = k3compile.Compiler
