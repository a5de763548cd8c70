"""Memory besides weights and pools grows with rows and with those whose logits are asked for."""

from k3compile.runtime.engine_config import EngineConfig

from k3compile.planning.released import read_model
from k3compile.planning.reserve import FIXED, reserve, row_bytes

K3 = read_model("kimi-k3")


def test_a_row_of_kimi_k3_at_eight_ranks_takes_half_a_megabyte():
    residual = (8 + 4) * 7168 * 2
    experts = 16 * (2 * 3584 + 3 * 384) * 2  # inputs, inner columns, outputs
    shared, sums = 3 * 768 * 2, (2 * 3584 + 7168) * 4
    assert row_bytes(K3, 8, 2) == residual + experts + shared + sums == 500_224


def test_each_part_is_proportional_to_what_it_is_for():
    one = reserve(K3, EngineConfig(max_num_batched_tokens=1024, max_num_seqs=4), 8, 2)
    rows = reserve(K3, EngineConfig(max_num_batched_tokens=2048, max_num_seqs=4), 8, 2)
    more = reserve(K3, EngineConfig(max_num_batched_tokens=1024, max_num_seqs=4, num_drafts=7), 8, 2)
    assert one.fixed == FIXED
    assert rows.activations == 2 * one.activations
    assert more.logits == 8 * one.logits == 32 * 163840 * 6
    assert one.total == one.fixed + one.activations + one.logits


def test_no_more_logits_are_asked_for_than_there_are_rows():
    few = reserve(K3, EngineConfig(max_num_batched_tokens=64, max_num_seqs=64), 8, 2)
    many = reserve(K3, EngineConfig(max_num_batched_tokens=64, max_num_seqs=1024), 8, 2)
    assert many.logits == few.logits
