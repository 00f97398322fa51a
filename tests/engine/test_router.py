import dataclasses

import pytest

from kvmem.engine.errors import FingerprintMismatch, QueueFull
from kvmem.engine.fingerprint import PoolFingerprint
from kvmem.engine.request import Event, Request, RequestResult
from kvmem.engine.router import POLICIES, BusyClock, Cluster, Load, Router, SideBySide


class Fake:
    def __init__(self, *, queued=0, running=0, free=1000, cached=0, full=False):
        self.state = Load(0, queued, running, free, 1000)
        self.hit, self.full = cached, full
        self.fingerprints: dict[str, PoolFingerprint] = {}
        self.time = 3.0
        self.got: list[str] = []
        self.cancelled: list[str] = []

    def submit(self, request):
        if self.full:
            raise QueueFull("this one is full")
        self.got.append(request.request_id)

    def step(self):
        return [Event("finished", r, result=RequestResult(r, (1,), "length")) for r in self.got]

    def cancel(self, request_id):
        self.cancelled.append(request_id)
        return True

    def load(self):
        return self.state

    def cached(self, request):
        return min(self.hit, len(request.prompt_tokens))

    def now(self):
        return self.time

    def wait(self, until_s):
        self.time = max(self.time, until_s)

    @property
    def idle(self):
        return not self.got


def request(name="q", prompt=100, session=None) -> Request:
    return Request(name, (1,) * prompt, 20, session=session)


@pytest.mark.parametrize(
    ("replicas", "best"),
    [
        pytest.param([Fake(), Fake(cached=64)], 1, id="prefix-hit"),
        pytest.param([Fake(queued=500), Fake(cached=0)], 1, id="queue-depth"),
        pytest.param([Fake(queued=50), Fake(free=10)], 0, id="free-memory"),
        pytest.param([Fake(running=60), Fake(running=2)], 1, id="decode-load"),
        pytest.param([Fake(cached=64, queued=500), Fake()], 1, id="a-hit-behind-a-long-queue"),
    ],
)
def test_weighed_prefers_the_cheaper_replica(replicas, best):
    assert Router("weighed").order(request(), replicas)[0] == best


def test_round_robin_takes_turns():
    router = Router("round_robin")
    assert [router.order(request(), [Fake(), Fake(), Fake()])[0] for _ in range(5)] == [0, 1, 2, 0, 1]


def test_random_is_seeded_and_visits_all():
    picks = [[Router("random", seed=5).order(request(), [Fake()] * 3)[0] for _ in range(3)] for _ in range(2)]
    router = Router("random", seed=5)
    assert picks[0] == picks[1]
    assert {router.order(request(), [Fake()] * 3)[0] for _ in range(40)} == {0, 1, 2}


def test_session_stays_until_another_is_better_by_the_affinity():
    router = Router("weighed", affinity=200)
    home, other = Fake(), Fake()
    router.placed(request(session="s"), 1)
    home.state = Load(0, 150, 0, 1000, 1000)
    assert router.order(request(session="s"), [other, home])[0] == 1
    home.state = Load(0, 250, 0, 1000, 1000)
    assert router.order(request(session="s"), [other, home])[0] == 0
    assert router.order(request(session="t"), [other, home])[0] == 0


def test_cluster_full_home_falls_back_and_counts_the_move():
    replicas = [Fake(full=True), Fake(queued=900)]
    cluster = Cluster(replicas, Router("weighed"))
    cluster.router.placed(request(session="s"), 0)
    cluster.submit(request("q1", session="s"))
    assert replicas[1].got == ["q1"]
    assert cluster.router.moved == 1
    assert cluster.cancel("q1")
    assert replicas[1].cancelled == ["q1"]


def test_cluster_all_full_raises_queue_full():
    cluster = Cluster([Fake(full=True), Fake(full=True)], Router("least_queue"))
    with pytest.raises(QueueFull, match="every one of 2 replicas"):
        cluster.submit(request())


def test_cluster_results_name_their_replica():
    cluster = Cluster([Fake(), Fake(cached=50)], Router("weighed"))
    cluster.submit(request())
    (event,) = cluster.step()
    assert event.result.replica == 1


def test_router_unknown_policy_lists_the_known():
    with pytest.raises(ValueError, match=f"known: {', '.join(POLICIES)}"):
        Router("fastest")


MADE = PoolFingerprint("m", "f32", "p", "fp8_576", "", 1.0, 64, "s", "tags", "xla", 2, "jax 1")
OTHER = PoolFingerprint("n", "bf16", "q", "bf16_576", "index_132", 0.5, 16, "t", "off", "mosaic", 4, "jax 2")


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(PoolFingerprint)])
@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_cluster_replicas_that_differ_are_refused_at_start_and_at_hand_over_by_name(field, pool):
    replicas = [Fake(), Fake(), Fake(queued=900)]
    for replica in replicas:
        replica.fingerprints = {"prefill": MADE, "decode": MADE}
    cluster = Cluster(replicas, Router("weighed"))
    drifted = dataclasses.replace(MADE, **{field: getattr(OTHER, field)})
    replicas[0].fingerprints[pool] = drifted
    with pytest.raises(FingerprintMismatch, match=f"hand-over, {pool} pool of replica 0: .* in {field}: "):
        cluster.submit(request())
    assert not any(replica.got for replica in replicas)
    with pytest.raises(FingerprintMismatch, match=f"start, {pool} pool of replica 2: ") as caught:
        Cluster(replicas[::-1], Router("weighed"))
    assert list(caught.value.fields) == [field]


def test_cluster_brings_the_clocks_of_its_replicas_together():
    replicas = [Fake(), Fake()]
    replicas[1].time = 8.0
    assert Cluster(replicas, Router()).now() == 8.0
    assert [replica.now() for replica in replicas] == [8.0, 8.0]


def test_side_by_side_steps_the_replica_furthest_behind_and_wakes_an_idle_one_at_the_arrival():
    replicas = [Fake(), Fake()]
    cluster = SideBySide(replicas, Router("round_robin"))
    cluster.submit(request("a"))
    replicas[0].time = 9.0
    cluster.submit(dataclasses.replace(request("b"), arrival_s=5.0))
    assert replicas[1].now() == 5.0
    assert cluster.now() == 5.0
    assert [event.request_id for event in cluster.step()] == ["b"]
    replicas[1].time = 11.0
    assert [event.request_id for event in cluster.step()] == ["a"]


def test_busy_clock_counts_only_inside():
    clock = BusyClock()
    with clock:
        before = clock()
        while clock() == before:
            pass
    after = clock()
    assert 0 <= before < after == clock()
