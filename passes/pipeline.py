"""The passes in the order they run: order is read here, not computed."""

from k3compile.passes.canonicalize import CANONICALIZE
from k3compile.passes.contiguous_views import CONTIGUOUS_VIEWS
from k3compile.passes.runner import Pass

DYNAMO_PASSES: tuple[Pass, ...] = ()
ATEN_PASSES: tuple[Pass, ...] = (CANONICALIZE, CONTIGUOUS_VIEWS)
