"""The plain model: a step is a step however it is cut, mixed or ordered."""

import dataclasses
import itertools

import pytest
import torch
from k3compile.runtime.cache.pools import KdaPools
from k3compile.runtime.model import DecoderLayer, Model
from small_models import SMALL, SMALL_LINEAR, Row, make_step, rows_of_hidden, small_model

FIVE = dataclasses.replace(SMALL, num_hidden_layers=5, kda_layers=(0, 1, 2, 4), attn_res_block_size=2)
BOTH = pytest.mark.parametrize("config", [SMALL, SMALL_LINEAR], ids=["k3", "kimi-linear"])
PROMPT = [(7 * i * i + 3 * i) % 90 for i in range(100)]
EXACT = 1e-12


def run(model: Model, rows: list[Row], pools) -> dict[int, torch.Tensor]:
    """Slot -> hidden of its rows."""
    with torch.no_grad():
        return rows_of_hidden(rows, model(make_step(rows), pools)[0])


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and (not a.numel() or bool((a - b).abs().max() <= EXACT * b.abs().max()))


@pytest.mark.parametrize(
    "config",
    [FIVE, SMALL_LINEAR, pytest.param(SMALL, marks=pytest.mark.slow)],
    ids=["five", "kimi-linear", "k3"],
)
def test_a_prompt_run_whole_in_chunks_and_token_by_token_ends_the_same(config):
    model = small_model(config)
    whole = run(model, [Row(PROMPT, 1, 0, range(1, 15))], model.make_pools(2, 15, 8))[1]
    assert whole.abs().max() < 100
    for sizes in ([1] * 100, [64, 36], [5] * 20, [99, 1]):
        pools, parts, seen = model.make_pools(2, 15, 8), [], 0
        for size in sizes:
            chunk = PROMPT[seen : seen + size]
            parts.append(run(model, [Row(chunk, 1, seen, range(1, 15))], pools)[1])
            seen += size
        assert close(torch.cat(parts), whole), sizes


@BOTH
def test_the_past_and_the_order_of_tokens_matter(config):
    model = small_model(config)
    hidden = run(model, [Row(PROMPT[:20], 1, 0, [1, 2, 3])], model.make_pools(2, 4, 8))[1]
    swapped = [PROMPT[1], PROMPT[0], *PROMPT[2:20]]
    other = run(model, [Row(swapped, 1, 0, [1, 2, 3])], model.make_pools(2, 4, 8))[1]
    assert ((hidden - other).abs().amax(1)[2:] > 1e-6).all()


STARTS = {1: 69, 2: 40, 3: 33, 4: 0}  # tokens of each request before the mixed step
PAGES = {1: range(1, 10), 2: range(10, 16), 3: range(16, 21), 4: range(21, 30)}
TOKENS = {slot: [(slot * 31 + 5 * i) % 90 for i in range(80)] for slot in STARTS}


def mixed_rows() -> list[Row]:
    """The last chunk of a prompt (one token), a plain decode, a verify of three, a prefill of seventy."""
    counts, scratch = {1: 1, 2: 1, 3: 3, 4: 70}, {3: (3, 6, 7)}
    return [
        Row(TOKENS[s][STARTS[s] : STARTS[s] + counts[s]], s, STARTS[s], PAGES[s], s == 3, scratch.get(s, ()))
        for s in STARTS
    ]


def started(model: Model):
    """Pools in which every request has seen its first tokens, alone."""
    pools = model.make_pools(8, 32, 8, max_drafts=3)
    for slot, count in STARTS.items():
        if count:
            run(model, [Row(TOKENS[slot][:count], slot, 0, PAGES[slot])], pools)
    return pools


@pytest.mark.parametrize(
    ("config", "replay"),
    [
        (FIVE, True),
        (FIVE, False),
        (SMALL_LINEAR, True),
        pytest.param(SMALL_LINEAR, False, marks=pytest.mark.slow),
    ],
    ids=["k3", "k3-states", "kimi-linear", "kimi-linear-states"],
)
def test_a_mixed_batch_equals_each_request_alone_in_all_row_orders(config, replay):
    model = small_model(config, state_replay=replay)
    alone_pools = started(model)
    alone = {row.slot: run(model, [row], alone_pools)[row.slot] for row in mixed_rows()}
    beginning = started(model)
    for order in itertools.permutations(mixed_rows()):
        pools = [type(pool)(*(tensor.clone() for tensor in pool)) for pool in beginning]
        mixed = run(model, list(order), pools)
        for slot, hidden in alone.items():
            assert close(mixed[slot], hidden), (slot, [row.slot for row in order])
        for mine, theirs in zip(pools, alone_pools):
            for name, tensor in mine._asdict().items():
                assert close(tensor, getattr(theirs, name)), name


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_verify_leaves_the_state_alone_and_a_commit_goes_to_the_accepted_row(accepted):
    model = small_model(FIVE)
    pools, plain = started(model), started(model)
    draft = mixed_rows()[2]
    verified = run(model, [draft], pools)[3]
    assert all(close(p.state, q.state) and close(p.window, q.window) for p, q in kda_pairs(pools, plain))
    for pool in pools:
        if isinstance(pool, KdaPools):
            torch.ops.k3.kda_commit(*pool, torch.tensor([3]), torch.tensor([accepted]), torch.tensor([3]))
    if accepted:
        kept = draft._replace(tokens=draft.tokens[:accepted], verify=False)
        assert close(run(model, [kept], plain)[3], verified[:accepted])
    assert all(close(p.state, q.state) and close(p.window, q.window) for p, q in kda_pairs(pools, plain))


def test_without_replay_the_state_after_each_row_is_in_scratch_and_the_outputs_are_the_same():
    model, replaying = small_model(FIVE, state_replay=False), small_model(FIVE)
    pools, draft = started(model), mixed_rows()[2]
    verified = run(model, [draft], pools)[3]
    assert torch.equal(verified, run(replaying, [draft], started(replaying))[3])
    for rows, slot in enumerate(draft.scratch, 1):
        plain = started(model)
        run(model, [draft._replace(tokens=draft.tokens[:rows], verify=False)], plain)
        for mine, theirs in kda_pairs(pools, plain):
            assert close(mine.state[slot], theirs.state[3])
            assert close(mine.window[slot], theirs.window[3])


def kda_pairs(a, b):
    return [(p, q) for p, q in zip(a, b) if isinstance(p, KdaPools)]


def test_a_step_without_rows_runs():
    model = small_model(FIVE)
    with torch.no_grad():
        hidden, taps = model(make_step([]), model.make_pools(2, 2, 8))
    assert hidden.shape == (0, 32)
    assert taps.shape == (0, 0, 32)


def test_taps_are_the_running_sum_after_their_layers_and_snapshots_are_banked_from_it():
    config = dataclasses.replace(SMALL, num_hidden_layers=5, kda_layers=(0, 1, 2, 4), attn_res_block_size=2)
    model = small_model(config)
    tapped = Model(config, torch.float64, tap_layers=(1, 4))
    tapped.load_state_dict(model.state_dict())
    sums, banks = [], []

    def layer(block, p, blocks, pools, step):
        banks.append(blocks.clone())
        sums.append(DecoderLayer.forward(block, p, blocks, pools, step))
        return sums[-1]

    with torch.no_grad():
        step = make_step([Row(PROMPT[:6], 1, 0, [1])])
        hidden, taps = tapped(step, model.make_pools(2, 2, 8), layer=layer)
    assert [len(bank) for bank in banks] == [1, 1, 2, 2, 3]
    assert torch.equal(taps, torch.stack([sums[1], sums[4]]))
    assert torch.equal(banks[4][1], sums[1])  # what layer 2 banked is the sum after layer 1
    assert torch.equal(banks[4][2], sums[3])
    assert hidden.shape == (6, 32)


def test_the_first_mix_of_a_snapshot_layer_leaves_its_own_snapshot_out():
    model = small_model(FIVE)
    block, pools = model.layers[2], model.make_pools(2, 2, 8)
    p, bank = torch.randn(4, 32, dtype=torch.float64), torch.randn(2, 4, 32, dtype=torch.float64)
    step = make_step([Row(PROMPT[:4], 1, 0, [1])])
    seen = []
    block.input_layernorm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        block(p, torch.cat([bank, p[None]]), pools[2], step)
        expected = block.self_attention_res(p, bank)
    assert torch.equal(seen[0], expected)


def test_resident_bfloat16_computes_with_rounded_matrices_in_the_models_dtype():
    model = small_model(FIVE, torch.float32)
    rounded = {
        name: value.bfloat16().float() if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    slim = Model(FIVE, torch.float32, resident=torch.bfloat16)
    slim.load_state_dict(rounded)
    plain = Model(FIVE, torch.float32)
    plain.load_state_dict(rounded)
    rows = [Row(PROMPT[:9], 1, 0, [1, 2])]
    a, b = (run(m, rows, m.make_pools(2, 3, 8))[1] for m in (slim, plain))
    assert slim.layers[0].self_attn.o_proj.weight.dtype == torch.bfloat16
    assert slim.embed_tokens.dtype == torch.bfloat16
    assert slim.layers[0].self_attn.a_log.dtype == torch.float32
    assert torch.equal(a, b)
    assert torch.equal(slim.logits(a), plain.logits(b))


def test_pools_are_views_of_one_tensor_a_kind_and_start_at_zero():
    model = Model(SMALL, torch.bfloat16)
    pools = model.make_pools(3, 5, 8, max_drafts=2)
    kda = [pool for pool in pools if isinstance(pool, KdaPools)]
    assert len(kda) == 10
    assert [isinstance(pool, KdaPools) for pool in pools] == [i not in (3, 7, 11, 13) for i in range(14)]
    assert len({pool.state.untyped_storage().data_ptr() for pool in kda}) == 1
    assert kda[0].state.shape == (3, 3, 8, 8)
    assert kda[0].state.dtype == torch.float32
    assert kda[0].window.shape == (3, 3, 72)
    assert kda[0].window.dtype == torch.bfloat16
    assert kda[0].rec_x.shape == (3, 3, 72)
    assert pools[3].pages.shape == (5, 8, 20)
    assert not any(tensor.any() for pool in pools for tensor in pool)


def test_only_slots_that_requests_live_in_have_records_and_without_replay_none():
    pools = Model(FIVE).make_pools(9, 2, 8, max_drafts=4, record_slots=3)
    assert pools[0].state.shape[0] == pools[0].window.shape[0] == 9
    assert [t.shape[:2] for t in pools[0][2:]] == [(3, 5)] * 4
    without = Model(FIVE, state_replay=False).make_pools(9, 2, 8, max_drafts=4)
    assert not any(t.numel() for t in without[0][2:])


def test_a_tied_model_reads_its_embedding_as_the_head():
    model = small_model(dataclasses.replace(FIVE, tie_word_embeddings=True))
    hidden = torch.randn(2, 32, dtype=torch.float64)
    assert model.lm_head is None
    assert torch.equal(model.logits(hidden), hidden @ model.embed_tokens.T)


def test_a_bfloat16_model_stays_near_the_exact_one_and_keeps_its_state_in_float32():
    exact = small_model(SMALL_LINEAR)
    coarse = Model(SMALL_LINEAR, torch.bfloat16)
    coarse.load_state_dict(exact.state_dict())
    rows = [Row(PROMPT[:40], 1, 0, range(1, 7))]
    pools = coarse.make_pools(2, 8, 8)
    a, b = run(coarse, rows, pools)[1], run(exact, rows, exact.make_pools(2, 8, 8))[1]
    assert (a.dtype, pools[0].state.dtype) == (torch.bfloat16, torch.float32)
    assert (pools[0].window.dtype, pools[3].pages.dtype) == (torch.bfloat16, torch.bfloat16)
    similar = torch.nn.functional.cosine_similarity(a.double(), b, dim=1)
    assert similar.median() > 0.99


@pytest.mark.parametrize("wrong", [torch.float16, torch.int32, torch.float8_e4m3fn], ids=str)
def test_a_dtype_that_is_not_run_is_refused(wrong):
    with pytest.raises(ValueError, match="dtype"):
        Model(SMALL, wrong)
    with pytest.raises(ValueError, match="resident"):
        Model(SMALL, torch.float32, resident=wrong)


@pytest.mark.parametrize("taps", [(14,), (-1,), (2, 99)])
def test_a_tap_after_a_layer_that_does_not_exist_is_refused(taps):
    with pytest.raises(ValueError, match="14 layers"):
        Model(SMALL, tap_layers=taps)
