"""Where states are kept: the worked examples, and that nobody ever waits for a boundary (H01)."""

import random

import pytest
from k3compile.runtime.cache.checkpoints import Chunk, Grid, block_size, interior, last_hit, plan_chunk


def chunks(grid: Grid, prompt: int, budget: int, exports: bool, seen: int = 0, junction: int = 0):
    """All chunks of a lone prompt."""
    made = []
    while seen < prompt:
        made.append(plan_chunk(grid, seen, min(budget, prompt - seen), prompt, exports, junction))
        seen += made[-1].count
    return made


def lengths(made: list[Chunk]) -> list[int]:
    return [chunk.count for chunk in made]


WORKED = [  # prompt, block, budget; chunk lengths and last state: without, with h = B, with h = 128
    (8000, 768, 8185, ([7680, 320], 7680), ([8000], 7680), ([8000], 7936)),
    (8000, 1536, 8186, ([7680, 320], 7680), ([8000], 7680), ([8000], 7936)),
    (8000, 1536, 2048, ([1536] * 5 + [320], 7680), ([1536] * 4 + [1856], 7680), ([1536] * 4 + [1856], 7936)),
    (
        *(8000, 1536, 1024),
        ([1024, 512] * 5 + [320], 7680),
        ([1024, 512] * 5 + [320], 7680),
        ([1024, 512] * 5 + [256, 64], 7936),
    ),
    (7680, 1536, 8185, ([6144, 1536], 7680), ([7680], 6144), ([7680], 7552)),
    (1536, 1536, 8185, ([1536], 1536), ([1536], 1536), ([1408, 128], 1536)),
    (12000, 768, 8185, ([7680, 3840, 480], 11520), ([7680, 4320], 11520), ([7680, 4320], 11904)),
]


@pytest.mark.parametrize(("prompt", "block", "budget", "without", "coarse", "fine"), WORKED)
def test_the_worked_examples_of_the_older_engine(prompt, block, budget, without, coarse, fine):
    def made(unit, exports):
        grid = Grid(block, unit, alignment=16, table=True)
        found = chunks(grid, prompt, budget, exports)
        return lengths(found), max(c.checkpoint for c in found)

    assert made(block, False) == without
    assert made(block, True) == coarse
    assert made(128, True) == fine


OURS = [  # the same prompts: chunk lengths and checkpoints of h = B and of h = 128
    (8000, 768, 8185, [(8000, 7680)], [(8000, 7936)]),
    (8000, 1536, 8186, [(8000, 7680)], [(8000, 7936)]),
    (
        *(8000, 1536, 2048),
        [(2048, 1536), (2048, 3072), (2048, 6144), (1856, 7680)],
        [(2048, 1536), (2048, 3072), (2048, 6144), (1856, 7936)],
    ),
    (
        *(8000, 1536, 1024),
        [
            (1024, 0),
            (1024, 1536),
            (1024, 3072),
            (1024, 0),
            (1024, 4608),
            (1024, 6144),
            (1024, 0),
            (832, 7680),
        ],
        [
            (1024, 0),
            (1024, 1536),
            (1024, 3072),
            (1024, 0),
            (1024, 4608),
            (1024, 6144),
            (1024, 0),
            (832, 7936),
        ],
    ),
    (7680, 1536, 8185, [(7680, 6144)], [(7680, 7552)]),
    (1536, 1536, 8185, [(1536, 1536)], [(1536, 1408)]),
    (12000, 768, 8185, [(8128, 7680), (3872, 11520)], [(8128, 7680), (3872, 11904)]),
]


@pytest.mark.parametrize(("prompt", "block", "budget", "coarse", "fine"), OURS)
def test_without_the_table_no_prompt_takes_more_passes_than_the_budget_asks(
    prompt, block, budget, coarse, fine
):
    assert chunks(Grid(block, block), prompt, budget, True) == coarse
    assert chunks(Grid(block, 128), prompt, budget, True) == fine
    least = -(-prompt // budget)
    assert len(coarse) == len(fine) == least
    older = [chunks(Grid(block, unit, 16, table=True), prompt, budget, True) for unit in (block, 128)]
    assert len(coarse) <= len(older[0])
    assert len(fine) <= len(older[1])


def test_an_8000_token_prompt_is_one_pass_and_leaves_one_state():
    assert chunks(Grid(768, 768), 8000, 8192, True) == [Chunk(8000, 7680)]
    assert lengths(chunks(Grid(768, 768), 8000, 8192, False)) == [7680, 320]


def test_a_required_state_seven_tokens_before_the_end_costs_no_pass():
    assert chunks(Grid(384, 384), 1159, 2048, True) == [Chunk(1159, 1152)]
    assert lengths(chunks(Grid(384, 384), 1159, 2048, False)) == [1152, 7]


BLOCKS = [  # drafts, state bytes of a KDA layer, block of bf16 and of fp8 latents, of alignment 16
    (0, 814_080, 768, 1536, 720, 1424),
    (7, 878_592, 768, 1536, 768, 1536),
    (8, 887_808, 896, 1664, 784, 1552),
]


@pytest.mark.parametrize(("drafts", "state", "bf16", "fp8", "fine_bf16", "fine_fp8"), BLOCKS)
def test_the_block_size_table(drafts, state, bf16, fp8, fine_bf16, fine_fp8):
    assert 4608 * (3 + drafts) * 2 + 786_432 == state
    assert (block_size(state, 1152, 128), block_size(state, 576, 128)) == (bf16, fp8)
    assert (block_size(state, 1152, 16), block_size(state, 576, 16)) == (fine_bf16, fine_fp8)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_block_of_nothing_is_refused(sizes):
    with pytest.raises(ValueError, match="positive sizes"):
        block_size(*sizes)


def test_a_hit_leaves_a_token_to_run():
    assert [last_hit(n, 64) for n in (0, 1, 63, 64, 65, 128, 129)] == [0, 0, 0, 0, 64, 64, 128]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"block": 96, "unit": 64}, "block=96 is no multiple of unit=64"),
        ({"block": 0, "unit": 64}, "block must be at least 1"),
        ({"block": 64, "unit": 0, "alignment": 0}, "unit must be at least 1 token, got 0; alignment must"),
    ],
)
def test_counts_that_do_not_fit_each_other_are_refused(grid, message):
    with pytest.raises(ValueError, match=message):
        Grid(**grid)


@pytest.mark.parametrize(
    ("table", "seen", "end", "total", "expected"),
    [
        (True, 0, 8000, 8000, 7936),
        (True, 0, 7999, 8000, 0),  # does not reach the end
        (True, 64, 8000, 8000, 0),  # starts off the unit
        (True, 7936, 8000, 8000, 0),  # nothing left before the last hit
        (True, 7680, 8000, 8000, 0),  # its column is the one that holds the initial state
        (False, 7680, 8000, 8000, 7936),
        (False, 0, 7999, 8000, 7936),
        (False, 0, 7000, 8000, 6144),
        (False, 64, 8000, 8000, 7936),
        (False, 63, 8000, 8000, 0),  # off the kernel's grid
        (False, 0, 6144, 8000, 0),  # at the end is not inside
    ],
)
def test_when_a_state_can_be_written_inside_a_chunk(table, seen, end, total, expected):
    assert interior(Grid(1536, 128, table=table), seen, end, total) == expected


def test_a_junction_gets_its_state_and_the_prompt_end_keeps_its_own():
    grid = Grid(1536, 128)
    assert chunks(grid, 8000, 8192, True, junction=1024) == [Chunk(1024, 1024), Chunk(6976, 7936)]
    assert chunks(grid, 8000, 8192, True, junction=7936) == [Chunk(8000, 7936)]
    assert chunks(grid, 8000, 4096, True, junction=1024) == [Chunk(4096, 1024), Chunk(3904, 7936)]
    assert chunks(grid, 8000, 8192, False, junction=1024)[0] == Chunk(1024, 1024)
    assert chunks(Grid(1536, 128, table=True), 8000, 8192, False, junction=1700)[0] == Chunk(1536, 1536)


def test_a_resumed_prompt_off_the_grid_stops_once_and_is_on_it_again():
    assert chunks(Grid(1536, 64), 8000, 8192, True, seen=100) == [Chunk(7836, 7936), Chunk(64, 0)]


@pytest.mark.parametrize("exports", [False, True])
@pytest.mark.parametrize("budget", [512, 1024, 1535, 1536, 1537, 2048])
@pytest.mark.parametrize("prompt", [1000, 1536, 5000, 32_000])
@pytest.mark.parametrize("unit", [128, 1536])
def test_a_budget_around_the_block_moves_every_prompt(exports, budget, prompt, unit):
    for table in (False, True):
        made = chunks(Grid(1536, unit, table=table), prompt, budget, exports)
        assert sum(lengths(made)) == prompt
        assert len(made) <= 3 * -(-prompt // min(budget, 1536)) + 2


@pytest.mark.parametrize("exports", [False, True])
@pytest.mark.parametrize("budget", [512, 1024, 1536, 1537, 2048])
def test_two_long_prompts_that_share_a_budget_both_move_in_every_step(exports, budget):
    grid, seen, rng = Grid(1536, 128), [0, 0], random.Random(budget)
    for _ in range(400):
        room = budget
        for i in (0, 1):
            left = 32_000 - seen[i]
            if left:
                granted = min(left, room - (i == 0) * rng.randint(1, room - 1))
                count = plan_chunk(grid, seen[i], granted, 32_000, exports).count
                assert 1 <= count <= granted
                seen[i] += count
                room -= count
        if seen == [32_000, 32_000]:
            return
    raise AssertionError(f"still at {seen}")


@pytest.mark.parametrize("seed", range(300))
def test_random_grants_move_on_and_leave_legal_states(seed):
    """Every count is positive, every checkpoint can be written, the prompt's last hit is always left."""
    rng = random.Random(seed)
    unit = rng.choice([1, 4, 16, 48, 64, 128])
    grid = Grid(unit * rng.choice([1, 2, 3, 12]), unit, rng.choice([1, 16, 64]), table=rng.random() < 0.2)
    total, exports = rng.randint(1, 1500), rng.random() < 0.7
    junction = rng.choice([0, last_hit(rng.randint(1, total), unit)])
    seen, left = rng.choice([0, last_hit(total, unit)]), []
    started = seen
    while seen < total:
        granted = rng.choice([1, rng.randint(1, 40), rng.randint(1, 1500)])
        count, checkpoint = plan_chunk(grid, seen, granted, total, exports, junction)
        end = seen + count
        assert 1 <= count <= granted
        if checkpoint:
            assert seen < checkpoint <= end
            assert checkpoint % unit == 0
            inside = exports and (checkpoint - seen) % grid.alignment == 0
            assert checkpoint == end or inside
            left.append(checkpoint)
        seen = end
    final = last_hit(total, unit)
    assert final <= started or final in left
    assert grid.table or junction <= started or junction in left


@pytest.mark.parametrize("seed", range(100))
def test_writing_states_on_the_way_never_takes_more_passes(seed):
    rng = random.Random(seed)
    unit = 64 * rng.choice([1, 2, 6])
    block = unit * rng.choice([1, 2, 4])
    total, budget = rng.randint(1, 20_000), rng.randint(64, 9000)
    ours = len(chunks(Grid(block, unit), total, budget, True))
    assert ours <= len(chunks(Grid(block, unit), total, budget, False))
    assert ours <= len(chunks(Grid(block, unit, table=True), total, budget, True))
