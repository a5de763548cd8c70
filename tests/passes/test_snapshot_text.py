"""The text of a snapshot needs neither torch nor evaluation."""

import subprocess
import sys

from k3compile.passes.snapshot_text import is_packed, shape_text, spell


def test_it_imports_no_torch():
    code = "import sys, k3compile.passes.snapshot_text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_packed_strides_are_not_shown():
    value = {"dtype": "float32", "shape": ["s0", 4, "s1"], "stride": ["4*s1", "s1", 1]}
    assert shape_text(value) == "f32[s0, 4, s1]"
    assert shape_text(value | {"stride": ["s1", 1, 4]}) == "f32[s0, 4, s1] stride [s1, 1, 4]"
    assert is_packed([1, 8], [77, 1])


def test_arguments_are_spelled_with_the_names_of_nodes():
    assert spell([{"node": 3}, 1.5, {"sym": "s0"}, {"a": None}], {3: "%x"}) == "[%x, 1.5, s0, {a: None}]"
