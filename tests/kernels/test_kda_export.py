"""A checkpoint inside a row equals a run cut there, and nobody can tell from the results that it was made."""

import k3compile.kernels  # noqa: F401  registers the ops
import pytest
import torch
from k3compile.kernels import kda, kda_export
from k3compile.kernels.samples import row_bounds
from kda_oracle import case, onnx_attention, recurrence, worst

k3 = torch.ops.k3
LENGTHS = [200, 1, 16, 0, 65, 130, 2, 64]
LIVE = len(LENGTHS)  # rows live in slots 1 .. LIVE, row r exports to LIVE + 1 + r
OFFSETS = [
    [128, 0, 0, 0, 64, 64, 0, 64],
    [200, 1, 16, 0, 65, 130, 2, 0],
    [150, 0, 7, 0, 1, 129, 1, 63],
    [1, 0, 15, 0, 17, 16, 0, 33],
    [0] * LIVE,
]
BOUNDS = [(torch.float64, 1e-12), (torch.float32, 1e-5)]


def batch(rows, dtype):
    """Arguments of kda_prefill; slots that no row lives in are NaN."""
    flat = [torch.cat(parts).to(dtype) for parts in zip(*(row[:5] for row in rows))]
    state = torch.full((2 * LIVE + 1, *rows[0].state.shape), torch.nan, dtype=dtype)
    slots = torch.arange(1, len(rows) + 1)
    state[slots] = torch.stack([row.state for row in rows]).to(dtype)
    return [*flat, state, slots, row_bounds([len(row.q) for row in rows])]


def columns(offsets, extra=3):
    """Both export columns, padded."""
    places = [LIVE + 1 + row if offset else 0 for row, offset in enumerate(offsets)]
    return [torch.tensor([*x, *[0] * extra], dtype=torch.int32) for x in (offsets, places)]


def cut(row, tokens):
    return row._replace(**{name: getattr(row, name)[:tokens] for name in ("q", "k", "v", "g", "beta")})


def mixed():
    return [case(n, seed) for seed, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_results_and_final_states_have_the_bits_of_a_run_without_exports(offsets, dtype):
    plain, args = batch(mixed(), dtype), batch(mixed(), dtype)
    plain[5], args[5] = (a[5].to(torch.promote_types(dtype, torch.float32)) for a in (plain, args))
    assert torch.equal(k3.kda_prefill_export(*args, *columns(offsets)), k3.kda_prefill(*plain))
    assert torch.equal(args[5][: LIVE + 1].nan_to_num(7.0), plain[5][: LIVE + 1].nan_to_num(7.0))
    written = ~args[5].isnan().flatten(1).any(1)
    assert written[LIVE + 1 :].tolist() == [offset > 0 for offset in offsets], "other slots stay as they were"


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS, ids=str)
@pytest.mark.parametrize("offsets", OFFSETS[:4], ids=str)
def test_a_checkpoint_equals_the_end_of_the_same_batch_cut_there(offsets, dtype, bound):
    rows = mixed()
    args = batch(rows, dtype)
    k3.kda_prefill_export(*args, *columns(offsets))
    for r, offset in enumerate(offsets):
        if not offset:
            continue
        shorter = batch([*rows[:r], cut(rows[r], offset), *rows[r + 1 :]], dtype)
        k3.kda_prefill(*shorter)
        got, want = args[5][LIVE + 1 + r], shorter[5][r + 1]
        assert worst(got, want) < bound
        assert worst(got, recurrence(cut(rows[r], offset))[1]) < bound
        if offset % 64 == 0 or offset == len(rows[r].q):
            assert torch.equal(got, want), f"row {r} at {offset} is on the grid"


@pytest.mark.parametrize("offset", [1, 2, 15, 16, 17, 63, 64, 65, 80, 127, 128, 150, 191, 192, 193, 200])
@pytest.mark.parametrize(("dtype", "bound"), BOUNDS, ids=str)
def test_a_row_alone_at_every_kind_of_offset(offset, dtype, bound):
    row = case(200)
    args, shorter = batch([row], dtype), batch([cut(row, offset)], dtype)
    k3.kda_prefill_export(*args, *columns([offset]))
    k3.kda_prefill(*shorter)
    assert worst(args[5][LIVE + 1], shorter[5][1]) < bound
    assert offset % 64 or torch.equal(args[5][LIVE + 1], shorter[5][1])


def test_the_grid_keeps_its_bits_beside_chunks_whose_gate_is_too_steep_to_factorise():
    """Kimi-Linear's gate has no bound: a chunk past the checkpoint may take the other path."""
    row, steep = case(200), case(200, 1)
    row.g[130:] = -30.0
    steep.g[::2] = -50.0
    rows = [row, steep]
    args = batch(rows, torch.float32)
    k3.kda_prefill_export(*args, *columns([128, 64]))
    for r, offset in enumerate((128, 64)):
        shorter = batch([cut(rows[r], offset)], torch.float32)
        k3.kda_prefill(*shorter)
        assert torch.equal(args[5][LIVE + 1 + r], shorter[5][1])


@pytest.mark.parametrize("offset", [1, 20, 64, 130])
def test_a_run_resumed_from_the_checkpoint_ends_where_the_uncut_one_does(offset):
    row = case(200)
    args = batch([row], torch.float64)
    whole = k3.kda_prefill_export(*args, *columns([offset]))
    tail = [x[offset:] for x in args[:5]]
    slots, cu = torch.tensor([LIVE + 1]), torch.tensor([0, 200 - offset])
    again = k3.kda_prefill(*tail, args[5], slots, cu)
    assert worst(again, whole[offset:]) < 1e-12
    assert worst(args[5][LIVE + 1], args[5][1]) < 1e-12


def test_rows_that_are_many_export_each_to_their_own_slot():
    rows = [case(70, seed, heads=1, keys=8, values=8) for seed in range(40)]
    flat = [torch.cat(parts) for parts in zip(*(row[:5] for row in rows))]
    state = torch.zeros(100, *rows[0].state.shape, dtype=torch.float64)
    state[1:41] = torch.stack([row.state for row in rows])
    offsets = torch.tensor([r % 71 for r in range(40)], dtype=torch.int32)
    places = torch.arange(50, 90, dtype=torch.int32).flip(0)
    k3.kda_prefill_export(*flat, state, torch.arange(1, 41), row_bounds([70] * 40), offsets, places)
    for row, offset, slot in zip(rows, offsets.tolist(), places.tolist()):
        want = recurrence(cut(row, offset))[1] if offset else torch.zeros_like(row.state)
        assert worst(state[slot], want) < 1e-12


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=str)
def test_nothing_to_run_exports_nothing(lengths):
    args = batch([case(n) for n in lengths] or [case(0)], torch.float32)
    if not lengths:
        args[6], args[7] = args[6][:0], args[7][:1]
    before = args[5].clone()
    out = k3.kda_prefill_export(*args, *columns([0] * len(lengths)))
    assert out.shape[0] == 0
    assert torch.equal(args[5].nan_to_num(7.0), before.nan_to_num(7.0))


def test_a_refused_call_has_written_nothing():
    rows = mixed()
    args = batch(rows, torch.float32)
    before = args[5].clone()
    with pytest.raises(ValueError, match="export_offset of row 1 is 2"):
        k3.kda_prefill_export(*args, *columns([64, 2]))
    assert torch.equal(args[5].nan_to_num(7.0), before.nan_to_num(7.0))


def test_into_writes_the_same_results_and_checkpoints():
    plain, args = batch(mixed(), torch.float32), batch(mixed(), torch.float32)
    want = k3.kda_prefill_export(*plain, *columns(OFFSETS[2]))
    out = want.new_full((len(want) + 9, *want.shape[1:]), 7.0)
    assert k3.kda_prefill_export_into(*args, *columns(OFFSETS[2]), out, 4) is None
    assert torch.equal(out[4:-5], want)
    assert (out[:4] == 7.0).all() and (out[-5:] == 7.0).all()  # noqa: PT018
    assert torch.equal(args[5].nan_to_num(7.0), plain[5].nan_to_num(7.0))


@pytest.mark.parametrize(("offsets", "more"), [([0] * LIVE, 0), (OFFSETS[0], 0), ([150] + [0] * 7, 1)])
def test_a_chunk_is_computed_once_but_for_the_rest_of_an_offset_off_the_grid(offsets, more, monkeypatch):
    tokens = []

    def counted(inputs, part, dtype):
        tokens.append(len(part.tokens))
        return local(inputs, part, dtype)

    local = kda.local
    monkeypatch.setattr(kda, "local", counted)
    k3.kda_prefill(*batch(mixed(), torch.float32))
    plain, tokens[:] = sum(tokens), []
    k3.kda_prefill_export(*batch(mixed(), torch.float32), *columns(offsets))
    assert sum(tokens) == plain + more


def test_a_step_without_exports_does_not_ask_for_any_watch(monkeypatch):
    monkeypatch.setattr(kda_export, "Copier", None)
    k3.kda_prefill_export(*batch(mixed(), torch.float32), *columns([0] * LIVE))


@pytest.mark.oracle
@pytest.mark.parametrize("offset", [5, 64, 70])
def test_onnx_split_at_the_offset_has_the_checkpoint_between_its_two_nodes(offset):
    row = case(100, keys=12, values=20)
    args = batch([row], torch.float32)
    out = k3.kda_prefill_export(*args, *columns([offset]))
    first, between = onnx_attention(cut(row, offset))
    rest = row._replace(**{n: getattr(row, n)[offset:] for n in ("q", "k", "v", "g", "beta")})
    second, end = onnx_attention(rest._replace(state=between.double()))
    assert worst(args[5][LIVE + 1], between) < 5e-6
    assert worst(args[5][1], end) < 5e-6
    assert worst(out, torch.cat([first, second])) < 5e-6
