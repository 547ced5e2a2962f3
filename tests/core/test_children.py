"""Tests of the sorted children of a tree node."""

from random import Random

from quire.core.cache import KVCacheBlock, SortedBlocks, pack_tokens


def block(*tokens: int) -> KVCacheBlock:
    made = KVCacheBlock(sum(tokens))
    made.tokens = pack_tokens(tokens)
    return made


def test_behaves_like_a_sorted_list_through_thousands_of_changes() -> None:
    random = Random(3)
    children: SortedBlocks[KVCacheBlock] = SortedBlocks()
    assert children.neighbours(b"abcd") == (None, None)
    assert children.get(b"abcd") is None
    model: dict[bytes, KVCacheBlock] = {}
    for _ in range(6_000):
        made = block(*random.choices(range(8), k=random.randint(1, 5)))
        if made.tokens in model and random.random() < 0.7:
            children.remove(model.pop(made.tokens))
        elif made.tokens not in model:
            children.add(made)
            model[made.tokens] = made
        else:
            children.replace(model[made.tokens], made)
            model[made.tokens] = made
        wanted = pack_tokens(random.choices(range(8), k=3))
        before, after = children.neighbours(wanted)
        assert before is max((b for t, b in model.items() if t < wanted), key=lambda b: b.tokens, default=None)
        assert after is min((b for t, b in model.items() if t >= wanted), key=lambda b: b.tokens, default=None)
        assert children.get(wanted) is model.get(wanted)
        assert bool(children) == bool(model)
    assert [b.tokens for b in children] == sorted(model)
    assert len(model) > 600  # several buckets
