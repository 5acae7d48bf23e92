"""torch.compile for what is captured: products of one input become one op, `ops/products.py`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from pageforge.ops import products as op

aten = torch.ops.aten

MOST_BYTES = 64 << 20
"""Reading a weight of more takes the whole device, with one row already."""


def compile_forward(
    forward: Callable[..., Any], *, dynamic: bool | None = None
) -> Callable[..., Any]:
    """`torch.compile(forward)`, with small products of one input side by side on a CUDA device.

    Where inductor's config has such a pass of somebody else's by now, theirs runs and this one does
    not.
    """
    options: dict[str, Any] = {}
    if config.post_grad_custom_post_pass is None:
        options["post_grad_custom_post_pass"] = SIDE_BY_SIDE
    return torch.compile(forward, dynamic=dynamic, options=options)


class SideBySide(CustomGraphPass):
    """Makes one op of all products of an input with weights that the graph is given.

    They are few rows, or how many is not known yet, and neither biases nor large weights.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Change `graph`, of aten ops, in place."""
        of_input: dict[Hashable, list[fx.Node]] = {}
        for node in graph.find_nodes(op="call_function", target=aten.mm.default):
            if _is_small(node):
                of_input.setdefault(_input_of(node), []).append(node)
        for nodes in of_input.values():
            if len(nodes) > 1:
                _join(graph, nodes)

    def uuid(self) -> Any:
        """By what compiled code is found again that was made with this pass."""
        return get_hash_for_files((__file__, op.__file__))


SIDE_BY_SIDE = SideBySide()
"""One for all: with another one torch would compile anew what it has compiled."""


def _is_small(product: fx.Node) -> bool:
    output, weight = product.meta.get("val"), _weight_of(product)
    if output is None or weight is None or not _is_on_cuda(output):
        return False
    rows = output.shape[0]
    is_few = not isinstance(rows, int) or rows <= op.MOST_ROWS
    return is_few and bool(weight.meta["val"].nbytes <= MOST_BYTES)


def _is_on_cuda(output: torch.Tensor) -> bool:
    return output.is_cuda


def _input_of(product: fx.Node) -> Hashable:
    """What tells the inputs of products apart: each has a view `[M, K]` of its own."""
    input: Any = product.args[0]
    if input.target in (aten.reshape.default, aten.view.default):
        of, size = input.args
        return of, tuple(size)
    return input


def _weight_of(product: fx.Node) -> fx.Node | None:
    """The weight `[N, K]` of `input @ weight.T`; None where it is computed in the graph itself."""
    transposed = product.args[1]
    if not isinstance(transposed, fx.Node) or transposed.target is not aten.permute.default:
        return None
    weight, dims = transposed.args
    if isinstance(weight, fx.Node) and weight.op == "placeholder" and dims == [1, 0]:
        return weight
    return None


def _join(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    with graph.inserting_before(nodes[0]):
        weights = [_weight_of(node) for node in nodes]
        joined = graph.call_function(op.products, (nodes[0].args[0], weights))
        joined.meta["val"] = [node.meta["val"] for node in nodes]
        for place, node in enumerate(nodes):
            output = graph.call_function(operator.getitem, (joined, place))
            output.meta.update(node.meta)
            node.replace_all_uses_with(output)
    for node in nodes:
        graph.erase_node(node)
