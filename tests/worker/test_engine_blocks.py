"""Page pool and prefix cache."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.blocks import NULL_PAGE, PagePool, page_hashes, root_hash


def chain(tokens: list[int], size: int, root: bytes = root_hash()) -> list[bytes]:
    return page_hashes(root, tokens, size)


def test_null_page_is_never_handed_out():
    pool = PagePool(8, 16)
    pages = pool.allocate(pool.capacity)
    assert pages is not None
    assert sorted(pages) == list(range(1, 8))
    assert NULL_PAGE not in pages
    assert pool.allocate(1) is None


def test_allocate_is_all_or_nothing():
    pool = PagePool(4, 16)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert len(pool.allocate(3) or []) == 3


def test_released_cached_pages_are_found_until_their_space_is_needed():
    pool = PagePool(4, 2)
    hashes = chain([1, 2, 3, 4], 2)
    pages = pool.allocate(2) or []
    for page, key in zip(pages, hashes):
        pool.publish(page, key)
    pool.release(pages)
    assert pool.num_free == 3
    assert pool.find(hashes) == pages
    assert pool.idle(pages) == 2
    # One empty page is left; the second allocation evicts the *later* page of the prefix first.
    pool.allocate(2)
    assert pool.find(hashes) == pages[:1]


def test_eviction_is_least_recently_used():
    pool = PagePool(4, 1)
    keys = chain([1], 1) + chain([2], 1) + chain([3], 1)
    pages = []
    for key in keys:
        page = (pool.allocate(1) or [])[0]
        pool.publish(page, key)
        pages.append(page)
    for page in pages:
        pool.release([page])
    pool.hold(pages[:1])  # used again: now the youngest
    pool.release(pages[:1])
    pool.allocate(1)
    assert [bool(pool.find([key])) for key in keys] == [True, False, True]


def test_equal_content_published_twice_keeps_the_first_page():
    pool = PagePool(4, 2)
    first, second = pool.allocate(2) or []
    key = chain([5, 6], 2)[0]
    pool.publish(first, key)
    pool.publish(second, key)
    assert pool.find([key]) == [first]
    pool.release([first, second])
    pool.check([])


def test_reset_forgets_content_and_keeps_held_pages():
    pool = PagePool(4, 2)
    held, loose = pool.allocate(2) or []
    pool.publish(held, chain([1, 2], 2)[0])
    pool.publish(loose, chain([3, 4], 2)[0])
    pool.release([loose])
    pool.reset_cache()
    assert pool.find(chain([1, 2], 2)) == []
    pool.check([[held]])
    pool.release([held])
    assert pool.num_free == pool.capacity


def test_double_release_is_an_error():
    pool = PagePool(4, 2)
    pages = pool.allocate(1) or []
    pool.release(pages)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(pages)


def test_check_finds_a_page_nobody_accounts_for():
    pool = PagePool(4, 2)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="no sequence accounts for"):
        pool.check([])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (root_hash("a"), root_hash("", "a")),  # a salt never meets an adapter
        (root_hash("ab", "c"), root_hash("a", "bc")),
        (root_hash(), root_hash("x")),
        (page_hashes(root_hash(), [1, 23], 2)[0], page_hashes(root_hash(), [12, 3], 2)[0]),
        (page_hashes(root_hash(), [1, 2], 2)[-1], page_hashes(root_hash(), [1, 2], 1)[-1]),
    ],
)
def test_hashes_of_different_things_differ(left: bytes, right: bytes):
    assert left != right
    assert len(left) == 32


def test_hashes_go_on_where_they_were_left_and_wait_for_full_pages():
    tokens = list(range(23))
    every = page_hashes(root_hash(), tokens, 4)
    assert len(set(every)) == 5
    assert every[:2] + page_hashes(every[1], tokens[8:], 4) == every
    assert page_hashes(root_hash(), tokens[:3], 4) == []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["take", "give", "find", "reset"]), st.integers(0, 7)), max_size=60)
)
def test_books_balance_after_any_history(history: list[tuple[str, int]]):
    pool = PagePool(9, 2)
    prompts = [chain([i % 3, i, i + 1, i], 2) for i in range(8)]
    held: list[list[int]] = []
    for action, i in history:
        if action == "take":
            pages = pool.allocate(1 + i % 3)
            if pages is not None:
                held.append(pages)
                for page, key in zip(pages, prompts[i]):
                    pool.publish(page, key)
        elif action == "give" and held:
            pool.release(held.pop(i % len(held)))
        elif action == "find":
            pages = pool.find(prompts[i])
            pool.hold(pages)
            held.append(pages)
        elif action == "reset":
            pool.reset_cache()
        pool.check(held)
    for pages in held:
        pool.release(pages)
    pool.check([])
    assert pool.num_free == pool.capacity
