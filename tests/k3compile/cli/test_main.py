"""The command: verbs by name, exit codes, one clear line for a mistake."""

import os
import subprocess
import sys

import pytest

from k3compile.cli import main as module
from k3compile.cli.main import VERBS, main


def run(*arguments):
    """Exit code of the command in this process."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return end.value.code


def test_help_lists_the_verbs_and_imports_no_torch():
    code = "import sys; from k3compile.cli.main import main\n"
    code += "try: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr
    for verb in ("serve", "chat", "doctor"):
        assert verb in shown.stdout


def test_an_unknown_verb_or_flag_is_misuse(capsys):
    assert run("servee") == 2
    assert run("serve", "--nope") == 2
    assert run("explain") == 2
    assert "servee" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("servee",), "k3 has no verb 'servee' (did you mean 'serve'?); verbs: "),
        (("explain", "x", "--inne", "eager"), "--inner"),
        (("explain",), "target"),
        (("bench", "model", "--rounds", "many"), "'--rounds'"),
        (("bench", "modle"), "modle"),
        (("bench", "passes", "--inner", "aot_eagr"), "did you mean 'aot_eager'?"),
    ],
)
def test_a_slip_is_one_line_that_says_what_to_write(capsys, arguments, said):
    assert run(*arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert said in lines[0]


def test_nothing_asked_for_shows_the_help(capsys):
    assert run() == 2
    shown = capsys.readouterr()
    assert "serve" in shown.out + shown.err


def test_a_value_error_is_one_line_and_code_2(capsys, monkeypatch):
    def no(*args, **kwargs):
        raise ValueError("bad [thing] here")

    monkeypatch.setattr(module, "app", no)
    assert run("serve") == 2
    assert capsys.readouterr().err == "error: bad [thing] here\n"


def test_a_file_that_cannot_be_written_is_one_line_and_code_2(capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        assert run("make-checkpoint", str(target)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {target}: ")


def test_an_error_of_the_system_without_a_file_is_not_hidden(monkeypatch):
    def no(*args, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "app", no)
    with pytest.raises(OSError, match="Input/output"):
        main(["serve"])


@pytest.mark.parametrize(("before", "then"), [(None, "1"), ("0", "0")])
def test_weights_are_asked_to_lie_in_large_pages_unless_the_user_says_otherwise(monkeypatch, before, then):
    name, _ = module.LARGE_PAGES
    monkeypatch.setenv(name, "anything")
    monkeypatch.delenv(name) if before is None else monkeypatch.setenv(name, before)
    monkeypatch.setattr(module, "app", lambda **_: 0)
    with pytest.raises(SystemExit):
        main([])
    assert os.environ[name] == then


def test_what_a_verb_returns_is_the_exit_code(monkeypatch):
    from k3compile.cli import doctor

    monkeypatch.setattr(doctor, "CHECKS", [lambda: doctor.Finding("x", True, "y")])
    assert run("doctor") == 0
    monkeypatch.setattr(doctor, "CHECKS", [lambda: doctor.Finding("x", False, "y", "do z")])
    assert run("doctor") == 1


@pytest.mark.parametrize("verb", [verb for verb in VERBS if module.find_spec(module.module_of(verb))])
def test_every_verb_has_help(verb, capsys):
    assert run(verb, "--help") == 0
    assert f"k3 {verb}" in capsys.readouterr().out
