"""What the pages of chapter 14 say about graphs, breaks and compilations, counted on a CPU.

Dynamo makes the same graphs on every device. A backend that only counts replaces Inductor.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BLOCKS = {"layers": 4, "rows": 5, "width": 16}
LENGTHS = {"lengths": 6, "tokens": 48, "width": 8}


class Counts:
    """Runs sides of pages, and counts their graphs.

    Attributes:
        products: how many matrix products each graph contains.
        calls: how often compiled graphs were called.
    """

    def __init__(self, monkeypatch):
        plain = torch.compile
        self.products, self.calls = [], 0

        def compile_(function, *, dynamic=None, fullgraph=False, mode=None):
            return plain(function, dynamic=dynamic, fullgraph=fullgraph, backend=self.backend)

        monkeypatch.setattr(torch, "compile", compile_)
        monkeypatch.syspath_prepend(str(ROOT))

    def backend(self, graph, examples):
        self.products.append(sum("matmul" in str(node.target) for node in graph.graph.nodes))

        def call(*arguments):
            self.calls += 1
            return graph.forward(*arguments)

        return call

    def page(self, name):
        return importlib.import_module(f"suites.ch14.{name}_test")

    def of(self, name, side, **size):
        """Return how many graphs are made for a side, whose later calls must make no more."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        page = self.page(name)
        given = [page.state("cpu", **size)] if hasattr(page, "state") else []
        given += page.inputs("cpu", **size)
        self.run(getattr(page, side), *given)
        made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert made == len(self.products)
        return made

    def run(self, side, *given):
        result = side(*given)
        if inspect.isgenerator(result):  # the yielded call is the timed part
            call, made = next(result), len(self.products)
            self.calls = 0
            call()
            assert len(self.products) == made


@pytest.fixture
def counts(monkeypatch):
    importlib.import_module("torch._dynamo")
    yield Counts(monkeypatch)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("block", "breaks"),
    [("block_if", ["if rms > limit:"]), ("block_cond", []), ("block_where", [])],
)
def test_only_the_if_breaks_the_graph(counts, block, breaks):
    function = getattr(counts.page("graph_breaks"), block)
    found = torch._dynamo.explain(function)(
        torch.randn(5, 16), torch.randn(16, 16), torch.zeros(())
    )
    assert [each.user_stack[-1].line for each in found.break_reasons] == breaks
    assert (found.graph_break_count, found.graph_count) == (len(breaks), len(breaks) + 1)


@pytest.mark.parametrize(
    ("side", "graphs", "products"),
    [
        ("broken", 2, [1, 0]),  # before the branch, and the scaling after it
        ("cond", 1, [1]),
        ("where", 1, [1]),
        ("whole", 1, [4]),
        ("eager", 0, []),
    ],
)
def test_graph_breaks(counts, side, graphs, products):
    assert counts.of("graph_breaks", side, **BLOCKS) == graphs
    assert counts.products == products


@pytest.mark.parametrize(
    ("side", "calls"), [("broken", 8), ("cond", 4), ("where", 4), ("whole", 1)]
)
def test_compiled_code_is_called_before_and_after_a_break(counts, side, calls):
    page = counts.page("graph_breaks")
    x, weights, _ = page.inputs("cpu", **BLOCKS)
    every_block_clips = [torch.full((), 1e-3) for _ in weights]
    torch._dynamo.reset()
    counts.run(getattr(page, side), x, weights, every_block_clips)
    assert counts.calls == calls


@pytest.mark.parametrize(
    ("side", "compilations"),
    [
        ("each_first", 6),
        ("automatic_first", 2),
        ("marked_first", 1),
        ("each", 6),
        ("marked", 1),
        ("eager", 0),
    ],
)
def test_dynamic_shapes(counts, side, compilations):
    assert counts.of("dynamic_shapes", side, **LENGTHS) == compilations


def test_dynamo_stops_at_its_limit_of_recompilations(counts):
    with torch._dynamo.config.patch(recompile_limit=3):
        assert counts.of("dynamic_shapes", "each", **LENGTHS) == 3
    assert counts.calls == 3  # the other lengths run eagerly


@pytest.mark.parametrize(("side", "products"), [("whole", [6]), ("regional", [2]), ("eager", [])])
def test_regional(counts, side, products):
    assert counts.of("regional", side, blocks=3, rows=4, width=8) == len(products)
    assert counts.products == products


@pytest.mark.parametrize(
    ("side", "products"),
    [
        ("eager", []),
        ("compiled", [4]),
        ("reduce_overhead", [4]),
        ("captured", [4]),
        ("eager_captured", []),
    ],
)
def test_reduce_overhead_compiles_the_whole_model_once(counts, side, products):
    assert counts.of("reduce_overhead", side, **BLOCKS) == len(products)
    assert counts.products == products
