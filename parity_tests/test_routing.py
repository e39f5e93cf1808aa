"""Selection, groups and roles: the same on both sides, and what the rules say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

import jax_impl
import torch_impl
from parity_tests.backends.jax_backend import JaxBackend
from parity_tests.backends.torch_backend import TorchBackend
from parity_tests.cases import CASES
from parity_tests.tolerances import TIERS

LR = 0.1


class Transformer(nn.Module):
    """Embedding, attention, a subclassed linear layer, a convolution, raw matrices, experts, an untied head."""

    class Projection(nn.Linear):
        pass

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.attn = nn.MultiheadAttention(4, 2)
        self.up = self.Projection(4, 8)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.table = nn.Parameter(torch.zeros(4, 4))
        self.experts_up = nn.Parameter(torch.zeros(2, 4, 8))
        self.lm_head = nn.Linear(4, 5, bias=False)


def torch_roles(model, **kwargs):
    table = torch_impl.route_parameters(model, "muonwithauxadamw", lr=LR, fused=True, **kwargs)
    return {route.name: route.role for route in table}


def jax_roles(params, **kwargs):
    table = jax_impl.route_parameters(params, "muonwithauxadamw", lr=LR, **kwargs)
    return {route.name: route.role for route in table}


def test_torch_roles_by_module_type():
    matrices = {"attn.out_proj.weight", "up.weight"}
    roles = torch_roles(Transformer())
    assert {name for name, role in roles.items() if role == "matrix"} == matrices
    assert {role for name, role in roles.items() if name not in matrices} == {"adamw"}
    assert len(roles) == len(list(Transformer().parameters()))


@pytest.mark.parametrize(
    ("kwargs", "name", "role"),
    [
        ({"expert_param_keywords": ["experts"]}, "experts_up", "expert"),
        ({"expert_param_keywords": ["table"]}, "table", "adamw"),  # two dimensions make no stack
        ({"expert_param_keywords": ["conv"]}, "conv.weight", "adamw"),  # a convolution is not raw
        ({"adamw_module_keywords": ["up"]}, "up.weight", "adamw"),
        ({"adamw_module_keywords": ["up"]}, "lm_head.weight", "matrix"),  # custom keywords replace the defaults
        ({"adamw_module_keywords": ["weight"]}, "up.weight", "matrix"),  # keywords look at the module's name
        ({"orthogonalize_skip_patterns": [r"^up\."]}, "up.weight", "adamw"),
        ({"orthogonalize_skip_patterns": [r"up\.w.*t$"]}, "attn.out_proj.weight", "matrix"),
        ({"keys_to_select": ["up"]}, "norm.weight", "frozen"),
    ],
)
def test_torch_options(kwargs, name, role):
    assert torch_roles(Transformer(), **kwargs)[name] == role


@pytest.mark.parametrize("head_first", [True, False])
@pytest.mark.parametrize("head", ["lm_head", "decoder"])
def test_tied_heads_are_found_by_identity(head_first, head):
    """Whatever the order and the name: the tensor counts once and goes to AdamW."""
    model = nn.Module()
    parts = {"embed": nn.Embedding(4, 2), head: nn.Linear(2, 4, bias=False), "fc": nn.Linear(2, 2, bias=False)}
    for name in sorted(parts, key=lambda n: (n != head) == head_first):
        model.add_module(name, parts[name])
    model.get_submodule(head).weight = model.embed.weight
    roles = torch_roles(model)
    assert len(roles) == 2
    assert roles["fc.weight"] == "matrix"
    assert sorted(roles.values()) == ["adamw", "matrix"]


def test_only_net_is_optimized():
    model = nn.ModuleDict({"net": nn.Linear(2, 2), "net_ema": nn.Linear(2, 2)})
    optimizer = torch_impl.build_optimizer(model, "adamw", lr=LR, fused=True, keys_to_select=["weight"])
    assert [route.name for route in optimizer.describe()] == ["weight", "bias"]
    assert [p.requires_grad for p in model["net"].parameters()] == [True, False]
    assert all(p.requires_grad for p in model["net_ema"].parameters())
    assert all(".net." in key for key in optimizer.state_dict() if not key.startswith("config"))


FLAX = {
    "embed": {"embedding": jnp.zeros((5, 4))},
    "up": {"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros(8)},
    "norm": {"scale": jnp.zeros(4), "bias": jnp.zeros(4)},
    "attn": {"query": {"kernel": jnp.zeros((4, 2, 2))}},
    "experts_up": jnp.zeros((2, 4, 8)),
    "lm_head": {"kernel": jnp.zeros((4, 5))},
    "other": {"weight": jnp.zeros((3, 4))},
    "embed_positions": {"weight": jnp.zeros((3, 4))},
}


def test_jax_rule_by_name():
    roles = jax_roles(FLAX)
    assert {name for name, role in roles.items() if role == "matrix"} == {"up.kernel", "other.weight"}
    assert set(roles.values()) == {"matrix", "adamw"}
    routes = {route.name: route for route in jax_impl.route_parameters(FLAX, "muonwithauxadamw", lr=LR)}
    assert routes["up.kernel"].matrix_axes == jax_impl.MatrixAxes(fan_out=1, fan_in=0)
    assert routes["other.weight"].matrix_axes == jax_impl.MatrixAxes(fan_out=0, fan_in=1)
    assert routes["up.kernel"].adjusted_lr == pytest.approx(LR * 0.2 * 8**0.5)


@pytest.mark.parametrize(
    ("kwargs", "name", "role"),
    [
        ({"expert_param_keywords": ["experts"]}, "experts_up", "expert"),
        ({"expert_param_keywords": ["up.kernel"]}, "up.kernel", "matrix"),  # two dimensions make no stack
        ({"adamw_module_keywords": ["up"]}, "up.kernel", "adamw"),
        ({"adamw_module_keywords": ["up"]}, "lm_head.kernel", "matrix"),
        ({"adamw_module_keywords": ["kernel"]}, "up.kernel", "matrix"),
        ({"orthogonalize_skip_patterns": [r"^up\."]}, "up.kernel", "adamw"),
        ({"keys_to_select": ["up"]}, "norm.scale", "frozen"),
        ({"matrix_axes": lambda name, leaf: None}, "up.kernel", "adamw"),
        ({"matrix_axes": {**dict.fromkeys(FLAX), "embed": jax_impl.MatrixAxes(1, 0)}}, "embed.embedding", "matrix"),
        (
            {"matrix_axes": lambda name, leaf: jax_impl.MatrixAxes((1, 2), 0) if name == "attn.query.kernel" else None},
            "attn.query.kernel",
            "matrix",
        ),
    ],
)
def test_jax_options(kwargs, name, role):
    assert jax_roles(FLAX, **kwargs)[name] == role


def test_jax_declared_layers_do_not_count_as_dimensions():
    """A stack of two layers' kernels is one matrix a layer: the no-decay rule counts two dimensions, not three."""
    params = {"layers": {"kernel": jnp.ones((2, 3, 4))}}
    axes = {"layers": {"kernel": jax_impl.MatrixAxes(fan_out=2, fan_in=1, batch=0)}}
    (route,) = jax_impl.route_parameters(
        params, "muonwithauxadamw", lr=LR, matrix_axes=axes, disable_weight_decay_for_1d_params=True
    )
    assert (route.role, route.weight_decay) == ("matrix", 0.1)
    assert route.adjusted_lr == pytest.approx(LR * 0.2 * 4**0.5)


def test_jax_stacked_vectors_are_vectors():
    """The scales of two layers (2, 3): AdamW's, and without decay where vectors have none."""
    params = {
        "layers": {"kernel": jnp.ones((2, 3, 4)), "scale": jnp.ones((2, 3))},
        "head": {"kernel": jnp.ones((3, 4))},
    }
    axes = {
        "layers": {
            "kernel": jax_impl.MatrixAxes(fan_out=2, fan_in=1, batch=0),
            "scale": jax_impl.MatrixAxes(fan_out=1, fan_in=(), batch=0),
        },
        "head": None,
    }
    options = dict(lr=LR, matrix_axes=axes, weight_decay=0.1, disable_weight_decay_for_1d_params=True)
    roles = {r.name: (r.role, r.weight_decay) for r in jax_impl.route_parameters(params, "muonwithauxadamw", **options)}
    assert roles == {
        "layers.kernel": ("matrix", 0.1),
        "layers.scale": ("adamw", 0.0),
        "head.kernel": ("adamw", 0.1),
    }
    table = jax_impl.route_parameters(params, "adamw", **options)
    assert [route.weight_decay for route in table] == [0.1, 0.1, 0.0]


def test_jax_takes_shapes_for_parameters():
    shapes = jax.eval_shape(lambda: FLAX)
    assert jax_roles(shapes) == jax_roles(FLAX)


def group_table(routes):
    return [(route.group, route.lr, route.weight_decay) for route in routes]


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        # (group, lr, decay) of weight and bias of the modules enc, enc_q, out
        (
            {"lr_multipliers": {"enc": 0.1, "enc_q": 1.0}},  # the broad key comes first and wins
            [(0, 0.01, 0.5), (0, 0.01, 0.5), (0, 0.01, 0.5), (0, 0.01, 0.5), (1, 0.1, 0.5), (1, 0.1, 0.5)],
        ),
        (
            {"lr_multipliers": {"enc_q": 3.0, "enc": 0.0}, "disable_weight_decay_for_1d_params": True},
            [(1, 0.0, 0.5), (0, 0.0, 0.0), (5, 0.3, 0.5), (4, 0.3, 0.0), (3, 0.1, 0.5), (2, 0.1, 0.0)],
        ),
    ],
)
def test_groups(kwargs, expected):
    model = nn.ModuleDict({name: nn.Linear(2, 3) for name in ("enc", "enc_q", "out")})
    params = {name: {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)} for name in ("enc", "enc_q", "out")}
    torch_table = torch_impl.route_parameters(model, "adamw", lr=LR, fused=True, weight_decay=0.5, **kwargs)
    jax_table = jax_impl.route_parameters(params, "adamw", lr=LR, weight_decay=0.5, **kwargs)
    approximately = [(g, pytest.approx(lr), wd) for g, lr, wd in expected]
    assert group_table(torch_table) == approximately
    by_name = {route.name.replace("kernel", "weight"): route for route in jax_table}
    assert group_table([by_name[route.name] for route in torch_table]) == approximately
    groups = torch_impl.build_optimizer(model, "adamw", lr=LR, fused=True, weight_decay=0.5, **kwargs).optimizers[0]
    assert [g["lr"] for g in groups.param_groups] == sorted(g["lr"] for g in groups.param_groups)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_both_sides_route_every_case_alike(case):
    """Every trainable parameter in exactly one group, with the role and the numbers of the oracle."""
    from parity_tests.backends.reference_backend import ReferenceBackend

    precision = TIERS["float64"].precision
    oracle = ReferenceBackend().start(case, precision)
    torch_run, jax_run = TorchBackend().start(case, precision), JaxBackend().start(case, precision)
    routes = {route.name: route for route in torch_run.optimizers.describe()}
    assert set(routes) == {p.name for p in case.problem.parameters}
    for name, route in routes.items():
        label = jax_run.labels.get(name, "frozen")
        if name not in oracle.roles:
            assert (route.role, label) == ("frozen", "frozen")
            continue
        assert route.role == oracle.roles[name]
        assert label == f"{route.group}.{route.role}"
        assert route.weight_decay == oracle.decay(name)


def test_tables_print():
    table = torch_impl.route_parameters(
        Transformer(), "muonwithauxadamw", lr=LR, fused=True, keys_to_select=["up", "norm"]
    )
    lines = str(table).splitlines()
    assert lines[0].split() == [
        "name",
        "shape",
        "role",
        "group",
        "lr",
        "decay",
        "out",
        "x",
        "in",
        "axes",
        "adjusted",
        "lr",
    ]
    (up,) = [line for line in lines if line.startswith("up.weight")]
    assert up.split() == ["up.weight", "8x4", "matrix", "0", "0.1", "0.1", "0", "x", "1", "0.0565685"]
    (frozen,) = [line for line in lines if line.startswith("embed.weight")]
    assert frozen.split() == ["embed.weight", "5x4", "frozen", "-", "-", "-", "-", "-"]
    text = jax_impl.describe({"up": {"kernel": jnp.zeros((4, 8))}}, "muonwithauxadamw", lr=LR)
    assert text.splitlines()[1].split() == ["up.kernel", "4x8", "matrix", "0", "0.1", "0.1", "1", "x", "0", "0.0565685"]


def test_torch_splits_elementwise_optimizers_by_mesh():
    """A stand-in for sharded parameters: what counts is the names of the mesh's dimensions."""

    class Mesh:
        def __init__(self, *names):
            self.mesh_dim_names = names

    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("a", "b", "c", "d")})
    model["a"].weight.device_mesh = Mesh("dp", "tp")
    model["b"].weight.device_mesh = Mesh("dp")
    model["c"].weight.device_mesh = Mesh("dp", "tp")
    optimizer = torch_impl.build_optimizer(model, "adamw", lr=LR, fused=True, lr_multipliers={"b": 2.0})
    assert [[p.shape for g in o.param_groups for p in g["params"]] for o in optimizer] == [
        [(2, 2)] * 2,
        [(2, 2)],
        [(2, 2)],
    ]
    assert all(group["params"] for o in optimizer for group in o.param_groups)
    kwargs = dict(warm_up_steps=0, total_steps=4, decay_steps=4, f_start=0.0, f_max=1.0, f_min=0.0)
    scheduler = torch_impl.build_lr_scheduler(optimizer, "wsd", decay_type="linear", **kwargs)
    assert len(scheduler) == len(optimizer) == 3
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.075, 0.075, 0.15])
    assert scheduler.state_dict()["schedulers"][2]["last_epoch"] == 1
