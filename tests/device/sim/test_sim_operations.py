"""Operations on the simulated device against the same ones on the CPU, bit for bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nestpipe.device import sim

Make = Callable[..., torch.Tensor]


def _floats(on: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(on)


def _ints(on: str, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(sum(shape))).to(on)


def _grads(on: str, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    (out * _floats(on, *out.shape)).sum().backward()
    return [out, *(leaf.grad for leaf in leaves)]


def _loss(x: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(x, torch.ones_like(x) / 3)


def _optimized(on: str, kind: Any, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 1)).to(on)
    optimizer = kind(net.parameters(), lr=0.05, **options)
    for _ in range(3):
        optimizer.zero_grad()
        _loss(net(_floats(on, 6, 4))).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def _in_place(on: str) -> list[torch.Tensor]:
    x = torch.zeros(5, 3, device=on)
    x[1:3] = 2.0
    x[:, 1].add_(_floats(on, 5))
    x.index_copy_(0, _ints(on, 5, 2), _floats(on, 2, 3))
    x.index_add_(0, _ints(on, 5, 7), _floats(on, 7, 3))
    x.scatter_(1, _ints(on, 3, 5, 1), 7.0)
    x.scatter_add_(0, _ints(on, 5, 4, 3), _floats(on, 4, 3))
    x[_ints(on, 5, 2)] = -1.0
    x.masked_fill_(x > 1, 0.5)
    return [x, x.new_zeros(3), x.new_full((2,), 3), torch.empty_like(x).zero_().copy_(x), x.t().contiguous()]


def _made(on: str) -> list[torch.Tensor]:
    return [
        torch.zeros(3, device=on),
        torch.ones(2, 2, device=on),
        torch.full((3,), 7, device=on),
        torch.arange(5, device=on),
        torch.arange(1, 9, 2, device=on, dtype=torch.float32),
        torch.linspace(0, 1, 5, device=on),
        torch.eye(3, device=on),
        torch.tensor([[1, 2], [3, 4]], device=on),
        torch.tensor(2.5, device=on),
        torch.as_tensor([True, False], device=on),
        torch.zeros(0, 4, device=on),
        torch.triu(torch.ones(3, 3, device=on)),
    ]


def _sorted(on: str) -> list[torch.Tensor]:
    x = _ints(on, 4, 30)
    values, order = torch.sort(x, stable=True)
    return [values, order, x.cumsum(0), x.argmax(), *torch.topk(x.float() + torch.arange(30, device=on) / 64, 3)]


def _shaped(on: str) -> list[torch.Tensor]:
    x = _floats(on, 6, 4)
    a, b = x.split([2, 4])
    return [
        torch.stack([x, x]),
        torch.cat([a, b, a]),
        *x.chunk(3, 1),
        *x.unbind(0),
        x.double().float(),
        x.bfloat16(),
        x.long(),
        x.view(-1)[3:9],
        x.expand(2, 6, 4),
        x.flip(0),
        x.permute(1, 0).reshape(3, 8),
    ]


def _counted(on: str) -> list[torch.Tensor]:
    lengths = torch.tensor([2, 0, 3, 1], device=on)
    x = _floats(on, 6, 2)
    return [
        torch.segment_reduce(x, "sum", lengths=lengths, axis=0),
        torch.repeat_interleave(lengths, output_size=6),
        torch.repeat_interleave(_floats(on, 4, 2), lengths, dim=0, output_size=6),
        torch.repeat_interleave(lengths),
        torch.searchsorted(lengths.cumsum(0), torch.arange(6, device=on), right=True),
        x.index_select(0, lengths),
        x[lengths],
        x[x[:, 0] > 0],
        torch.gather(x, 1, _ints(on, 2, 6, 2)),
        *torch.unique(lengths, return_inverse=True),
        torch.nonzero(lengths),
        torch.bincount(lengths, minlength=5),
        x.masked_select(x > 0),
    ]


def _reduced(on: str) -> list[torch.Tensor]:
    x = _floats(on, 6, 4)
    norms = torch._foreach_norm([x, x * 2])
    return [x.sum(), x.mean(1), x.logsumexp(1), x.square().sum(0), x.amax(0), x.norm(), x.var(1), *norms, x.any()]


class _Rows(torch.autograd.Function):
    """Adds rows into a tensor that is written in place; the gradient of the rows is gathered."""

    @staticmethod
    def forward(ctx: Any, into: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.mark_dirty(into)
        return into.index_add_(0, index, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return grad, None, grad.index_select(0, index)


def _recorded(on: str) -> list[torch.Tensor]:
    """Hooks, in-place writes to views, functions of one's own, recomputation, gradients of gradients."""
    seen: list[torch.Tensor] = []
    w = _floats(on, 4, 4).requires_grad_()
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    y = w * 2
    y.register_hook(lambda grad: grad * 0.5)
    y[1:3] = w[:2].exp()
    y = _Rows.apply(y.clone(), _ints(on, 4, 6), torch.cat([w, w[:2]]))
    y = checkpoint(lambda x: F.dropout(x @ w, 0.0).tanh(), y, use_reentrant=False)
    y.sum().backward()
    (first,) = torch.autograd.grad((w**3).sum(), w, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), w)
    flat = torch._utils._flatten_dense_tensors([w.detach(), first.detach()])
    return [*seen, w.grad, second, flat, nn.utils.parameters_to_vector([w])]


CASES: dict[str, Callable[[str], list[torch.Tensor]]] = {
    "in place": _in_place,
    "made": _made,
    "sorted": _sorted,
    "shaped": _shaped,
    "counted": _counted,
    "reduced": _reduced,
    "recorded": _recorded,
    "embedding": lambda on: _grads(on, lambda w: F.embedding(_ints(on, 9, 4, 3), w), _floats(on, 9, 5)),
    "indexing": lambda on: _grads(on, lambda w: w[_ints(on, 9, 12)], _floats(on, 9, 5)),
    "segments": lambda on: _grads(
        on,
        lambda w: torch.segment_reduce(w, "sum", lengths=torch.tensor([2, 3, 0, 4], device=on), axis=0),
        _floats(on, 9, 5),
    ),
    "bce": lambda on: _grads(on, _loss, _floats(on, 9, 1)),
    "softmax": lambda on: _grads(on, lambda x: x.softmax(-1).log_softmax(0), _floats(on, 5, 5)),
    "attention": lambda on: _grads(on, lambda q: F.silu(torch.einsum("bid,bjd->bij", q, q)) @ q, _floats(on, 2, 5, 4)),
    "layer norm": lambda on: _grads(
        on, lambda x, w, b: F.layer_norm(x, (4,), w, b), _floats(on, 5, 4), _floats(on, 4), _floats(on, 4)
    ),
    "half": lambda on: _grads(on, lambda x: (x.bfloat16() @ x.bfloat16().t()).float(), _floats(on, 5, 4)),
    "sgd": lambda on: _optimized(on, torch.optim.SGD, momentum=0.9),
    "sgd foreach": lambda on: _optimized(on, torch.optim.SGD, momentum=0.9, foreach=True),
    "adam": lambda on: _optimized(on, torch.optim.Adam),
    "adam foreach": lambda on: _optimized(on, torch.optim.Adam, foreach=True),
    "adamw": lambda on: _optimized(on, torch.optim.AdamW, foreach=True),
    "adagrad": lambda on: _optimized(on, torch.optim.Adagrad),
    "adagrad foreach": lambda on: _optimized(on, torch.optim.Adagrad, foreach=True),
}


@pytest.mark.parametrize("name", CASES)
def test_operations_give_the_bits_of_the_cpu(device: Any, name: str) -> None:
    """Promise: an operation gives the same bits, shapes and types on the simulated device and on the CPU."""
    for here, there in zip(CASES[name]("cpu"), CASES[name]("sim"), strict=True):
        assert there.device.type == "sim"
        assert there.dtype == here.dtype and there.shape == here.shape
        assert torch.equal(there.detach().cpu(), here.detach()), name


def test_module_to_keeps_parameters_and_their_optimizer(device: Any) -> None:
    """Promise: `model.to("sim")` moves parameters in place, as on CUDA."""
    net = nn.Linear(3, 2)
    weight = net.weight
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    net.to("sim")
    assert net.weight is weight and isinstance(weight, nn.Parameter) and weight.device.type == "sim"
    before = weight.detach().cpu()
    net(torch.ones(1, 3, device="sim")).sum().backward()
    optimizer.step()
    assert torch.equal(weight.detach().cpu(), before - 0.5)


def test_models_can_be_copied_pickled_and_printed(device: Any) -> None:
    """Promise: deepcopy makes memory of its own, pickles go through the host, tensors print."""
    net = nn.Linear(3, 2).to("sim")
    twin = copy.deepcopy(net)
    back = pickle.loads(pickle.dumps(net))
    with torch.no_grad():
        net.weight.zero_()
    assert twin.weight.abs().sum().item() > 0 and isinstance(twin.weight, nn.Parameter)
    assert torch.equal(back.weight.cpu(), twin.weight.cpu()) and isinstance(back.weight, nn.Parameter)
    assert "sim" in repr(net.weight) and f"{net.weight.sum():.1f}" == "0.0"
    restored = nn.Linear(3, 2).to("sim")
    restored.load_state_dict({name: value.cpu() for name, value in twin.state_dict().items()})
    assert torch.equal(restored.weight.cpu(), twin.weight.cpu())


def test_dropout_follows_the_order_of_issue(device: Any) -> None:
    """Promise: random numbers depend on the seed and on what this thread issued before, not on when it runs."""
    seen = []
    for order, seed in (("late", 0), ("eager", 0), ("random", 1), ("random", 2)):
        sim.configure(order=order, seed=seed)
        torch.manual_seed(7)
        other = device.Stream()
        x = torch.ones(400, device="sim")
        a = F.dropout(x, 0.25)
        other.wait_stream(device.current_stream())
        with device.stream(other):
            b = F.dropout(x, 0.25)
        state = device.get_rng_state()
        c = torch.rand(5, device="sim")
        device.set_rng_state(state)
        assert torch.equal(c.cpu(), torch.rand(5, device="sim").cpu())
        other.synchronize()
        seen.append((a.cpu(), b.cpu(), c.cpu()))
    assert all(torch.equal(x, y) for one in seen for x, y in zip(one, seen[0]))
    a, b, _ = seen[0]
    assert not torch.equal(a, b) and 60 < int((a == 0).sum()) < 140 and a.max().item() == pytest.approx(4 / 3)


def test_autocast_computes_products_in_bfloat16(device: Any) -> None:
    """Promise: `torch.autocast("sim")` casts what CUDA's does, and gradients of float32 weights stay float32."""
    results = []
    for on in ("cpu", "sim"):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)).to(on)
        with torch.autocast(on, dtype=torch.bfloat16):
            inner = net[0](_floats(on, 6, 4))
            out = net[2](net[1](inner))
            loss = _loss(out)
        assert inner.dtype == out.dtype == torch.bfloat16
        loss.backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())
        results.append([loss.detach().float().cpu(), *(p.grad.cpu() for p in net.parameters())])
    for here, there in zip(*results):
        torch.testing.assert_close(here, there, rtol=2e-2, atol=2e-3)


def test_evaluation_in_inference_mode(device: Any) -> None:
    """Promise: tensors made in inference mode and outside of it meet as on other devices."""
    net = nn.Linear(3, 2).to("sim")
    with torch.inference_mode():
        out = net(torch.ones(2, 3, device="sim"))
        out.add_(1)
        assert out.cpu().shape == (2, 2)
    want = net(torch.ones(2, 3, device="sim")) + 1
    assert torch.equal(out.cpu(), want.detach().cpu())


def test_mixing_host_and_device_is_refused(device: Any) -> None:
    """Promise: an operation on tensors of host and device says so at once; 0-dim host tensors pass."""
    x = torch.ones(3, device="sim")
    with pytest.raises(sim.DeviceMix, match=r"add.Tensor got tensors on sim:0 and on cpu .* move one"):
        x + torch.ones(3)
    with pytest.raises(sim.DeviceMix):
        nn.Linear(3, 2)(x)
    with pytest.raises(TypeError, match="cpu"):
        x.numpy()
    scalar = torch.tensor(2.0)
    y = x * scalar
    scalar.fill_(5.0)  # read at the launch
    assert y.tolist() == [2.0, 2.0, 2.0]


def test_data_of_a_parameter_can_be_replaced(device: Any) -> None:
    """Promise: `parameter.data = view` makes it share memory, as gradient buckets do."""
    net = nn.Linear(2, 2, bias=False).to("sim")
    flat = torch.arange(4.0, device="sim")
    net.weight.data = flat.view(2, 2)
    flat.add_(1)
    assert net.weight.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    net.weight.grad = torch.ones(2, 2, device="sim")
    net.zero_grad()
    assert net.weight.grad is None
