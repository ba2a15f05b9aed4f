"""Inputs of captured steps are trees, of which only the tensors are copied."""

from typing import Any, NamedTuple

from anyformer.training.step_graphs import flatten


class Pair(NamedTuple):
    one: Any
    other: Any


def test_a_tree_is_rebuilt() -> None:
    tree = Pair({"a": 1, "b": [2, (3, None)]}, Pair((), "x"))
    leaves, rebuild = flatten(tree)
    assert leaves == [1, 2, 3, None, "x"]
    assert rebuild(leaves) == tree
    assert rebuild([0 if leaf == 1 else leaf for leaf in leaves]) == tree._replace(one={"a": 0, "b": [2, (3, None)]})
