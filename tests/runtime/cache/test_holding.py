"""A hit knows where another request parted without leaving a state."""

from k3compile.runtime.cache.holding import NO_HIT, Hit


def test_a_junction_is_where_latents_go_on_and_the_state_does_not():
    assert Hit(64, 192, None).junction == 192
    assert Hit(0, 64, None).junction == 64
    assert Hit(64, 64, None).junction == 0
    assert Hit(0, 0, None) == NO_HIT
    assert NO_HIT.junction == 0
