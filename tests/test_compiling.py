"""compile_forward: which products become one op, and that they give what they gave."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from pageforge import compiling
from pageforge.compiling import compile_forward
from pageforge.ops.products import MOST_ROWS, products


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    """Compiled code is not found again by another test, for which it was not made."""
    torch.compiler.reset()
    with config.patch(force_disable_caches=True):
        yield


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of each graph that is compiled, how many products each op has."""
    found: list[list[int]] = []

    class Seen(compiling.SideBySide):
        def __call__(self, graph: fx.Graph) -> None:
            super().__call__(graph)
            ops = graph.find_nodes(op="call_function", target=products)
            found.append([len(node.args[1]) for node in ops])

    monkeypatch.setattr(compiling, "SIDE_BY_SIDE", Seen())
    return found


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are changed as if a GPU were there."""
    monkeypatch.setattr(compiling, "_is_on_cuda", lambda output: True)


def weights(*sizes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) / 4 for size in sizes]


def layer(states: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, up: Tensor) -> Tensor:
    """Of [B, S, 16]: three products of one input, two of others, one of a weight that is made."""
    linear = torch.nn.functional.linear
    query, key, value = (linear(states, weight) for weight in (q, k, v))
    mixed = linear(torch.relu(query * key) + value, o)
    return linear(mixed, up) + linear(states, q * 2)


@pytest.mark.usefixtures("as_on_cuda")
def test_products_of_one_input_become_one_op(seen: list[list[int]]) -> None:
    matrices = weights((16, 16), (16, 16), (16, 16), (16, 16), (16, 16))
    forward = compile_forward(layer)
    for length in (5, 9, 2):  # the second compiles for any length
        states = weights((length, 16))[0].expand(2, length, 16).contiguous()
        torch.testing.assert_close(forward(states, *matrices), layer(states, *matrices))
    assert seen == [[3], [3]]


@pytest.mark.usefixtures("as_on_cuda")
def test_several_inputs_have_an_op_each(seen: list[list[int]]) -> None:
    first, second = weights((3, 8), (5, 8))
    matrices = weights((4, 8), (6, 8), (2, 8))

    def step(*args: Tensor) -> list[Tensor]:
        first, second, *matrices = args
        return [of @ matrix.t() for of in (first, second) for matrix in matrices]

    got = compile_forward(step, dynamic=False)(first, second, *matrices)
    for one, other in zip(got, step(first, second, *matrices), strict=True):
        torch.testing.assert_close(one, other)
    assert seen == [[3, 3]]


@pytest.mark.usefixtures("as_on_cuda")
def test_what_is_not_small_is_left_alone(
    seen: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two weights of 256 bytes, and one of more; then as many rows as are many."""
    monkeypatch.setattr(compiling, "MOST_BYTES", 256)
    step = compile_forward(lambda input, *of: [input @ each.t() for each in of], dynamic=False)
    matrices = weights((8, 8), (4, 8), (9, 8))
    for rows in (MOST_ROWS, MOST_ROWS + 1):
        (input,) = weights((rows, 8))
        for one, other in zip(step(input, *matrices), matrices, strict=True):
            torch.testing.assert_close(one, input @ other.t())
    assert seen == [[2], []]


@pytest.mark.usefixtures("as_on_cuda")
def test_biases_are_left_alone(seen: list[list[int]]) -> None:
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    with torch.no_grad():
        compile_forward(lambda input: (first(input), second(input)))(torch.ones(3, 8))
    assert seen == [[]]


@pytest.mark.usefixtures("as_on_cuda")
def test_what_is_compiled_is_found_again(seen: list[list[int]]) -> None:
    matrices = weights((16, 16), (16, 16), (16, 16), (16, 16), (16, 16))
    for _ in range(3):
        compile_forward(layer)(weights((5, 16))[0][None], *matrices)
    assert seen == [[3]]


def test_other_devices_are_left_alone(seen: list[list[int]]) -> None:
    matrices = weights((16, 16), (16, 16), (16, 16), (16, 16), (16, 16))
    compile_forward(layer)(weights((5, 16))[0][None], *matrices)
    assert seen == [[]]


@pytest.mark.usefixtures("as_on_cuda")
def test_somebody_elses_pass_stays(seen: list[list[int]]) -> None:
    class Theirs(CustomGraphPass):
        times = 0

        def __call__(self, graph: fx.Graph) -> None:
            Theirs.times += 1

        def uuid(self) -> str:
            return "theirs"

    matrices = weights((16, 16), (16, 16), (16, 16), (16, 16), (16, 16))
    with config.patch(post_grad_custom_post_pass=Theirs()):
        compile_forward(layer)(weights((5, 16))[0][None], *matrices)
    assert Theirs.times == 1
    assert seen == []


def test_the_op_is_plain_products() -> None:
    input, *matrices = weights((3, 8), (4, 8), (6, 8))
    got = products(input, matrices)
    for one, matrix in zip(got, matrices, strict=True):
        assert torch.equal(one, input @ matrix.t())
    torch.library.opcheck(products, (input, matrices))
