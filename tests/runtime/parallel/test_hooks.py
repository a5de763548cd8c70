"""Without a watch nothing is noted and nothing differs."""

import pytest
from k3compile.runtime.parallel.hooks import Unwatched
from k3compile.runtime.parallel.recorder import Mark


def test_nobody_watches():
    nobody = Unwatched()
    nobody.check(nobody.mark(), Mark(7, 9))
    with pytest.raises(KeyError), nobody.step("run"):
        raise KeyError("what fails inside is not swallowed")
