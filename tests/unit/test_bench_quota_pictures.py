"""The pictures of quotas: drawn from the arbiter's decisions, and kept up to date with them."""

from __future__ import annotations

import itertools

from bench.quota_pictures import MS, ModelContainer, pictures, play
from governor.arbiter import load_library


def test_the_committed_pictures_show_what_the_arbiter_decides(build_dir):
    """To fix a failure, run python -m bench.quota_pictures and examine the pictures."""
    for path, drawn in pictures(build_dir).items():
        assert path.read_text() == drawn, path.name


def test_a_container_that_may_not_borrow_gets_its_guarantee_while_another_is_idle(build_dir):
    asleep = (500 * MS, 1_500 * MS)
    jobs = [
        ModelContainer("owner", 50, 100, asleep),
        ModelContainer("borrower", 20, 100),
        ModelContainer("capped", 20, 20),
    ]
    play(load_library(build_dir / "libcontrol"), jobs, 2_000 * MS)
    owner, borrower, capped = jobs
    assert owner.share(510 * MS, 1_500 * MS) == 0
    assert borrower.share(500 * MS, 1_500 * MS) > 70
    assert 17 < capped.share(500 * MS, 1_500 * MS) < 21
    assert owner.share(1_600 * MS, 2_000 * MS) > 45
    assert any(lent for *_, lent in borrower.grants)
    assert not any(lent for *_, lent in capped.grants)


def test_no_two_containers_work_at_the_same_time(build_dir):
    jobs = [
        ModelContainer("alpha", 45, 45),
        ModelContainer("beta", 30, 30),
        ModelContainer("gamma", 15, 15),
    ]
    play(load_library(build_dir / "libcontrol"), jobs, 1_000 * MS)
    grants = sorted(grant[:2] for job in jobs for grant in job.grants)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(grants))
