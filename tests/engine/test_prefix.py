import random

import pytest

from kvmem.engine.prefix import PrefixTree

Z = 4


def tokens(*pages: int) -> tuple[int, ...]:
    return tuple(10 * page + i for page in pages for i in range(Z))


def filled(**rest) -> PrefixTree:
    tree = PrefixTree(Z, **rest)
    assert pages(tree.insert(tokens(1, 2, 3), [(11, 1), (12, 1), (13, 1)])) == [11, 12, 13]
    assert pages(tree.insert(tokens(1, 2, 5), [(21, 1), (22, 1), (25, 1)])) == [25]
    return tree


def pages(path) -> list[int]:
    return [node.page for node in path]


def test_match_shared_prefix_returns_whole_pages_and_leaves_one_token():
    tree = filled()
    assert pages(tree.match((*tokens(1, 2, 5), 99))) == [11, 12, 25]
    assert pages(tree.match(tokens(1, 2, 5))) == [11, 12]
    assert pages(tree.match((*tokens(1), 20, 21, 22, 0, 0))) == [11]
    assert pages(tree.match((*tokens(2, 3), 1))) == []


def test_match_other_tenant_finds_nothing():
    tree = filled()
    assert pages(tree.match((*tokens(1, 2), 1), tenant="other")) == []
    assert pages(tree.insert(tokens(1), [(31, 1)], tenant="other")) == [31]
    assert pages(tree.match((*tokens(1, 2), 1), tenant="other")) == [31]


def test_match_hash_collision_compares_tokens():
    tree = PrefixTree(Z, token_hash=lambda parent, page: 5)
    tree.insert(tokens(1), [(11, 1)])
    assert pages(tree.match((*tokens(2), 1))) == []
    assert pages(tree.insert(tokens(2), [(12, 1)])) == []
    assert pages(tree.match((*tokens(1), 1))) == [11]


def test_match_origin_filter_stops_at_decode_made_pages():
    tree = filled()
    tree.insert(tokens(1, 2, 3, 4), [(11, 1), (12, 1), (13, 1), (44, 1)], origin="decode")
    assert pages(tree.match((*tokens(1, 2, 3, 4), 0))) == [11, 12, 13, 44]
    assert pages(tree.match((*tokens(1, 2, 3, 4), 0), origins=frozenset({"prefill"}))) == [11, 12, 13]


def test_evict_takes_unlocked_leaves_longest_unused_first():
    tree = filled()
    path = tree.match((*tokens(1, 2, 3), 0))
    tree.lock(path)
    assert tree.evictable == 1
    assert tree.evict(9) == [25]
    tree.unlock(path)
    assert tree.evictable == 3
    assert tree.evict(2) == [13, 12]
    assert len(tree) == 1
    assert tree.pages == {11}


def test_evict_recent_use_protects_a_leaf():
    tree = filled()
    path = tree.match((*tokens(1, 2, 3), 0))
    tree.lock(path)
    tree.unlock(path)
    assert tree.evict(1) == [25]


def test_unlock_more_than_locked_raises():
    tree = filled()
    with pytest.raises(ValueError, match="unlocked more often"):
        tree.unlock(tree.match((*tokens(1), 0)))


def test_invalidate_changed_generation_forgets_the_page_and_all_below_it():
    tree = filled()
    assert sorted(tree.invalidate(lambda page: 2 if page == 12 else 1)) == [13, 25]
    assert tree.pages == {11}
    assert tree.evictable == 1


def test_random_operations_conserve_pages_and_agree_with_a_plain_dictionary():
    rng = random.Random(3)
    tree = PrefixTree(2)
    free = set(range(1, 60))
    locked: list[list] = []
    for _ in range(3000):
        prompt = tuple(rng.choice((1, 2)) for _ in range(rng.randrange(3, 14)))
        path = tree.match(prompt)
        if rng.random() < 0.5:
            tree.lock(path)
            locked.append(path)
        if locked and rng.random() < 0.6:
            tree.unlock(locked.pop(rng.randrange(len(locked))))
        count = len(prompt) // 2
        if len(free) >= count:
            mine = [(page, 1) for page in rng.sample(sorted(free), count)]
            taken = pages(tree.insert(prompt, mine))
            assert set(taken) <= {page for page, _ in mine}
            free -= set(taken)
        else:
            before = tree.evictable
            dropped = tree.evict(5)
            assert len(dropped) == min(5, before)
            free |= set(dropped)
        held = {node.page for path in locked for node in path}
        assert held <= tree.pages
        assert tree.pages.isdisjoint(free)
        assert len(tree.pages) + len(free) == 59
        assert tree.evictable == len(tree.pages - held)
