"""Mixture of experts in training: group the tokens by expert on the GPU.

Problem    Run the forward and backward pass of a bf16 block like the blocks of DeepSeek-V2
           (arXiv:2405.04434). The block has attention with keys and values from a latent of width /
           4, one shared expert, and `experts` routed experts. Each token uses 4 routed experts,
           weighted by a softmax over the router's 4 largest scores. Rotary positions are left out.
           The check compares the gradients of the input and of all weights. The router's weights
           make the score of an expert close to one coordinate of the token. In each token, 4 of
           these coordinates are raised. So all sides and the reference choose the same experts
           despite rounding.
Baseline   looped: for each expert, find and gather its tokens, compute, and add to the output.
Optimized  sliced: changes `looped`. The tokens are sorted by expert once. Each expert processes its
           slice, and one gather puts the results back in order. The host reads the lengths of all
           slices at once, so it waits for the GPU only once.
           grouped: changes `sliced`. `grouped_mm` processes all experts and reads the ends of the
           slices on the GPU. There are two matrix products in total, not two per expert.
Bound      Kernel launches by the host. `sliced` makes fewer launches per expert than `looped`. For
           `grouped`, the number of launches does not depend on the number of experts. The matrix
           products take a small part of the time.
Seen       All sides take longer than predicted from their launches and waits. `grouped` has the
           largest gap. The predicted time of a launch was measured with an in-place addition. We
           did not measure the host time that autograd and the allocator add to each operation, so
           we cannot explain the difference.
Use when   A layer has many experts, and each expert gets few tokens. With larger widths, the GPU
           has more work per launch. If the GPU takes longer than the host, the number of launches
           does not matter for `sliced` and `grouped`. `looped` still waits for the GPU once per
           expert.
"""

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare

HEAD, CHOSEN = 128, 4


def state(device, batch, tokens, width, experts, hidden):
    def weight(*shape):
        return (torch.randn(shape, device=device) / shape[-2] ** 0.5).bfloat16()

    router = torch.eye(width, experts, device=device) + weight(width, experts) / 10
    return torch.nn.ParameterDict(
        {
            "query": weight(width, width),
            "to_latent": weight(width, width // 4),
            "from_latent": weight(width // 4, 2 * width),
            "out": weight(width, width) / 4,
            "router": router.bfloat16(),
            "shared_up": weight(width, 2 * hidden),
            "shared_down": weight(hidden, width),
            "up": weight(experts, width, 2 * hidden),
            "down": weight(experts, hidden, width),
        }
    )


def inputs(device, batch, tokens, width, experts, hidden):
    x, gradient = torch.randn(2, batch, tokens, width, device=device)
    x[..., :experts] /= 4
    raised = torch.rand(batch, tokens, experts, device=device).topk(CHOSEN).indices
    x.scatter_add_(2, raised, x.new_full(raised.shape, 4.0))
    return x.bfloat16(), gradient.bfloat16()


def norm(x):
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def attention(weights, x):
    heads = (x @ weights["query"]).unflatten(-1, (-1, HEAD)).transpose(1, 2)
    both = norm(x @ weights["to_latent"]) @ weights["from_latent"]
    keys, values = both.unflatten(-1, (2, -1, HEAD)).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(heads, keys, values, is_causal=True)
    return mixed.transpose(1, 2).flatten(2) @ weights["out"]


def gated(pair):
    gate, up = pair.chunk(2, dim=-1)
    return F.silu(gate) * up


def step(weights, x, gradient, routed):
    """Return the block's output and all gradients. `routed` computes the routed experts' part."""
    x = x.detach().requires_grad_()
    h = x + attention(weights, norm(x))
    tokens = norm(h).flatten(0, 1)
    scores, chosen = (tokens @ weights["router"]).float().topk(CHOSEN)
    shares = scores.softmax(dim=-1).to(tokens.dtype)
    shared = gated(tokens @ weights["shared_up"]) @ weights["shared_down"]
    out = h + (shared + routed(weights, tokens, chosen, shares)).view_as(h)
    out.backward(gradient)
    return out.detach(), x.grad, taken(weights)


def taken(weights):
    """Return the weights' gradients by name, and reset each `.grad` to None."""
    gradients = {name: weight.grad for name, weight in weights.items()}
    for weight in weights.values():
        weight.grad = None
    return gradients


def reference(weights, x, gradient):
    """Apply every expert to every token. Experts that were not chosen get a weight of 0."""
    weights.double()
    x = x.double().requires_grad_()
    inner, heads = norm(x), x.shape[-1] // HEAD
    keys, values = (norm(inner @ weights["to_latent"]) @ weights["from_latent"]).chunk(2, dim=-1)
    query, keys, values = (
        t.unflatten(-1, (heads, HEAD)) for t in (inner @ weights["query"], keys, values)
    )
    scores = torch.einsum("bqhd,bkhd->bhqk", query, keys) / HEAD**0.5
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    mixed = torch.einsum(
        "bhqk,bkhd->bqhd", scores.masked_fill(future, -torch.inf).softmax(-1), values
    )
    h = x + mixed.flatten(2) @ weights["out"]
    inner = norm(h)
    scores = inner @ weights["router"]
    least = scores.topk(CHOSEN).values[..., -1:]
    shares = scores.masked_fill(scores < least, -torch.inf).softmax(-1)
    up = torch.einsum("btw,ewf->ebtf", inner, weights["up"])
    routed = torch.einsum("ebtf,efw,bte->btw", gated(up), weights["down"], shares)
    out = h + gated(inner @ weights["shared_up"]) @ weights["shared_down"] + routed
    out.backward(gradient.double())
    return out.detach(), x.grad, taken(weights)


def over_experts(weights, tokens, chosen, shares):
    out = torch.zeros_like(tokens)
    both = zip(weights["up"].unbind(), weights["down"].unbind(), strict=True)
    for expert, (up, down) in enumerate(both):
        row, place = (chosen == expert).nonzero(as_tuple=True)
        result = gated(tokens[row] @ up) @ down
        out.index_add_(0, row, result * shares[row, place, None])
    return out


def looped(weights, x, gradient):
    return step(weights, x, gradient, over_experts)


def by_expert(tokens, chosen, shares, compute):
    """Return the weighted expert results of each token. `compute` takes tokens sorted by expert."""
    order = chosen.flatten().argsort()
    results = compute(tokens[order // CHOSEN])
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return (results[back].unflatten(0, chosen.shape) * shares[..., None]).sum(dim=1)


def chosen_by(weights, chosen):
    """Return a tensor of the number of tokens per expert. `bincount` would wait for the GPU."""
    numbers = torch.arange(len(weights["up"]), device=chosen.device)
    return (chosen.flatten() == numbers[:, None]).sum(dim=1)


def over_slices(weights, tokens, chosen, shares):
    counts = chosen_by(weights, chosen).tolist()

    def compute(ordered):
        parts = zip(
            ordered.split(counts), weights["up"].unbind(), weights["down"].unbind(), strict=True
        )
        return torch.cat([gated(part @ up) @ down for part, up, down in parts])

    return by_expert(tokens, chosen, shares, compute)


def sliced(weights, x, gradient):
    return step(weights, x, gradient, over_slices)


def over_groups(weights, tokens, chosen, shares):
    ends = chosen_by(weights, chosen).cumsum(0).int()

    def compute(ordered):
        return F.grouped_mm(
            gated(F.grouped_mm(ordered, weights["up"], offs=ends)), weights["down"], offs=ends
        )

    return by_expert(tokens, chosen, shares, compute)


def grouped(weights, x, gradient):
    return step(weights, x, gradient, over_groups)


def amounts(batch, tokens, width, experts, hidden):
    """Return two counts of weights: the weights that one token is multiplied with, and all weights.

    The first count includes causal attention, as if other tokens were weights.
    """
    dense = 2 * width**2 + width**2 // 4 + width**2 // 2
    products = dense + tokens * width + (1 + CHOSEN) * 3 * width * hidden
    return products, dense + (1 + experts) * 3 * width * hidden


def work(batch, tokens, width, experts, hidden):
    rows = batch * tokens
    products, held = amounts(batch, tokens, width, experts, hidden)
    return Work(
        read=2 * (held + 2 * rows * width),
        write=2 * (held + 2 * rows * width),
        flops={"bf16": 6 * rows * products},
        roundings=24,  # a chain of 16 results forward, and 8 back to the router
    )


def block(launches, host_steps, of_expert=None, syncs=0):
    """Return a function that takes the size and returns the cost of a step.

    Args:
        launches, host_steps: counts that do not depend on the number of experts.
        of_expert: the host's cost for each expert.
        syncs: number of waits for the GPU, not counting those for each expert.
    """

    def cost(batch, tokens, width, experts, hidden):
        rows = batch * tokens
        products, held = amounts(batch, tokens, width, experts, hidden)
        computed = Cost(
            read=2 * (2 * held + 2 * rows * width),  # weights are read in both passes
            write=2 * (held + 2 * rows * width),
            ops={"bf16": 6 * rows * products},
        )
        host = Cost(launches=launches, host_steps=host_steps, syncs=syncs)
        return computed + host + experts * (of_expert or Cost())

    return cost


# Counted with a TorchDispatchMode. Views count as host steps. `nonzero` counts as 6 launches. The
# backward pass of indexing counts as 7 to 10, because it sorts the indices.
looped_cost = block(60, 75, Cost(launches=46, host_steps=9, syncs=1))
sliced_cost = block(96, 86, Cost(launches=12, host_steps=6), syncs=1)
grouped_cost = block(112, 88)


@compare(
    baseline=looped,
    optimized=[
        Variant(sliced, at_least={"sm90": 1.7}),
        Variant(grouped, at_least={"sm90": 5.0}),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"batch": 4, "tokens": 512, "width": 1024, "experts": 32, "hidden": 512}],
    check_sizes=[
        {"batch": 3, "tokens": 9, "width": 128, "experts": 6, "hidden": 24},
        {"batch": 1, "tokens": 3, "width": 128, "experts": 20, "hidden": 8},  # idle experts
    ],
    work=work,
    bound="launch",
    costs={looped: looped_cost, sliced: sliced_cost, grouped: grouped_cost},
)
def test_moe_step(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
