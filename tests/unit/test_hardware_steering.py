"""Test steering: the policy's settings become driver calls to a fake kernel module (kernel_module.py)."""

from __future__ import annotations

import contextlib
import os
import random
from types import SimpleNamespace

import pytest

from governor.hardware import calls
from governor.hardware.activity import Sample
from governor.hardware.discovery import ChannelGroup, Holding
from governor.hardware.driver import DriverCallError
from governor.hardware.nvidia import N_OVERLAP, NvidiaHardware, require_rights, revive
from governor.hardware.policy import SHORT, TURN_COST
from governor.hardware.steering import Steering
from governor.hardware.tenant import PERIOD, Share
from tests.unit.kernel_module import GPU_ID, UUID, KernelModule, make_nodes

MS = 1_000_000
FDS = {1: 601, 2: 602, 3: 603}


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A GPU with three processes, PIDs 1001 to 1003, and its steering, on a clock of the test."""
    nodes = make_nodes(tmp_path)
    module, clock = KernelModule(), SimpleNamespace(now=0)
    held = {}
    for i, fd in FDS.items():
        client = module.process(fd)
        group = min(module.objects(client, calls.GROUP.value))
        channels = [c for c, o in module.objects(client, 0xC86F).items() if o.parent == group]
        held[i] = (client, ChannelGroup(client, group, GPU_ID, tuple(channels)))

    def find_holdings(_driver, pid, _pidfd, clients, **_):
        """Find a process's holding by its number. test_driver_calls.py tests how real holdings are
        found.
        """
        i = pid - 1000
        if held[i][0] not in clients:
            return []
        return [Holding(pid, held[i][0], FDS[i], (held[i][1],))]

    monkeypatch.setattr("governor.hardware.nvidia.find_holdings", find_holdings)
    monkeypatch.setattr(
        "governor.hardware.nvidia.borrowed_of", lambda _, fd, __: contextlib.nullcontext(fd)
    )
    hardware = NvidiaHardware(UUID, branch=580, **nodes, ioctl=module.ioctl)
    announced, samples = [], []
    steering = Steering(
        hardware,
        clock=lambda: clock.now,
        announce=lambda off: announced.append((off, len(module.asked))),
        samples=lambda _: samples[0]() if samples else None,
    )

    def attach(i, to=None):
        steering.enter(to or i, 1000 + i)
        found = hardware.find(1000 + i, -1)
        steering.take(to or i, 1000 + i, found)
        return len(found)

    def step(ms, **turns):
        """Advance by `ms`, of which each container has its part; return the ns until the next step is due."""
        for name, part in turns.items():
            i = int(name[1:])
            module.turn(1000 + i, i, int(part * MS))
        module.now_ns += int((ms - sum(turns.values())) * MS)
        clock.now += int(ms * MS)
        return steering.step() - clock.now

    def state(i):
        client, group = held[i]
        on = {not module.clients[client][1][c].off for c in group.channels}
        assert len(on) == 1
        return on.pop(), module.clients[client][1][group.handle].timeslice_us

    yield SimpleNamespace(
        module=module,
        steering=steering,
        attach=attach,
        step=step,
        state=state,
        clock=clock,
        held=held,
        hardware=hardware,
        announced=announced,
        samples=samples,
        nodes=nodes,
    )
    for i in FDS:
        steering.remove(i)
    hardware.close()


def us(ns):
    """Convert from ns to the driver's unit: its microsecond is 1.024 us."""
    return int(ns) // 1024


def n_calls(module, call):
    return [name for name, _ in module.asked].count(call.name)


def test_slices_are_set_only_once(node):
    node.steering.add(1, Share(0.6, 1))
    node.steering.add(2, Share(0.3, 1))
    node.attach(1)
    node.attach(2)
    node.step(0)
    # A round takes a quarter of a period, including the cost of its turns.
    round_ns = PERIOD // 4 - 2 * TURN_COST
    assert node.state(1) == (True, us(round_ns * 2 / 3))
    assert node.state(2) == (True, us(round_ns / 3))
    before = n_calls(node.module, calls.SET_TIMESLICE)
    for _ in range(5):
        node.step(100, c1=66, c2=33)
    assert n_calls(node.module, calls.SET_TIMESLICE) == before
    # Each process was switched on when it was found.
    assert n_calls(node.module, calls.DISABLE_CHANNELS) == 2
    assert dict(node.steering.used_ns) == {1: 330 * MS, 2: 165 * MS}


def test_the_policy_knows_which_containers_are_adopted(node):
    node.steering.add(1, Share(0.3, 0.3), is_adopted=True)
    node.steering.add(2, Share(0.3, 0.3))
    adopted = {i: one.is_adopted for i, one in node.steering._policy._tenants.items()}
    assert adopted == {1: True, 2: False}


def test_a_container_that_has_used_its_cap_is_off_until_the_period_ends(node):
    node.steering.add(1, Share(0.3, 0.3))
    node.attach(1)
    assert node.step(0) == 30 * MS
    left = node.step(30, c1=30)
    assert not node.state(1)[0]
    assert left == PERIOD - 30 * MS
    node.step(70)
    assert node.state(1)[0]


def test_containers_that_are_switched_together_take_one_call(node):
    for i in FDS:
        node.steering.add(i, Share(0.3, 0.3))
        node.attach(i)
    node.step(0)
    before = n_calls(node.module, calls.DISABLE_CHANNELS)
    node.step(90, c1=30, c2=30, c3=30)
    assert not any(node.state(i)[0] for i in FDS)
    assert n_calls(node.module, calls.DISABLE_CHANNELS) == before + 1
    node.step(10)
    assert all(node.state(i)[0] for i in FDS)
    assert n_calls(node.module, calls.DISABLE_CHANNELS) == before + 2


def test_a_turn_begins_before_the_previous_one_ends(node):
    """For a moment both are on, so the GPU is not idle for the duration of a call."""
    node.steering.add(1, Share(0.2, 1, latency=True))
    node.steering.add(2, Share(0.4, 1))
    node.steering.add(3, Share(0.4, 1))
    for i in FDS:
        node.attach(i)
    node.step(0)
    node.step(100, c2=48, c3=48)  # neither container uses up its turn alone
    assert [node.state(i)[0] for i in FDS] == [True, True, False]
    assert node.state(2)[1] == us(SHORT)
    switched = []
    real = node.hardware.switch
    node.hardware.switch = lambda held, on: (switched.append(on), real(held, on=on))
    node.step(50, c2=50)
    assert [node.state(i)[0] for i in FDS] == [True, False, True]
    assert switched == [True, False]


def test_a_new_process_of_a_container_that_is_off_is_off(node):
    node.steering.add(1, Share(0.3, 0.3))
    node.attach(1)
    node.step(0)
    node.step(30, c1=30)
    node.attach(2, to=1)
    assert not node.state(2)[0]
    node.step(70)
    assert node.state(1)[0]
    assert node.state(2)[0]


def test_processes_of_one_container_share_its_slice(node):
    node.steering.add(1, Share(0.5, 1))
    node.steering.add(3, Share(0.5, 1))
    node.attach(1)
    node.attach(3)
    node.step(0)
    whole = us((PERIOD // 4 - 2 * TURN_COST) / 2)
    assert node.state(1)[1] == node.state(3)[1] == whole
    node.attach(2, to=1)
    node.step(10, c1=3, c3=3)
    assert node.state(1)[1] == whole  # the second process has not worked yet
    node.step(10, c1=3, c2=3, c3=3)
    half = us((PERIOD // 2 - 3 * TURN_COST) / 2 / 2)  # fewer rounds: three turns
    assert node.state(1)[1] == node.state(2)[1] == half
    for _ in range(12):
        node.step(100, c1=45, c3=45)
    assert node.state(1)[1] == whole  # the second process has done nothing for a second
    node.step(10, c1=3, c2=3, c3=3)
    assert node.state(2)[1] == half
    node.steering.forget(1, 1002)
    node.step(10, c1=3, c3=3)
    assert node.state(1)[1] == whole


def test_a_removed_container_is_left_switched_on(node):
    node.steering.add(1, Share(0.3, 0.3))
    node.attach(1)
    node.step(0)
    node.step(30, c1=30)
    assert not node.state(1)[0]
    node.steering.remove(1)
    assert node.state(1)[0]


def test_the_next_container_of_that_number_begins_at_zero(node):
    node.steering.add(1, Share(0.5, 1))
    node.attach(1)
    node.step(0)
    node.step(100, c1=90)
    node.steering.remove(1)
    node.steering.add(1, Share(0.5, 1))
    node.attach(2, to=1)
    node.step(10, c2=3)
    assert dict(node.steering.used_ns) == {1: 3 * MS}


def test_all_on_switches_everything_on(node):
    for i in FDS:
        node.steering.add(i, Share(0.3, 0.3))
        node.attach(i)
    node.step(0)
    node.step(90, c1=30, c2=30, c3=30)
    assert not any(node.state(i)[0] for i in FDS)
    node.steering.all_on()
    assert all(node.state(i)[0] for i in FDS)
    assert node.steering.setting(1).on
    node.step(1)  # the policy still wants it off, so it is switched off again
    assert not node.state(1)[0]


def test_a_process_whose_end_was_not_reported_prevents_no_switch(node):
    """The process's client disappears before the end is reported. The others are switched
    nonetheless.
    """
    for i in (1, 2):
        node.steering.add(i, Share(0.3, 0.3))
        node.attach(i)
    node.step(0)
    node.module.clients.pop(node.held[1][0])
    node.step(60, c1=30, c2=30)
    assert not node.state(2)[0]
    node.steering.add(1, Share(0.6, 0.6))  # setting its slice is not an error
    node.step(40)
    assert node.state(2)[0]


def test_an_unchanged_result_costs_no_call(node):
    node.steering.add(1, Share(0.3, 0.3))
    node.attach(1)
    node.step(0)
    before = n_calls(node.module, calls.DISABLE_CHANNELS), n_calls(node.module, calls.SET_TIMESLICE)
    node.attach(1)
    assert before == (
        n_calls(node.module, calls.DISABLE_CHANNELS),
        n_calls(node.module, calls.SET_TIMESLICE),
    )


def test_a_partly_done_call_is_not_done_twice(node):
    """The driver counts: a channel that was switched off before the failing one would otherwise stay off."""
    for i in (1, 2):
        node.steering.add(i, Share(0.3, 0.3))
        node.attach(i)
    node.step(0)
    node.module.clients.pop(node.held[2][0])
    node.step(60, c1=30, c2=30)
    assert not node.state(1)[0]
    node.step(40)
    assert node.state(1)[0]


def test_a_process_that_has_ended_is_not_switched_again(node):
    node.steering.add(1, Share(0.3, 0.3))
    node.attach(1)
    node.step(0)
    node.module.clients.pop(node.held[1][0])
    node.steering.forget(1, 1001)
    node.step(30, c2=30)
    node.step(70)
    assert {
        status for name, status in node.module.asked if name == calls.DISABLE_CHANNELS.name
    } <= {0}


def test_a_refusal_by_the_driver_is_raised_to_the_caller(node):
    node.steering.add(1, Share(0.3, 0.3))
    node.attach(1)
    node.step(0)
    node.module.refuse[calls.DISABLE_CHANNELS.name] = 0x65
    with pytest.raises(
        DriverCallError, match="channels of 1 clients cannot be switched: NV_ERR_TIMEOUT"
    ):
        node.step(30, c1=30)
    node.module.refuse.clear()


def test_an_unknown_process_is_charged_to_no_container(node):
    node.steering.add(1, Share(0.5, 1))
    node.attach(1)
    node.step(0)
    node.module.turn(4000, 9, 5 * MS)
    node.step(10, c1=5)
    assert dict(node.steering.used_ns) == {1: 5 * MS}


def test_a_new_result_replaces_the_known_channels(node):
    node.steering.add(1, Share(0.5, 1))
    assert node.attach(1) == 1
    assert node.attach(1) == 1
    node.step(0)
    assert node.state(1)[1] == us(SHORT)  # the only group has all of the container's slice


def test_a_gpu_that_the_driver_does_not_have_leaves_nothing_open(node):
    before = len(list(os.scandir("/proc/self/fd")))
    with pytest.raises(DriverCallError, match="the driver has no GPU GPU-other"):
        NvidiaHardware("GPU-other", branch=580, **node.nodes, ioctl=node.module.ioctl)
    assert len(list(os.scandir("/proc/self/fd"))) == before


def test_switching_off_is_announced_beforehand(node):
    node.steering.add(1, Share(0.3, 0.3))
    node.attach(1)
    node.step(0)
    assert node.announced == []
    node.step(30, c1=30)
    (off, n_asked) = node.announced[-1]
    client, group = node.held[1]
    assert off == [[client, channel] for channel in group.channels]
    assert calls.DISABLE_CHANNELS.name in [name for name, _ in node.module.asked[n_asked:]]
    node.step(10)  # announced in each step while it is off; silence would mean a stuck governor
    assert len(node.announced) == 2
    node.step(60)
    assert node.announced[-1][0] == []


def test_a_search_probes_only_new_and_known_clients(node):
    def n_asked():
        return n_calls(node.module, calls.GET_ACCESS_RIGHTS)

    first = n_asked()
    assert first > 1000  # all others were probed when the GPU was opened
    assert node.hardware.find(1001, -1)
    assert n_asked() - first < N_OVERLAP + 10
    first = n_asked()
    new = node.module.process(604)
    for i in (1001, 1002, 1003):  # all of them older than the last search
        assert node.hardware.find(i, -1)
    assert n_asked() - first < 3 * (N_OVERLAP + 10)
    assert new in node.hardware._clients
    del node.module.clients[new]
    assert node.hardware.find(1001, -1)
    assert new not in node.hardware._clients
    # The fake module also keeps the clients of the searches themselves.
    assert set(node.hardware._clients) >= {client for client, _ in node.held.values()}


def test_many_clients_do_not_make_each_search_longer(node, monkeypatch):
    monkeypatch.setattr("governor.hardware.nvidia.MAX_CLIENTS_KEPT", 10)
    assert node.hardware.find(1001, -1)
    for _ in range(3):
        for fd in range(700, 720):
            node.module.process(fd)
        node.hardware.find(1001, -1)
    before = n_calls(node.module, calls.GET_ACCESS_RIGHTS)
    node.hardware.find(1001, -1)
    assert n_calls(node.module, calls.GET_ACCESS_RIGHTS) - before <= N_OVERLAP + 10


@pytest.mark.parametrize("how", ["remove", "forget"])
def test_an_ended_container_is_not_announced_as_off(node, how):
    """Otherwise the watchdog would take the silence on a node without containers for a stuck governor."""
    node.steering.add(1, Share(0.3, 0.3))
    node.attach(1)
    node.step(0)
    node.step(30, c1=30)
    assert node.announced[-1][0]
    if how == "remove":
        node.steering.remove(1)
    else:
        node.steering.forget(1, 1001)
    assert node.step(1) <= PERIOD
    assert node.announced[-1][0] == []


def test_a_process_that_was_left_off_is_on_when_it_is_found(node):
    client, group = node.held[1]
    for channel in group.channels:
        node.module.clients[client][1][channel].off = 1
    node.steering.add(1, Share(0.5, 1))
    node.attach(1)
    assert node.state(1)[0]


def test_a_process_that_is_off_and_not_found_again_is_not_forgotten(node, monkeypatch):
    node.steering.add(1, Share(0.3, 0.3))
    node.attach(1)
    node.step(0)
    node.step(30, c1=30)
    assert not node.state(1)[0]
    monkeypatch.setattr(node.hardware, "find", lambda *_: [])
    assert node.attach(1) == 0
    node.step(70)
    assert node.state(1)[0]


@pytest.mark.parametrize(
    ("capabilities", "is_right"), [("0000000000200000", True), ("00000000a80425fb", False)]
)
def test_without_the_right_to_see_pids_nothing_is_steered(tmp_path, capabilities, is_right):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    refused = pytest.raises(
        PermissionError, match="without CAP_SYS_ADMIN the context-switch trace has no"
    )
    with contextlib.nullcontext() if is_right else refused:
        require_rights(tmp_path)


def test_a_channel_found_in_two_containers_belongs_to_the_last_one(node):
    """The driver has just confirmed it for the new process, to which a reused handle belongs."""
    node.steering.add(1, Share(0.3, 0.3))
    node.steering.add(2, Share(0.3, 1))
    node.attach(1)
    (found,) = node.hardware.find(1001, -1)
    node.steering.enter(2, 1002)
    node.steering.take(2, 1002, [found._replace(holding=found.holding._replace(pid=1002))])
    node.step(0)
    node.step(30, c1=30)
    assert node.state(1)[0]  # the first container's cap no longer applies to it
    assert node.steering.strangers == {1001}
    node.attach(1)
    assert not node.state(1)[0]


def test_a_process_that_was_switched_on_from_outside_is_switched_off_again(node):
    node.steering.add(1, Share(0.3, 0.3))
    node.attach(1)
    node.step(0)
    node.step(30, c1=30)
    assert node.steering.returned == set()
    node.step(10, c1=10)
    assert node.steering.returned == {1001}
    client, group = node.held[1]
    for channel in group.channels:
        node.module.clients[client][1][channel].off = 0
    node.attach(1)
    assert not node.state(1)[0]


def test_a_process_found_again_while_it_is_off_is_on_after_one_call(node):
    """The driver counts how often a channel is switched off."""
    node.steering.add(1, Share(0.3, 0.3))
    node.attach(1)
    node.step(0)
    node.step(30, c1=30)
    for _ in range(3):
        node.attach(1)
        assert not node.state(1)[0]
    node.step(70)
    assert node.state(1)[0]


def test_gpu_time_before_the_switch_is_not_a_return(node, monkeypatch):
    """Time may pass between reading the trace and the call that follows."""
    node.steering.add(1, Share(0.3, 0.3))
    node.attach(1)
    node.step(0)
    switch = node.hardware.switch

    def late(held, *, on):
        if not on:
            node.module.turn(1001, 1, 5 * MS)
            node.clock.now += 5 * MS
        switch(held, on=on)

    monkeypatch.setattr(node.hardware, "switch", late)
    node.step(30, c1=30)
    assert not node.state(1)[0]
    node.step(20)
    assert node.steering.used_ns[1] == 35 * MS
    assert node.steering.returned == set()
    assert node.steering.hidden_ns == 0


def test_a_process_that_a_search_did_not_find_is_hidden(node):
    node.steering.add(1, Share(0.3, 0.3))
    node.steering.enter(1, 1001)
    node.step(10, c1=10)
    # There was no search for the process yet.
    assert (node.steering.strangers, node.steering.hidden_ns) == (
        {1001},
        0,
    )
    node.steering.miss(1001)
    node.step(20, c1=20)
    assert node.steering.hidden_ns == 20 * MS
    node.attach(1)
    assert node.steering.hidden_ns == 0


def test_use_before_the_first_search_ended_is_no_debt(node):
    """Many containers start together, so the search for this one takes its turn after 3 s."""
    node.steering.add(1, Share(0.3, 0.3))
    node.steering.enter(1, 1001)
    for _ in range(30):
        node.step(100, c1=100)
    node.attach(1)
    node.step(100)
    node.step(100)
    assert node.state(1)[0]


def test_a_search_that_finds_nothing_begins_the_debt(node):
    """A container that cannot be found does not work without a debt for as long as one that waits for its search."""
    node.steering.add(1, Share(0.3, 0.3))
    node.steering.enter(1, 1001)
    node.steering.take(1, 1001, [])
    for _ in range(30):
        node.step(100, c1=100)
    node.attach(1)
    node.step(100)
    node.step(100)
    assert not node.state(1)[0]


def test_a_process_that_is_released_while_it_is_off_is_switched_on(node):
    node.steering.add(1, Share(0.3, 0.3))
    node.attach(1)
    node.step(0)
    node.step(30, c1=30)
    assert not node.state(1)[0]
    node.steering.forget(1, 1001)
    assert node.state(1)[0]


def test_channels_that_a_search_misses_do_not_stay_off(node):
    """A process has two clients, and a later search finds only the newer one."""
    node.steering.add(1, Share(0.3, 0.3))
    node.attach(1)
    node.step(0)
    node.step(30, c1=30)
    assert not node.state(1)[0]
    (newer,) = node.hardware.find(1002, -1)
    node.steering.take(1, 1001, [newer._replace(holding=newer.holding._replace(pid=1001))])
    assert node.state(1)[0]
    assert not node.state(2)[0]


def test_channels_of_a_process_that_has_left_are_not_steered(node):
    node.steering.add(1, Share(0.3, 0.3))
    node.attach(1)
    found = node.hardware.find(1001, -1)
    node.steering.forget(1, 1001)
    node.steering.take(1, 1001, found)
    node.step(0)
    node.step(30, c1=30)
    assert node.state(1)[0]


def test_a_clients_descriptor_that_was_replaced_does_not_end_the_steering(node):
    """After a dup2 onto the client's descriptor, the driver refuses the call, and the slice keeps
    its length.
    """
    node.steering.add(1, Share(0.6, 1))
    node.attach(1)
    client, _ = node.held[1]
    node.module.clients[client] = (999, node.module.clients[client][1])
    node.steering.add(2, Share(0.3, 1))
    node.attach(2)
    node.step(0)
    node.step(50, c1=20, c2=20)
    assert node.state(2)[1] != 2048


def test_a_process_that_is_alone_and_pauses_is_charged_its_work(node):
    node.steering.add(1, Share(0.5, 1))
    node.attach(1)
    node.samples.append(lambda: [Sample(node.clock.now - 50 * MS, 0.1)])
    for _ in range(60):
        node.step(30, c1=30)  # longer than any slice: no other context waits
    before = node.steering.used_ns[1]
    for _ in range(50):
        node.step(30, c1=30)
    assert node.steering.used_ns[1] - before == pytest.approx(150 * MS, abs=10 * MS)


def test_the_time_that_is_shown_never_falls(node):
    """A second of full work, then pauses: the overcharge is offset against later use."""
    node.steering.add(1, Share(0.5, 1))
    node.attach(1)
    shown = []
    node.samples.append(lambda: [Sample(node.clock.now - 50 * MS, 1.0 if len(shown) < 33 else 0.1)])
    for _ in range(150):
        node.step(30, c1=30)
        shown.append(node.steering.used_ns[1])
    assert shown == sorted(shown)
    # Half a second is known only to within a sample's length.
    assert shown[-1] == pytest.approx(1250 * MS, abs=150 * MS)


def test_a_process_that_is_off_without_a_record_is_on_in_the_next_period(node):
    """The process is the last one on the GPU. No other process follows, so according to the trace
    it stays there.
    """
    node.steering.add(1, Share(0.3, 0.3))
    node.attach(1)
    node.step(0)
    node.module.turn(1001, 1, 30 * MS, ends=False)
    node.clock.now += 30 * MS
    node.steering.step()
    assert not node.state(1)[0]
    node.step(70)
    assert node.state(1)[0]
    assert node.steering.used_ns[1] == pytest.approx(30 * MS, abs=MS)


class KilledError(BaseException):
    """SIGKILL between two driver calls."""


def play_and_die(node, n_calls, seed):
    """Steer three containers with caps until killed at the n-th call; return what was announced."""
    draw, module = random.Random(seed), node.module  # noqa: S311
    real, left = module.ioctl, [-1]
    announced = []

    def ioctl(fd, request, data):
        left[0] -= 1
        if left[0] == 0 and seed % 2:
            raise KilledError
        real(fd, request, data)
        if left[0] == 0:
            raise KilledError

    hardware = NvidiaHardware(UUID, branch=580, **node.nodes, ioctl=ioctl)
    left[0] = n_calls
    steering = Steering(hardware, clock=lambda: node.clock.now, announce=announced.append)
    try:
        for i in FDS:
            steering.add(i, Share(0.2, draw.choice([0.2, 0.3, 1]), latency=draw.random() < 0.3))
            steering.enter(i, 1000 + i)
            steering.take(i, 1000 + i, hardware.find(1000 + i, -1))
        for _ in range(60):
            for i in FDS:
                if not module.clients[node.held[i][0]][1][node.held[i][1].channels[0]].off:
                    module.turn(1000 + i, i, draw.randrange(15) * MS)
            node.clock.now += 30 * MS
            steering.step()
    except KilledError:
        return announced
    finally:
        left[0] = -1
        hardware.close()  # as the kernel closes the files of a killed process
    return announced


@pytest.mark.parametrize("n_kills", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_governor_killed_at_any_call_leaves_no_container_off(node, n_kills, monkeypatch):
    """Everything that is off was announced before, so the watchdog switches it on.

    Half of the time there is no watchdog: the next governor does so before its first step.
    """
    clients = [client for client, _ in node.held.values()]
    monkeypatch.setattr("governor.hardware.nvidia.live_clients", lambda *_: clients)
    was_off = 0
    for n in range(n_kills):
        announced = play_and_die(node, 1 + n * 7 % 500, n)
        off = {
            (client, channel)
            for client, group in node.held.values()
            for channel in group.channels
            if node.module.clients[client][1][channel].off
        }
        if off:
            assert off <= {tuple(pair) for pair in announced[-1]}
            was_off += 1
            if n % 4 < 2:
                revive(UUID, announced[-1], **node.nodes, ioctl=node.module.ioctl)
                assert all(node.state(i)[0] for i in FDS)
        hardware = NvidiaHardware(UUID, branch=580, **node.nodes, ioctl=node.module.ioctl)
        steering = Steering(hardware, clock=lambda: node.clock.now)
        for i in FDS:
            steering.add(i, Share(0.2, 0.2))
            steering.enter(i, 1000 + i)
            steering.take(i, 1000 + i, hardware.find(1000 + i, -1))
            assert node.state(i)[0]
        hardware.close()
    assert was_off > n_kills // 10  # enough kills happened where it matters
