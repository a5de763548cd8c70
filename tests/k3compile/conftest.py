"""A report folder of its own for every test, and one shared compile cache for those that start processes."""

import pytest


@pytest.fixture
def own_reports(tmp_path, monkeypatch):
    """Reports are stored in a folder of this test, and the process starts without any."""
    from k3compile import report, torch_private

    folder = tmp_path / "reports"
    monkeypatch.setattr(torch_private, "cache_folder", lambda: folder)
    report.forget()
    yield folder
    report.forget()


@pytest.fixture
def fresh_cache():
    """An Inductor cache of this test: its passes run, whatever an earlier test compiled."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield
