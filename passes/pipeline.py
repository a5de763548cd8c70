"""The passes in the order they run: order is read here, not computed."""

from k3compile.passes.canonicalize import CANONICALIZE
from k3compile.passes.contiguous_views import CONTIGUOUS_VIEWS
from k3compile.passes.fuse_norm import FUSE_NORM
from k3compile.passes.latent_tail import LATENT_TAIL
from k3compile.passes.read_bf16 import READ_BF16
from k3compile.passes.runner import Pass
from k3compile.passes.state_export import STATE_EXPORT

DYNAMO_PASSES: tuple[Pass, ...] = (STATE_EXPORT,)
ATEN_PASSES: tuple[Pass, ...] = (CANONICALIZE, LATENT_TAIL, FUSE_NORM, READ_BF16, CONTIGUOUS_VIEWS)
