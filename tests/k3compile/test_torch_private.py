"""The private torch names still are what they were when they were read."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir

from k3compile import torch_private


def captured(fn, *args):
    """Dynamo's graph of ``fn`` and a clone of it, as the backend sees them."""
    seen = []

    def backend(gm, inputs):
        clone = torch_private.clone_dynamo_graph(gm)
        seen.append((gm, clone, inputs))
        return clone.forward

    torch._dynamo.reset()
    result = torch.compile(fn, backend=backend)(*args)
    return *seen[0], result


def test_torch_is_the_version_these_names_were_read_in():
    assert torch_private.version_objection() is None, "re-read every name there, then raise READ_IN"


def test_another_version_is_objected_to(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.14.0a0+git")
    assert "2.14.0a0+git is not the 2.13" in torch_private.version_objection()


def test_every_name_is_there():
    for name in torch_private.__all__:
        assert getattr(torch_private, name) is not None


def test_a_clone_keeps_sources_values_and_metadata_and_shares_no_node():
    layer = torch.nn.Linear(4, 4)
    gm, clone, inputs, result = captured(layer, x := torch.ones(1, 4))
    assert torch.equal(result, layer(x))
    assert clone._param_name_to_source == gm._param_name_to_source
    assert clone.meta.keys() == gm.meta.keys()
    for old, new in zip(gm.graph.nodes, clone.graph.nodes, strict=True):
        assert old is not new
        assert old.meta.get("example_value") is new.meta.get("example_value")
        if old.op == "placeholder":
            assert new._dynamo_source is old._dynamo_source
    assert torch_private.fake_mode_of([n.meta.get("example_value") for n in gm.graph.nodes]) is not None
    assert len(inputs) == 3


def test_aot_autograd_still_knows_which_inputs_are_weights():
    from torch._functorch._aot_autograd.frontend_utils import _try_get_metadata_from_dynamo

    layer = torch.nn.Linear(4, 4)
    gm, clone, inputs, _ = captured(layer, torch.ones(1, 4))
    static = [_try_get_metadata_from_dynamo(m, {}.keys(), len(inputs), [])[1] for m in (gm, clone)]
    assert static == [[0, 1], [0, 1]]


def test_the_bisector_hook_is_quiet_unless_it_is_at_work():
    assert torch_private.bisector_veto("contiguous_views") is False
    assert torch_private.bisecting() is False
    from torch._inductor.compiler_bisector import BACKENDS

    assert [s.name for s in BACKENDS["k3"]] == ["k3_passes"]


def test_guards_are_read_as_text():
    seen = []

    def backend(gm, inputs):
        seen.append(torch_private.guards_of(torch_private.fake_mode_of(inputs_of(gm))))
        return gm.forward

    def inputs_of(gm):
        return [n.meta.get("example_value") for n in gm.graph.nodes]

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1 if x.shape[0] > 3 else x, backend=backend, dynamic=True)(torch.ones(5))
    assert any(">" in guard or "<" in guard for guard in seen[0])
    assert torch_private.guards_of(None) == []
    assert counters is not None


@pytest.mark.parametrize("words", ["file too short", "invalid ELF header", "cannot read file data"])
def test_a_torn_library_of_the_cache_is_deleted_and_named(words, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torn = tmp_path / "ab" / "kernel.main.so"
    torn.parent.mkdir()
    torn.write_bytes(b"\x7fELF")
    error = torch_private.InductorError(ImportError(f"{torn}: {words}"), None)
    assert torch_private.delete_torn_library(error) == "kernel.main.so"
    assert not torn.exists()
    assert torch_private.delete_torn_library(error) is None  # it is gone: another try would change nothing


def test_nothing_outside_the_cache_is_deleted(tmp_path):
    library = tmp_path / "theirs.so"
    library.write_bytes(b"")
    assert not library.is_relative_to(cache_dir())
    error = torch_private.InductorError(ImportError(f"{library}: file too short"), None)
    assert torch_private.delete_torn_library(error) is None
    assert torch_private.delete_torn_library(torch_private.InductorError(ValueError("no"), None)) is None
    assert library.exists()


def test_a_second_start_believes_what_the_first_found_out_about_the_processor(tmp_path, monkeypatch):
    from torch._inductor import cpu_vec_isa

    asked = []
    monkeypatch.setattr(torch_private, "cache_folder", lambda: tmp_path / "k3")
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2", "avx512"])
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [])

    def check_build(isa, code):
        asked.append(str(isa))
        return str(isa) == "avx2"

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check_build)

    def start():
        asked.clear()
        cpu_vec_isa.supported_vec_isa_list[:] = [cpu_vec_isa.VecAVX512(), cpu_vec_isa.VecAVX2()]
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        cpu_vec_isa.VecISA._VecISA__bool__impl.cache_clear()
        cpu_vec_isa.VecAVX512.__bool__.cache_clear()
        return torch_private.ask_processor()

    try:
        assert (start(), asked) == (["avx2"], ["avx512", "avx2"])
        assert (start(), asked) == (["avx2"], ["avx512"]), "what failed is asked again"
        file = tmp_path / "k3" / "processor"
        file.write_text(file.read_text().replace("\n", "0\n", 1))
        assert (start(), asked) == (["avx2"], ["avx512", "avx2"]), "another machine's answer"
        file.unlink()
        file.mkdir()
        assert (start(), asked) == (["avx2"], ["avx512", "avx2"]), "it cannot be kept"
    finally:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        cpu_vec_isa.VecISA._VecISA__bool__impl.cache_clear()
        cpu_vec_isa.VecAVX512.__bool__.cache_clear()


def test_an_added_input_keeps_its_sizes_as_numbers_while_somebody_holds_them():
    mode, _ = torch_private.symbolic_sizes({"s0": 8})
    known, added = mode.from_tensor(torch.zeros(3), static_shapes=True), torch.zeros(5)
    held = torch_private.fix_sizes([added], [known])
    assert type(mode.from_tensor(added).shape[0]) is int
    assert type(mode.from_tensor(torch.zeros(5)).shape[0]) is torch.SymInt
    assert [fake.shape for fake in held] == [(5,)]


def test_what_a_first_compile_needs_is_learned_ahead(monkeypatch):
    learned = []
    monkeypatch.setattr("torch._inductor.codecache.torch_key", lambda: learned.append("torch"))
    monkeypatch.setattr(torch_private, "ask_processor", lambda: learned.append("processor"))
    torch_private.learn()
    assert learned == ["torch", "processor"]
