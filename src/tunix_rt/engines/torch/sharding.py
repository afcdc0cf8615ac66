"""A model sharded over ranks by FSDP2: every rank has the same rows of each parameter, gradient and optimizer state.

Gradients are summed over ranks, never averaged: the loss of a rank is divided by the target tokens of the whole step. One rank
is no special case here, it has no `Sharding` at all.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from tunix_rt.errors import ConfigError
from tunix_rt.ranks import Part, World, part_of

T = TypeVar("T")

REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether FSDP2 sums a gradient that some ranks do not have, of an expert that none of their tokens chose: since torch 2.13."""


class Sharding:
    """The parameters of a model as this rank has them, and the sums over ranks that a step needs."""

    def __init__(
        self, model: Any, layers: list[torch.nn.Module], *, world: World, device: torch.device, replicas: int
    ) -> None:
        """Shards `model` in place: each of `layers` is gathered by itself, and everything else, the embeddings first of all,
        with the whole model. The state has as many `replicas`, each over as many ranks. A model on the meta device has
        memory for its shards afterwards, and no values."""
        if not REDUCES_UNUSED and any(".experts." in name for name, _ in model.named_parameters()):
            raise ConfigError(
                f"torch {torch.__version__} cannot sum the gradients of experts over ranks",
                fix="install torch 2.13 or newer",
            )
        self.world, self.replicas = world, replicas
        self.mesh = _mesh(world, device, replicas)
        self.group = self.mesh.get_group("shard")
        self.shards, self.shard = self.group.size(), self.group.rank()
        self._model = model
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32) if _has_bfloat16(model) else MixedPrecisionPolicy()
        for module in (*layers, model):
            fully_shard(module, mesh=self.mesh, mp_policy=policy)
        if any(one.is_meta for one in model.parameters()):
            model.to_empty(device=device)
        for module in self._modules:  # the setters do not reach the modules below
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if REDUCES_UNUSED:
                module.set_reduce_scatter_unused_params(True)
        self._sharded = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self.weights = {name: torch.nn.Parameter(one.to_local().detach()) for name, one in self._sharded.items()}
        """The trained parameters of this rank, in the memory that FSDP2 gathers from."""
        model.compute_on_ranks = lambda compute, *arguments: compute(*arguments)
        register_fsdp_forward_method(model, "compute_on_ranks")

    @property
    def _modules(self) -> list[FSDPModule]:
        return [module for module in self._model.modules() if isinstance(module, FSDPModule)]

    def part(self, name: str) -> Part:
        """The rows of trained parameter `name` that this rank has."""
        return part_of(tuple(self._sharded[name].shape), self.shard, self.shards)

    def part_of(self, tensor: torch.Tensor) -> Part:
        """The rows of a parameter or buffer of the model that this rank has: of a buffer all."""
        shape = tuple(tensor.shape)
        return part_of(shape, self.shard, self.shards) if isinstance(tensor, DTensor) else Part.whole(shape)

    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set trained parameters to their rows of whole tensors."""
        for name, whole in values.items():
            part, weight = self.part(name), self.weights[name].detach()
            weight.copy_(whole[part.first : part.first + part.rows])

    # --- a step

    def through_root(self, compute: Callable[..., T], *arguments: Any) -> T:
        """`compute(*arguments)` with the embeddings gathered, as in the forward pass of the whole model. Every rank calls it
        as often, with rows or without."""
        found: T = self._model.compute_on_ranks(compute, *arguments)
        return found

    def take_gradients(self) -> None:
        """Hand the summed gradients over to `weights`; zeros where no rank has one."""
        for name, weight in self.weights.items():
            gradient = self._sharded[name].grad
            weight.grad = torch.zeros_like(weight) if gradient is None else gradient.to_local()

    def clear_gradients(self) -> None:
        for name, weight in self.weights.items():
            weight.grad = self._sharded[name].grad = None

    def updated_in_backward(self, update: Callable[[torch.nn.Parameter], None]) -> Any:
        """Handles of hooks that call `update` with each weight once its gradient is summed over ranks."""

        def hook(weight: torch.nn.Parameter, sharded: Any) -> None:
            weight.grad, sharded.grad = sharded.grad.to_local(), None
            update(weight)

        return [
            one.register_post_accumulate_grad_hook(lambda sharded, weight=self.weights[name]: hook(weight, sharded))
            for name, one in self._sharded.items()
        ]

    # --- over ranks

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of `tensor` over the shards of a replica, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def total_of_world(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of `tensor` over all ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def gathered(self, local: torch.Tensor, part: Part) -> torch.Tensor | None:
        """The whole tensor in the memory of rank 0; None elsewhere. Every rank calls it, in the same order."""
        if part.everywhere:
            return local.detach().cpu() if self.world.is_lead else None
        each = part_of(part.shape, 0, self.shards).rows
        padded = local.new_zeros((each, *part.shape[1:]))
        padded[: len(local)] = local.detach()
        places = [torch.empty_like(padded) for _ in range(self.shards)] if self.shard == 0 else None
        dist.gather(padded, places, group=self.group, group_dst=0)
        # Every replica gathers: a rank that joins fewer collectives than the others counts as one that hangs.
        return torch.cat(places)[: part.shape[0]].cpu() if places is not None and self.world.is_lead else None

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[None]:
        """Every rank has the whole model within the block, and computes with it by itself."""
        layers = [module for module in self._modules if module is not self._model]
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in self._modules:
                module.reshard()
            for module in layers:
                module.set_reshard_after_forward(True, recurse=False)

    def reshard(self) -> None:
        """Drop the gathered embeddings after a forward pass without a backward pass: the weights may change next."""
        for module in self._modules:
            module.reshard()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a parameter or buffer."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _mesh(world: World, device: torch.device, replicas: int) -> DeviceMesh:
    if world.size % replicas:
        raise ConfigError(
            f"training.data_replicas: {replicas} does not divide the {world.size} ranks",
            fix="set it to a divisor of their number, or leave it out",
        )
    if replicas == 1:
        return init_device_mesh(device.type, (world.size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (replicas, world.size // replicas), mesh_dim_names=("replica", "shard"))


def _has_bfloat16(model: Any) -> bool:
    """Whether gradients are bfloat16: their sum over ranks is then taken in float32 and rounded once."""
    return any(one.dtype == torch.bfloat16 for one in model.parameters() if one.requires_grad)
