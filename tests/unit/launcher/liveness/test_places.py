"""Tests of the places of a job."""

from __future__ import annotations

from typing import Any

from flagscale.launcher.liveness.job import JobHost
from flagscale.launcher.liveness.options import Policy
from flagscale.launcher.liveness.places import Places

NOW = 1000.0


def make_places(count: int, **fields: Any) -> tuple[Places, list[JobHost]]:
    hosts = [JobHost(f"h{number}", last_message_at=NOW) for number in range(count)]
    required: dict[str, Any] = {"max_restarts": 0, "on_failure": "stop", "start_timeout": 100.0}
    required |= {"lost_host_timeout": 10.0, "hang_detection_timeout": 0.0}
    return Places(Policy(**required, **fields), hosts), hosts


def test_spares_take_the_first_places_and_the_others_are_given_up() -> None:
    places, hosts = make_places(5, on_bad_host="shrink", spares=1, min_nnodes=1)
    hosts[0].is_lost = hosts[2].is_lost = True
    assert not places.describe_shortage(NOW)
    assert places.fill(NOW) == (
        "h4 takes the place of h0; the job goes on without h2: 3 host(s) are left"
    )
    assert (places.host_by_rank, places.replaced_by) == ([4, 1, 3], {0: 4})


def test_host_that_comes_back_takes_the_place_of_its_replacement() -> None:
    places, hosts = make_places(3, on_bad_host="shrink", spares=1, min_nnodes=1)
    hosts[0].is_lost = True
    places.fill(NOW)
    assert places.replaced_by == {0: 2}
    hosts[0].is_lost = False
    places.take_back(0)
    hosts[2].is_lost = True
    places.fill(NOW)
    assert (places.host_by_rank, places.replaced_by) == ([0, 1], {2: 0}), "no cycle"


def test_reasons_why_the_job_cannot_go_on() -> None:
    reasons = []
    for fields in (
        {"on_bad_host": "stop", "spares": 1},
        {"on_bad_host": "replace"},
        {"on_bad_host": "shrink", "min_nnodes": 3},
        {"on_bad_host": "shrink"},
    ):
        places, hosts = make_places(3, **fields)
        hosts[0].is_lost = True
        reasons.append(places.describe_shortage(NOW))
    assert reasons == [
        "a host was lost",
        "1 host(s) were lost, and 0 spare(s) are there",
        *2
        * [
            "1 host(s) were lost, and 0 spare(s) are there; 2 of at least 3 host(s) are left "
            "(runner.nnodes)"
        ],
    ]
