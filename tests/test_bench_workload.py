"""The benchmark's requests are those that the published figures were measured with."""

from __future__ import annotations

import itertools

from bench import workload


def test_mixed_is_the_published_set():
    assert workload.sha256(workload.mixed()) == workload.MIXED_1000_SHA256


def test_other_content_has_the_same_shapes():
    one, other = workload.mixed(200), workload.mixed(200, content_seed=7)
    assert [(r.kind, len(r.prompt), r.max_tokens) for r in one] == [
        (r.kind, len(r.prompt), r.max_tokens) for r in other
    ]
    assert one[0].prompt != other[0].prompt


def test_poisson_has_about_its_rate():
    requests = workload.poisson(47, 100)
    assert 4400 < len(requests) < 5000
    assert all(a.arrival < b.arrival for a, b in itertools.pairwise(requests))
