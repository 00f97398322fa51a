import pytest

from kvmem.engine.errors import QueueFull
from kvmem.engine.request import Event, Request, RequestResult
from kvmem.engine.router import POLICIES, Cluster, Load, Router


class Fake:
    def __init__(self, *, queued=0, running=0, free=1000, cached=0, full=False):
        self.state = Load(0, queued, running, free, 1000)
        self.hit, self.full = cached, full
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
        return 3.0

    def wait(self, until_s):
        pass

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
