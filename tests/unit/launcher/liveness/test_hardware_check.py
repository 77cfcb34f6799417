"""Hardware check after a failure: the coordinator measures hosts, and gives up sick ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.liveness_job import SPARE, Job, lose

from flagscale.accelerators.health import DeviceReading, Rate
from flagscale.health.messages import DeviceMeasurement, HealthEvent, PairMeasurement
from flagscale.launcher.liveness.messages import (
    EndHealthCheck,
    FinishJob,
    HandOver,
    HealthReply,
    JobPhase,
    MeasureHealth,
    StartAttempt,
    StopJob,
    StopSignalled,
)

HOT = "device state: Demo 0: it is hot"


class MeasuredJob(Job):
    """Job whose hosts reply to a check. ``rates`` and ``faults`` are lists with a value per pass of
    a host; its last value repeats.
    """

    def __init__(self, hosts: int, spares: int, **policy: Any) -> None:
        policy = {"on_bad_host": "replace", "health": "quick", "max_restarts": 9, **policy}
        super().__init__(hosts, spares=spares, **policy)
        for number in range(hosts - spares, hosts):
            self.fields[number] = dict(SPARE)
        self.rates: dict[int, list[float]] = {}
        self.faults: dict[int, list[str]] = {}
        self.broken: dict[int, str] = {}
        self.confused: set[int] = set()
        """Hosts that report a measurement when they are asked to start."""
        self.passes = dict.fromkeys(range(hosts), 0)
        self.run(5)

    def fail(self) -> None:
        """Let rank 0 fail, and all hosts end the attempt."""
        self.send_failure(0, 0)
        for number in self.coordinator.summary()["places"]:
            self.send_end(number)
        self.run(1)

    def reply(self, seconds: int = 40) -> None:
        """Run, while hosts reply to all orders of a check."""
        answered = len(self.orders)
        for _ in range(seconds):
            self.run(1)
            new, answered = self.orders[answered:], len(self.orders)
            for host, order in new:
                if host in self.silent or host is None or not isinstance(order, MeasureHealth):
                    continue
                self.send(HealthReply, host, order.step, *self.answer(host, order))

    def answer(self, host: int, order: MeasureHealth) -> tuple[HealthEvent | None, str]:
        if host in self.broken:
            return None, self.broken[host]
        if order.command is None and host in self.confused:
            return HealthEvent("measured"), ""
        if order.command is None:
            return HealthEvent("ready", device="demo", address=f"10.0.0.{host}", ranks=1), ""
        if order.command.pair is not None:
            pair = PairMeasurement(order.command.pair.partner, (1.0,))
            return HealthEvent("paired", pairs=(pair,)), ""
        number = self.passes[host]
        self.passes[host] += 1
        rate, fault = (
            values[min(number, len(values) - 1)]
            for values in (self.rates.get(host, [100.0]), self.faults.get(host, [""]))
        )
        reading = DeviceReading(faults={"memory": fault} if fault else {})
        rates = (Rate("product", rate, "TFLOP/s"),)
        device = DeviceMeasurement("Demo 0", "Demo", "", rates=rates, reading=reading)
        return HealthEvent("measured", devices=(device,)), ""

    @property
    def places(self) -> list[int]:
        return list(self.coordinator.summary()["places"])


def test_sick_host_is_replaced_by_name_and_reason() -> None:
    job = MeasuredJob(5, 1, max_restarts=0)
    job.faults[2] = ["its memory is broken"]
    job.fail()
    assert job.coordinator.phase is JobPhase.CHECKING
    job.reply()
    assert (None, StartAttempt(1, (0, 1, 4, 3))) in job.orders
    assert job.remarks == [
        "measuring the hardware of h[0-4] before the next attempt",
        "h2 is sick: device state: Demo 0: its memory is broken",
        "h4 takes the place of h2",
    ]
    ends = [order for host, order in job.orders if host == 2 and isinstance(order, FinishJob)]
    assert ends and ends[0].failure is not None
    assert ends[0].failure.reason.startswith("has left the job, because it is sick: device state")
    assert (None, EndHealthCheck()) in job.orders
    summary = job.coordinator.summary()
    assert (summary["hosts"]["2"], list(summary["sick"])) == ("sick", ["2"])
    assert job.passes == dict.fromkeys(range(5), 2), "everything was measured twice"
    assert job.notified_events == ["restarted"]
    # It is not used again, whatever it sends.
    job.orders.clear()
    job.run(1)
    assert {type(order) for host, order in job.orders if host == 2} == {FinishJob}


def test_sick_host_that_coordinates_hands_over() -> None:
    job = MeasuredJob(5, 1)
    job.faults[0] = ["it is hot"]
    job.fail()
    job.reply()
    state = job.job_state
    assert state is not None
    assert [(d.host, d.sickness) for d in state.departures] == [(0, "sick: " + HOT)]
    assert state.failure == job.coordinator.failure
    assert [type(order) for _, order in job.orders[-2:]] == [HandOver, FinishJob]
    assert job.orders[-1][0] == 0, "the others go on"
    assert job.remarks[-1] == f"h0 is sick: {HOT}"
    assert job.notified_events == []


def test_sick_host_without_a_successor_stays() -> None:
    job = MeasuredJob(2, 0, on_bad_host="shrink", min_nnodes=1)
    job.faults[0] = ["it is hot"]
    job.fail()
    job.reply()
    remark = f"h0 is sick: {HOT}; it stays in the job: no other host can coordinate the run"
    assert remark in job.remarks
    assert (None, StartAttempt(1)) in job.orders


@pytest.mark.parametrize(
    ("setting", "remark"),
    [
        pytest.param({}, "the hardware check found no sick host", id="healthy"),
        pytest.param(
            {"faults": {2: ["it is hot", ""]}},
            "the hardware check found no sick host",
            id="first-measurement-only",
        ),
        pytest.param(
            {"rates": {2: [70.0, 100.0]}},
            "the hardware check found no sick host",
            id="slow-once",
        ),
        pytest.param(
            {"broken": {2: "no torch"}},
            "the hardware check found no sick host",
            id="not-measured",
        ),
        pytest.param(
            {"faults": {4: ["it is hot"]}},
            "the spare h4 is sick: device state: Demo 0: it is hot",
            id="spare",
        ),
    ],
)
def test_host_stays_in_the_job(setting: dict[str, Any], remark: str) -> None:
    job = MeasuredJob(5, 1)
    for name, values in setting.items():
        getattr(job, name).update(values)
    job.fail()
    job.reply()
    assert job.remarks[1] == remark
    assert (job.places, job.coordinator.attempt) == ([0, 1, 2, 3], 1)


def test_host_that_is_not_measured_is_named() -> None:
    job = MeasuredJob(5, 1)
    job.broken[2] = "no torch"
    job.fail()
    job.reply()
    assert "h2: not measured: no torch" in job.remarks


def test_host_with_an_unexpected_first_reply_is_named() -> None:
    job = MeasuredJob(5, 1)
    job.confused.add(2)
    job.fail()
    job.reply()
    assert "h2: not measured: unexpected reply to the start: measured" in job.remarks
    assert job.coordinator.attempt == 1


def test_more_sick_hosts_than_spares() -> None:
    job = MeasuredJob(5, 1)
    job.faults |= {2: ["it is hot"], 3: ["it is hot"]}
    job.fail()
    job.reply()
    assert job.places == [0, 1, 4, 3]
    assert "h3 is sick: device state: Demo 0: it is hot; it stays in the job: no spare is left" in (
        job.remarks
    )


def test_job_goes_on_without_a_sick_host() -> None:
    job = MeasuredJob(4, 0, on_bad_host="shrink", min_nnodes=3)
    job.faults |= {1: ["it is hot"], 2: ["it is hot"]}
    job.fail()
    job.reply()
    assert job.places == [0, 2, 3]
    assert job.remarks[-1] == "the job goes on without h1: 3 host(s) are left"


def test_one_slow_host_of_eight_is_replaced_and_healthy_ones_never() -> None:
    """Rates differ by some percent, as those of healthy devices do."""
    generator = random.Random(1)
    for index in range(40):
        job = MeasuredJob(9, 1)
        victim = generator.randrange(1, 8) if index < 20 else None
        for host in range(9):
            factor = 0.8 if host == victim else 1.0
            job.rates[host] = [factor * generator.gauss(100.0, 1.0) for _ in range(2)]
        job.fail()
        job.reply()
        expected = [8 if host == victim else host for host in range(8)]
        assert (job.places, job.coordinator.attempt) == (expected, 1)


@pytest.mark.parametrize(
    ("policy", "spares"),
    [
        pytest.param({"health": "off"}, 1, id="off"),
        pytest.param({"on_bad_host": "stop"}, 0, id="nothing-to-replace-it"),
    ],
)
def test_no_check(policy: dict[str, Any], spares: int) -> None:
    job = MeasuredJob(3, spares, **policy)
    job.send_failure(0, 0)
    for number in range(3 - spares):
        job.send_end(number)
    job.run(4)
    assert job.orders[-1] == (None, StartAttempt(1, ()))


def test_lost_host_is_replaced_without_a_check() -> None:
    job = MeasuredJob(4, 1)
    lose(job, 1, (0, 2))
    assert job.orders[-1] == (None, StartAttempt(1, (0, 3, 2)))
    assert not any(isinstance(order, MeasureHealth) for _, order in job.orders)


def test_host_that_falls_silent_does_not_hold_the_check() -> None:
    job = MeasuredJob(5, 1)
    job.fail()
    job.silent.add(3)
    job.reply()
    assert job.coordinator.attempt == 1
    assert job.passes[3] == 0


def test_stop_during_a_check_ends_the_job() -> None:
    job = MeasuredJob(5, 1)
    job.fail()
    job.send(StopSignalled, 0, 15, None)
    job.run(2)
    assert job.coordinator.phase is JobPhase.OVER
    assert job.order_types()[-2:] == [StopJob, FinishJob]
    assert job.notified_events == ["stopped"]


def test_replies_of_an_earlier_check_are_ignored() -> None:
    job = MeasuredJob(5, 1)
    job.fail()
    job.reply()
    job.fail()
    event = HealthEvent("ready", device="demo", ranks=1)
    for host in range(5):
        job.send(HealthReply, host, 1, event)
    job.run(2)
    assert job.coordinator.phase is JobPhase.CHECKING
    last = max(order.step for _, order in job.orders if isinstance(order, MeasureHealth))
    job.orders.clear()
    for host in range(5):
        job.send(HealthReply, host, last, event)
    job.run(1)
    assert {order.step for _, order in job.orders if isinstance(order, MeasureHealth)} == {last + 1}
