"""Programs that Inductor 2.13 computes wrongly, and near relatives that it computes rightly."""

import torch


def scattered_then_zeroed(x, y):
    z = torch.slice_scatter(x, y[:2], 0, 1, 3)
    x.zero_()
    return z


def put_then_flipped(x, y):
    x.index_put_((torch.arange(x.size(0)),), x * 2.0)
    x.add_(x.flip(0))
    return x


def copied_in_then_flipped(x, y):
    x.index_copy_(0, torch.arange(x.size(0)), x * 2.0)
    x.add_(x.flip(0))
    return x


def read_before_overwritten(x, y):
    z = x.index_put((torch.arange(4),), x * 2.0)
    x.add_(1)
    return z, x + z


def source_written_after_the_copy(x, y):
    x[0:, :] = y[0:, :]
    y.add_(1)
    return y


def swapped(x, y):
    old = x.clone()
    x.copy_(y)
    y.copy_(old)
    return x + y


def clone_given_beside_the_written(x, y):
    z = x.clone()
    torch.ops.k3test.rev_into(z, x)
    return x * 2


def written_by_an_op_then_zeroed(x, y):
    torch.ops.k3test.rev_into(y, x)
    z = x.clone()
    x.zero_()
    return z


def middle_version_returned(x, y):
    first = x.index_copy(0, torch.arange(2), y[:2])
    x.copy_(first.index_copy(0, torch.arange(2, 4), y[:2] * 5))
    return first


def formula_given_and_read_again(x, y):
    z = x * 2
    torch.ops.k3test.rev_into(z[:3].clone(), x)
    return z + 1


def put_of_its_own_rows(x, y):
    torch.ops.k3test.rev_into(y, x)
    x.index_put_((torch.arange(4).flip(0),), x + 0)
    return x


def copied_whole_before_an_op_writes(x, y):
    v = x[:2].clone()
    x.index_add_(0, torch.arange(4), y)
    y.index_copy_(0, torch.arange(4), x * 1)
    torch.ops.k3test.rev_into(v, x)
    return y


def all_rows_given_beside_the_written(x, y):
    """Right under Inductor alone; our rewrite makes the scatter a slice of everything, which it drops."""
    y.index_copy_(0, torch.arange(4), x * 1)
    torch.ops.k3test.rev_into(y.clone(), x)
    return x + 1


def cache(x, y, at):
    x.index_copy_(0, at, y[:2])
    return x.t() @ x


def cache_of_columns(x, y, at):
    x[:, 1:3].index_copy_(0, at, y[:2, :2])
    return x.t() @ x


def written_twice(x, y):
    x.index_copy_(0, torch.arange(2), y[:2] * 3)
    between = x.flip(0)
    x.index_copy_(0, torch.arange(2, 4), y[:2] * 5)
    return between


def put_then_only_read(x, y):
    x.index_put_((torch.arange(4),), x * 2.0)
    return x.flip(0)


def made_here(x, y):
    z = (x + 1).index_copy(0, torch.arange(4), y)
    return z + z.flip(0), z


def product_given_and_read_again(x, y):
    z = x @ x
    torch.ops.k3test.rev_into(z[:3].clone(), x)
    return z + 1


def rows_scaled_in_their_place(x, y, at):
    x[at] = x[at] * 2
    return x.t() @ x


def view_read_before(x, y):
    z = x[:2] * 3
    torch.ops.k3test.rev_into(z, x)
    return x * 2


def op_on_two_tensors(x, y):
    torch.ops.k3test.rev_into(y, x)
    return x + y


WRONG = {  # program -> what is said of its functional graph
    scattered_then_zeroed: "makes a version of arg",
    put_then_flipped: "makes a version of arg",
    copied_in_then_flipped: "makes a version of arg",
    read_before_overwritten: "makes a version of arg",
    source_written_after_the_copy: "held before it was written",
    swapped: "held before it was written",
    clone_given_beside_the_written: "reads a copy of what it writes",
    written_by_an_op_then_zeroed: "makes a version of arg",
    middle_version_returned: "after it was written over",
    formula_given_and_read_again: "made before k3test.rev_into writes",
    put_of_its_own_rows: "a part of which",
}
RIGHT = (
    cache,
    cache_of_columns,
    made_here,
    op_on_two_tensors,
    product_given_and_read_again,
    rows_scaled_in_their_place,
)
# Inductor computes these rightly; what tells them from others that it does not is too fine to rely on.
REFUSED_TOO = (written_twice, put_then_only_read, view_read_before, copied_whole_before_an_op_writes)


def arguments(fn):
    """x and y [4, 4], and where a third is wanted two rows."""
    x = torch.arange(16.0).view(4, 4)
    return [x, -x - 1, torch.tensor([1, 3])][: fn.__code__.co_argcount]
