"""A copy of a prefix tree, built only from the changes that the tree reports."""

from __future__ import annotations

from quire.core.cache import PrefixTree
from quire.core.events import Cleared, Published, Removed, TreeChange


class TreeCopy:
    """The content below the root of the empty salt. Refuses changes that a reader could not apply."""

    def __init__(self, tree: PrefixTree) -> None:
        self.root = tree.root("")
        self.content: dict[bytes, tuple[bytes, bytes]] = {}  # chain key -> parent key, tokens
        self.num_changes = {Published: 0, Removed: 0, Cleared: 0}
        tree.on_change = self.take

    def take(self, change: TreeChange) -> None:
        self.num_changes[type(change)] += 1
        match change:
            case Published(key, parent_key, tokens):
                assert key not in self.content, "published twice"
                assert parent_key == self.root or parent_key in self.content, "published before its parent"
                self.content[key] = parent_key, tokens
            case Removed(keys):
                for key in keys:
                    assert key in self.content, "removed, but not published"
                    assert all(parent != key for parent, _ in self.content.values()), "removed before its children"
                    del self.content[key]
            case Cleared():
                self.content.clear()


def public_content(tree: PrefixTree) -> dict[bytes, tuple[bytes, bytes]]:
    """The full blocks below the root of the empty salt, found by walking through the tree."""
    children = {parent: list(blocks) for parent, blocks in tree.positions()}
    found: dict[bytes, tuple[bytes, bytes]] = {}
    parents = [tree.root("")]
    while parents:
        parent = parents.pop()
        for block in children.get(parent, ()):
            if block.key is not None:
                found[block.key] = parent, block.tokens
                parents.append(block.key)
    return found
