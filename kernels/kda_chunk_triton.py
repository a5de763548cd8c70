"""What a chunk of KDA knows before its state arrives, in Triton: all chunks of all rows at once.

    program (chunk, head, sub-chunk)    scores -> P and L, with I - (I + L)^-1 of the sub-chunk in it
    program (chunk, head, columns)      (I + L) [W U] = beta [k exp G, v] by sub-chunks; q and k decayed

The notation and the chunk grid are kda_chunk's. A chunk's place among programs needs no count of the chunks
before it: row r has the places cu[r] // 64 + r and up, which are as many as it can have chunks.

A GPU sums in a tree, where errors of neighbours' sums have nothing in common. So a log decay is cut in two: a
multiple of 1/2048, whose sums are exact in any order, and what is left, whose sums are small. Differences of
such sums are as exact. What corrections lose in three subtractions is kept beside them.
Scores are factorised about a pivot, the middle of the sub-chunk, as in kda_chunk; where sixteen steps decay
by more than exp(-80) the pivot is the sub-chunk's start, and pairs inside it are summed one by one.
T token rows, R requests, H heads, K and V channels of a head; KP and VP are those, padded.
"""

from .jit_triton import jit, tl


@jit
def place_of(chunk, cu, R, STEPS: tl.constexpr):
    """(first token, how many the row has from there on) of the chunk at a place; 0 or less where none is."""
    low, high = chunk * 0, chunk * 0 + R
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        first = (tl.load(cu + middle + 1, mask=open_, other=0) // 64).to(tl.int32) + middle + 1
        after = open_ & (first <= chunk)
        low, high = tl.where(after, middle + 1, low), tl.where(open_ & (first > chunk), middle, high)
    here = low < R
    begin, end = tl.load(cu + low, mask=here, other=0), tl.load(cu + low + 1, mask=here, other=0)
    first = begin + 64 * (chunk - (begin // 64).to(tl.int32) - low)
    return first.to(tl.int64), tl.where(here, end - first, 0).to(tl.int32)


@jit
def rows_at(x, step, place, col, live, wide):
    """x[place, col] as float32, zero where ``live`` or ``wide`` says no; places are counted in int32."""
    at = x + place[:, None] * step + col[None, :]
    return tl.load(at, mask=live[:, None] & wide[None, :], other=0.0).to(tl.float32)


@jit
def decays_at(g, step, place, col, live, wide):
    """rows_at of log decays in two parts, the first a multiple of 1/2048. From -104 on exp is 0, and 64 of
    them are less than 8192: so sums of first parts, and differences of those, are exact.
    """
    decays = rows_at(g, step, place, col, live, wide)
    decays = tl.where(decays < -104.0, -104.0, decays)
    coarse = (decays + 6144.0) - 6144.0  # 4096 .. 8192 has floats 1/2048 apart
    return coarse, decays - coarse


@jit
def exp_of(x, fine):
    """exp(x + fine) to the last bit or two; a GPU's own rounds x log2(e) first, four bits lost at -60."""
    near = x + fine
    fine -= near - x
    turned = near * 1.4426950216293335
    lost = tl.fma(near, 1.4426950216293335, -turned)
    lost += near * 1.9259629911266175e-8 + fine * 1.4426950216293335
    return tl.exp2(turned) * (1.0 + lost * 0.6931471805599453)


@jit
def from_pivot(coarse, fine, place, pivot):
    """Log decays summed from the pivot row to each row: below zero for rows past it, above before."""
    before = (place <= pivot)[:, None]
    start, more = tl.sum(tl.where(before, coarse, 0.0), 0), tl.sum(tl.where(before, fine, 0.0), 0)
    return tl.cumsum(coarse, 0) - start[None, :], tl.cumsum(fine, 0) - more[None, :]


@jit
def taken_away(below):
    """I - (I + below)^-1 of a strictly lower [16, 16], a column at a time."""
    row, col = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    result = tl.where(row == col, 1.0, 0.0)
    for j in range(15):
        factor = tl.sum(tl.where(col == j, below, 0.0), 1)
        done = tl.sum(tl.where(row == j, result, 0.0), 0)
        result -= factor[:, None] * done[None, :]
    return tl.where(row == col, 0.0, -result)


@jit
def pair_by_pair(
    q, k, g, q_row, k_row, g_row, left, sub, K, KP: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Scores inside a sub-chunk, nothing factorised: [16, 64] of queries and of keys, zero elsewhere."""
    near, place = tl.arange(0, 64), 16 * sub + tl.arange(0, 16)
    of_q, of_k = tl.zeros((16, 64), tl.float32), tl.zeros((16, 64), tl.float32)
    for start in range(0, KP, BK):
        col = start + tl.arange(0, BK)
        wide, live = col < K, place < left
        queries = rows_at(q, q_row, place, col, live, wide)
        keys = rows_at(k, k_row, place, col, live, wide)
        faded = tl.zeros((16, BK), tl.float32)
        for back in range(16):
            j = 16 * sub + 15 - back
            key = tl.load(k + j * k_row + col, mask=wide & (j < left), other=0.0).to(tl.float32)
            more = wide & (j + 1 < left) & (back > 0)
            step = tl.load(g + (j + 1) * g_row + col, mask=more, other=0.0).to(tl.float32)
            faded += tl.where((place > j)[:, None], step[None, :], 0.0)
            shown = tl.exp(faded) * key[None, :]
            of_q += tl.where((near == j)[None, :], tl.sum(queries * shown, 1)[:, None], 0.0)
            of_k += tl.where((near == j)[None, :], tl.sum(keys * shown, 1)[:, None], 0.0)
    return of_q, of_k


@jit
def sub_scores(
    q, k, g, beta, weights, lower, q_row, k_row, g_row, beta_row, left, sub, K,
    KP: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sub-chunk's rows against the chunk up to them; pointers are at the chunk, of ``left`` tokens."""
    near, place = tl.arange(0, 64), 16 * sub + tl.arange(0, 16)
    live, lowest = place < left, 0.0
    for start in range(0, KP, BK):
        col = start + tl.arange(0, BK)
        lowest = tl.minimum(lowest, tl.min(tl.sum(rows_at(g, g_row, place, col, live, col < K), 0), 0))
    steep = lowest < -80.0
    pivot = 16 * sub + tl.where(steep, -1, 7)
    shown = (near <= tl.where(steep, pivot, 16 * sub + 15)) & (near < left)
    of_q, of_k = tl.zeros((16, 64), tl.float32), tl.zeros((16, 64), tl.float32)
    for start in range(0, KP, BK):
        col = start + tl.arange(0, BK)
        wide = col < K
        coarse, fine = decays_at(g, g_row, place, col, live, wide)
        coarse, fine = from_pivot(coarse, fine, place, pivot)
        fade = exp_of(coarse, fine)
        coarse, fine = decays_at(g, g_row, near, col, shown, wide)
        coarse, fine = from_pivot(coarse, fine, near, pivot)
        keys = tl.trans(rows_at(k, k_row, near, col, shown, wide) * exp_of(-coarse, -fine))
        rows = rows_at(q, q_row, place, col, live, wide) * fade
        of_q = tl.dot(rows, keys, of_q, input_precision=PRECISION)
        rows = rows_at(k, k_row, place, col, live, wide) * fade
        of_k = tl.dot(rows, keys, of_k, input_precision=PRECISION)
    if steep:
        inner_q, inner_k = pair_by_pair(q, k, g, q_row, k_row, g_row, left, sub, K, KP, BK)
        of_q += inner_q
        of_k += inner_k
    factor = tl.load(beta + place * beta_row, mask=live, other=0.0).to(tl.float32)
    of_k *= tl.where(near[None, :] < place[:, None], factor[:, None], 0.0)
    grid = tl.reshape(of_k, (16, 4, 16))
    corner = tl.sum(tl.where((tl.arange(0, 4) == sub)[None, :, None], grid, 0.0), 1)
    taken = tl.reshape(tl.broadcast_to(taken_away(corner)[:, None, :], (16, 4, 16)), (16, 64))
    of_k = tl.where((near // 16 == sub)[None, :], taken, of_k)
    put = place[:, None] * 64 + near[None, :]
    tl.store(weights + put, tl.where(near[None, :] <= place[:, None], of_q, 0.0), mask=live[:, None])
    tl.store(lower + put, of_k, mask=live[:, None])


@jit
def scores_kernel(
    q, k, g, beta, cu, out, weights, lower,
    q_row, q_head, k_row, k_head, g_row, g_head, beta_row, beta_head, out_row, out_head, T, R, K, V,
    ZERO: tl.constexpr, STEPS: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, head, sub = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    if ZERO:  # token rows of nobody
        token, col = chunk * 64 + 16 * sub + tl.arange(0, 16), tl.arange(0, VP)
        free = (token >= tl.load(cu + R)) & (token < T)
        put = out + token.to(tl.int64)[:, None] * out_row + head * out_head + col[None, :]
        zeros = tl.zeros((16, VP), tl.float32).to(out.dtype.element_ty)
        tl.store(put, zeros, mask=free[:, None] & (col < V)[None, :])
    begin, left = place_of(chunk, cu, R, STEPS)
    if 16 * sub < left:
        sub_scores(
            q + begin * q_row + head * q_head, k + begin * k_row + head * k_head,
            g + begin * g_row + head * g_head, beta + begin * beta_row + head * beta_head,
            weights + (head * T + begin) * 64, lower + (head * T + begin) * 64,
            q_row, k_row, g_row, beta_row, left, sub, K, KP, BK, PRECISION,
        )  # fmt: skip


@jit
def block_of(lower, left, i: tl.constexpr, j: tl.constexpr):
    """[16, 16] of the rows of sub-chunk i and the columns of sub-chunk j."""
    place, col = 16 * i + tl.arange(0, 16), 16 * j + tl.arange(0, 16)
    return tl.load(lower + place[:, None] * 64 + col[None, :], mask=(place < left)[:, None], other=0.0)


@jit
def minus(a, lost, b):
    """a - b, and what roundings have lost so far."""
    left = a - b
    taken = a - left
    return left, lost + ((a - (left + taken)) + (taken - b))


@jit
def solve(
    x, g, beta, lower, put, x_row, g_row, beta_row, left, col, WIDTH,
    DECAY: tl.constexpr, PADDED: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """put = (I + L)^-1 beta x, or beta x exp G, of some columns: forward substitution by sub-chunks."""
    wide, carry = col < WIDTH, tl.zeros((BN,), tl.float32)
    first, more = tl.zeros((16, BN), tl.float32), carry
    second, third = first, first
    for i in tl.static_range(4):
        place = 16 * i + tl.arange(0, 16)
        live = place < left
        factor = tl.load(beta + place * beta_row, mask=live, other=0.0).to(tl.float32)
        rest = rows_at(x, x_row, place, col, live, wide) * factor[:, None]
        lost = tl.zeros((16, BN), tl.float32)
        if DECAY:
            coarse, fine = decays_at(g, g_row, place, col, live, wide)
            rest *= exp_of(tl.cumsum(coarse, 0) + carry[None, :], tl.cumsum(fine, 0) + more[None, :])
            carry += tl.sum(coarse, 0)
            more += tl.sum(fine, 0)
        if i > 0:
            seen = tl.dot(block_of(lower, left, i, 0), first, input_precision=PRECISION)
            rest, lost = minus(rest, lost, seen)
        if i > 1:
            seen = tl.dot(block_of(lower, left, i, 1), second, input_precision=PRECISION)
            rest, lost = minus(rest, lost, seen)
        if i > 2:
            seen = tl.dot(block_of(lower, left, i, 2), third, input_precision=PRECISION)
            rest, lost = minus(rest, lost, seen)
        solved = rest - (tl.dot(block_of(lower, left, i, i), rest, input_precision=PRECISION) - lost)
        if i == 0:
            first = solved
        if i == 1:
            second = solved
        if i == 2:
            third = solved
        tl.store(put + place[:, None] * PADDED + col[None, :], solved, mask=live[:, None])


@jit
def ends_of(k, g, k_row, g_row, stop, col, wide):
    """Keys decayed to ``stop`` [64, ..], and the decay of all steps up to there."""
    near = tl.arange(0, 64)
    coarse, fine = decays_at(g, g_row, near, col, near < stop, wide)
    last, more = tl.sum(coarse, 0), tl.sum(fine, 0)
    after = exp_of(last[None, :] - tl.cumsum(coarse, 0), more[None, :] - tl.cumsum(fine, 0))
    return rows_at(k, k_row, near, col, near < stop, wide) * after, exp_of(last, more)


@jit
def solve_kernel(
    q, k, v, g, beta, cu, lower, reads, solved, corrections, ends, decay,
    q_row, q_head, k_row, k_head, v_row, v_head, g_row, g_head, beta_row, beta_head, T, R, H, K, V,
    STEPS: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, head, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    begin, left = place_of(chunk, cu, R, STEPS)
    if left > 0:
        g, beta = g + begin * g_row + head * g_head, beta + begin * beta_row + head * beta_head
        at = head * T + begin
        if part < KP // BN:
            k, col = k + begin * k_row + head * k_head, part * BN + tl.arange(0, BN)
            solve(
                k, g, beta, lower + at * 64, solved + at * KP, k_row, g_row, beta_row, left, col, K,
                True, KP, BN, PRECISION,
            )  # fmt: skip
            near, wide = tl.arange(0, 64), col < K
            live, put = near < left, at * KP + near[:, None] * KP + col[None, :]
            coarse, fine = decays_at(g, g_row, near, col, live, wide)
            queries = rows_at(q + begin * q_row + head * q_head, q_row, near, col, live, wide)
            queries *= exp_of(tl.cumsum(coarse, 0), tl.cumsum(fine, 0))
            tl.store(reads + put, queries, mask=live[:, None])
            keys, whole = ends_of(k, g, k_row, g_row, tl.minimum(left, 64), col, wide)
            tl.store(ends + put, keys, mask=live[:, None])
            tl.store(decay + (chunk * H + head) * KP + col, whole)
        else:
            col = (part - KP // BN) * BN + tl.arange(0, BN)
            solve(
                v + begin * v_row + head * v_head, g, beta, lower + at * 64, corrections + at * VP,
                v_row, g_row, beta_row, left, col, V, False, VP, BN, PRECISION,
            )  # fmt: skip
