"""A server around the shared decoder: requests wait for a row of a batch, and tokens are streamed.

The server schedules requests like a real server, and runs a real decoder (`suites/decoder.py`). The
host's clock decides whether a request has arrived. After each call, the server copies the new
tokens to the host, because a real server sends them to users. Pages whose requests arrive over time
import this module:

    server = Server(model, slots=8)
    tokens, scores = serve(server, prompts, lengths, due=[0.0] * len(lengths))

The caller gives the length of each answer, so no page depends on when a model ends its answer.
"""

import copy
import math
import time

import torch
from torch.nn import functional as F

from pytest_aisp import capture
from suites.ch15.paged_cache_test import PAGE, PagedCache, row_attention
from suites.decoder import Cache, grouped_attention
from suites.serving import best


def lengths_of(requests, mean):
    """Return each answer's number of tokens: exponential quantiles in a mixed order."""
    golden = (math.sqrt(5) - 1) / 2  # its multiples spread the quantiles evenly
    quantiles = [(k * golden) % 1 for k in range(1, requests + 1)]
    return [1 + round(-(mean - 1) * math.log(1 - q)) for q in quantiles]


class Pages(PagedCache):
    """A paged KV cache for the rows of a server.

    A row without a request uses a page that is never read. Requests may share their first pages.

    Attributes:
        shared: the page numbers of the common prefix. Empty until a request has computed it.
        row: the row whose prompt is being computed.
    """

    # The plugin does not look for kernels in a class body, so `--aisp-compile` does not assemble
    # this kernel for the pages that import the server. Assembling it would take minutes, because
    # hundreds of steps would run on a fake GPU. `paged_cache_test.py` assembles the kernel.
    attention = staticmethod(row_attention)

    def __init__(self, config, slots, prefix, device):
        each = -(-config.length // PAGE)
        super().__init__(config, slots * each + prefix // PAGE + 1, slots, device)
        self.nobody, self.shared, self.prefix = self.free.pop(), [], prefix // PAGE
        shape = slots, each
        self.table = torch.full(shape, self.nobody, device=device, dtype=torch.int32)

    def rows(self, begin, end):
        """Return a view of the cache for the single row `begin`."""
        if end != begin + 1:
            raise ValueError(f"{end - begin} prompts in one call: pages take one at a time")
        part = copy.copy(self)
        part.row = begin
        return part

    def begin(self, row, tokens):
        """Give a row pages for `tokens` tokens. Return how many are already cached."""
        present = len(self.shared) * PAGE
        if not self.reserve(row, tokens - present):
            raise ValueError(f"no pages for {tokens} tokens")
        pages = self.shared + self.taken[row]
        pages += [self.nobody] * (self.table.shape[1] - len(pages))
        self.table[row] = torch.tensor(pages, dtype=torch.int32)
        return present

    def share(self, row):
        """Share a row's prefix pages with all later requests, if none are shared yet."""
        if self.prefix and not self.shared:
            own = self.taken[row]
            self.shared, self.taken[row] = own[: self.prefix], own[self.prefix :]

    def end(self, row):
        self.release(row)
        self.table[row] = self.nobody

    def forget(self):
        """Return the shared pages to the free list."""
        self.free += self.shared
        self.shared = []

    def plan(self, positions, n, device):
        if not isinstance(positions, int):
            return super().plan(positions, n, device)
        end = positions + n
        at = torch.arange(positions, end, device=device)
        page = self.table[self.row].index_select(0, at // PAGE).long()
        used = self.table[self.row, : -(-end // PAGE)].long()
        mask = Cache.mask(self, at[None], end) if positions else None
        return (page[None], (at % PAGE)[None]), used, end, mask

    def attend(self, layer, q, plan):
        if len(plan) == 2:
            return super().attend(layer, q, plan)
        _, used, end, mask = plan
        keys, values = (
            pool[layer][used].transpose(0, 1).flatten(1, 2)[None, :, :end]
            for pool in (self.keys, self.values)
        )
        if mask is None:
            return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        return grouped_attention(q, keys, values, mask)


class Server:
    """A batch of rows that are decoded together, and all tokens decoded so far.

    Attributes:
        graph: whether a step is a CUDA graph.
        found: a list with one entry per call: the tokens and scores of all rows.
        times: for each request, the times at which its tokens reached the host, in seconds.
    """

    def __init__(self, model, slots, cache=None, *, graph=False):
        device, config = model.embedding.device, model.config
        self.model, self.slots = model, slots
        self.cache = cache or Cache(config, slots, config.length, device)
        self.paged = isinstance(self.cache, Pages)
        self.tokens, self.positions = torch.zeros(2, slots, dtype=torch.int64, device=device)
        self.scores = torch.zeros(slots, dtype=torch.bfloat16, device=device)
        self.found, self.times = [], []
        self.advance = capture(self.all_rows) if graph else self.all_rows

    def all_rows(self):
        """Decode a token in all rows. Tokens of a row without a request are never read."""
        token, score = best(self.model.step(self.tokens, self.positions, self.cache))
        self.tokens.copy_(token)
        self.scores.copy_(score)
        self.positions.add_(1).clamp_(max=self.model.config.length - 1)

    def read(self, prompts, row, start=0, *, last=True):
        """Prefill prompts, or a chunk of one, from row `row` on. The last chunk gives a token."""
        rows = slice(row, row + len(prompts))
        states = self.model.states(prompts, start, self.cache.rows(rows.start, rows.stop))
        if last:
            self.tokens[rows], self.scores[rows] = best(self.model.logits(states[:, -1]))
            self.positions[rows] = start + prompts.shape[1]

    def stream(self, requests):
        """Copy the new tokens to the host, and record the request and the time of each token."""
        self.found.append((self.tokens.clone(), self.scores.clone()))
        self.found[-1][0].tolist()
        now = time.perf_counter()
        for row, request in requests.items():
            self.places[request].append((len(self.found) - 1, row))
            self.times[request].append(now)

    def answers(self):
        """Return the tokens and scores of all answers, in the order of the requests."""
        places = [place for one in self.places for place in one]
        call, row = torch.tensor(places, device=self.tokens.device).T
        return tuple(torch.stack(each)[call, row] for each in zip(*self.found, strict=True))


def serve(server, prompts, lengths, due, *, together=False, chunk=None):
    """Serve all requests. Each request arrives at its time in `due`.

    Args:
        lengths: the number of tokens in each answer. The prompt's logits give the first token. To
            cancel a request, `stream` sets its length to the number of tokens that it has received.
        due: the arrival time of each request, in seconds after the start, in rising order.
        together: whether requests start only when all rows are free.
        chunk: how many tokens of a prompt are computed between two steps; None for all.
    """
    waiting, free = list(reversed(range(len(lengths)))), list(reversed(range(server.slots)))
    running, reading = {}, None
    server.found, server.places = [], [[] for _ in lengths]
    server.times = [[] for _ in lengths]
    server.begun = time.perf_counter()
    if server.paged:
        server.cache.forget()

    def arrived():
        """Return whether the next request in line has arrived."""
        return bool(waiting) and due[waiting[-1]] <= time.perf_counter() - server.begun

    def streamed(requests):
        server.stream(requests)
        for row, request in requests.items():
            if len(server.places[request]) == lengths[request]:
                running.pop(row)
                free.append(row)
                if server.paged:
                    server.cache.end(row)

    while waiting or running or reading:
        if together:
            if not running and arrived():
                free.sort(reverse=True)
                first = waiting[-1]
                while free and arrived():
                    running[free.pop()] = waiting.pop()
                server.read(prompts[first : first + len(running)], 0)
                streamed(dict(running))
        elif chunk:
            if not reading and free and arrived():
                reading = free.pop(), waiting.pop(), 0
                # Until the prompt is done, steps write to the row's last position, which is not
                # read.
                server.positions[reading[0]] = server.model.config.length - 1
            if reading:
                row, request, start = reading
                part = prompts[request : request + 1, start : start + chunk]
                end = start + part.shape[1]
                done = end == prompts.shape[1]
                server.read(part, row, start, last=done)
                reading = None if done else (row, request, end)
                if done:
                    running[row] = request
                    streamed({row: request})
        else:
            while free and arrived():
                row, request = free.pop(), waiting.pop()
                start = 0
                if server.paged:
                    start = server.cache.begin(row, prompts.shape[1] + lengths[request])
                server.read(prompts[request : request + 1, start:], row, start)
                if server.paged:
                    server.cache.share(row)
                running[row] = request
                streamed({row: request})
        if running:
            server.advance()
            streamed(dict(running))
    return server.answers()


def counted(lengths, slots, *, together=False, parts=None):
    """Return the number of steps, and a list of the number of prompts in each prefill call.

    All requests are waiting at the start.

    Args:
        parts: the number of chunks per prompt; None if a prompt is computed at once.
    """
    waiting, left, reading, steps, calls = list(reversed(lengths)), [], 0, 0, []
    while waiting or left:
        if together:
            if not left:
                left = [waiting.pop() - 1 for _ in range(min(slots, len(waiting)))]
                calls.append(len(left))
        elif parts:
            if reading or (waiting and len(left) < slots):
                reading = (reading or parts) - 1
                if not reading:
                    left.append(waiting.pop() - 1)
                    calls.append(1)
        else:
            while waiting and len(left) < slots:
                if (length := waiting.pop() - 1) > 0:
                    left.append(length)
                calls.append(1)
        if left := [length for length in left if length > 0]:
            steps += 1
            left = [length - 1 for length in left if length > 1]
    return steps, calls
