"""A backward pass in two halves (B and W of Qi et al. 2024, "Zero bubble pipeline parallelism").

The first half computes the gradient of the inputs, which the previous segment waits for; the second
half computes the gradients of the weights. Autograd's own nodes compute both from their saved
tensors, so the result has the bits of a single backward pass.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


class SplitBackward:
    """Compute the gradient of ``inputs`` now and the gradients of the weights in ``accumulate``.

    Nodes on the path from ``hidden`` to ``inputs`` from which a path to a weight branches off keep
    the gradient that reached them. A weight reached from several of these nodes gets its gradient
    immediately, because no single node holds it.
    """

    def __init__(self, hidden: Tensor, gradient: Tensor, inputs: Tensor) -> None:
        ways = _ways(hidden, inputs)
        counts = Counter(leaf for leaves in ways.values() for leaf in leaves)
        shared = {k: w for leaves in ways.values() for k, w in leaves.items() if counts[k] > 1}
        own = {n: [w for k, w in leaves.items() if counts[k] == 1] for n, leaves in ways.items()}
        self._weights = {node: weights for node, weights in own.items() if weights}
        self._got: dict[Node, tuple[Tensor | None, ...]] = {}
        with ExitStack() as stack:
            for node in self._weights:
                hook = partial(self._got.__setitem__, node)
                stack.callback(node.register_prehook(hook).remove)
            torch.autograd.backward(
                hidden, gradient, retain_graph=True, inputs=[inputs, *shared.values()]
            )

    def accumulate(self) -> None:
        """Add the second half to the gradients of the weights."""
        for node, got in self._got.items():
            given = [
                (GradientEdge(node, k), each) for k, each in enumerate(got) if each is not None
            ]
            if given:
                edges, gradients = zip(*given, strict=True)
                torch.autograd.backward(edges, gradients, inputs=self._weights[node])

    @property
    def kept(self) -> list[Tensor]:
        """The gradients kept for ``accumulate``."""
        return [each for got in self._got.values() for each in got if each is not None]


def _ways(hidden: Tensor, inputs: Tensor) -> dict[Node, dict[Node, Tensor]]:
    """Map each node between ``hidden`` and ``inputs`` to the leaves that branch off at it."""
    nodes = _reached([hidden.grad_fn], _onward)
    back = defaultdict[Node, list[Node]](list)
    for node in nodes:
        for child in _onward(node):
            back[child].append(node)
    ends = [node for node in nodes if getattr(node, "variable", None) is inputs]
    between = _reached(ends, back.__getitem__)
    ways = {}
    for node in between:
        beside = _reached((each for each in _onward(node) if each not in between), _onward)
        ways[node] = {leaf: leaf.variable for leaf in beside if hasattr(leaf, "variable")}
    return ways


def _onward(node: Node) -> list[Node]:
    """Return the nodes that receive gradients from ``node``."""
    return [child for child, _ in node.next_functions if child is not None]


def _reached(
    starts: Iterable[Node | None], onward: Callable[[Node], Iterable[Node]]
) -> dict[Node, None]:
    """Return ``starts`` and all nodes reachable from them, as an ordered set."""
    reached: dict[Node, None] = {}
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in reached:
            reached[node] = None
            waiting += onward(node)
    return reached
