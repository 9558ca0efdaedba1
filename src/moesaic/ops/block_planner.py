"""Plans for torch's distributed checkpoint (DCP) that describe each rank's part of a DTensor by its exact blocks.

DCP itself takes a rank's part for one contiguous chunk. Where two axes shard one dim (``_StridedShard``) the rows of a
rank lie apart, and it would mix them up. Here every block is a chunk of its own; the files are DCP's as ever, and
DCP's own planners read them.
"""

from __future__ import annotations

import dataclasses
import io

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import (
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from moesaic.ops.placements import Block, local_blocks


class BlockSavePlanner(DefaultSavePlanner):
    """torch's own, with one write item per block of each DTensor. Replicas are still written once."""

    def create_local_plan(self) -> SavePlan:
        """What this rank could write; the coordinator then takes out what another writes."""
        whole = {name: value for name, value in self.state_dict.items() if not isinstance(value, DTensor)}
        plan = create_default_local_save_plan(whole, self.is_coordinator)
        items = [item for name, value in self.state_dict.items() for item in _write_items(name, value)]
        self.plan = dataclasses.replace(plan, items=[*plan.items, *items], planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The values of one item: a view of the rank's local tensor."""
        value = self.state_dict[write_item.index.fqn]
        return _local_view(value, write_item.index) if isinstance(value, DTensor) else super().resolve_data(write_item)


class BlockLoadPlanner(DefaultLoadPlanner):
    """torch's own, reading into each block of each DTensor what the saved chunks have of it."""

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads.

        Raises:
            ValueError: the checkpoint lacks a tensor, or has it in another shape.
        """
        assert self.metadata is not None, "DCP sets it before it asks for a plan"
        whole = {name: value for name, value in self.state_dict.items() if not isinstance(value, DTensor)}
        plan = create_default_local_load_plan(whole, self.metadata, strict=not self.allow_partial_load)
        items = list(plan.items)
        for name, value in self.state_dict.items():
            if not isinstance(value, DTensor):
                continue
            saved = self.metadata.state_dict_metadata.get(name)
            if not isinstance(saved, TensorStorageMetadata) or saved.size != value.size():
                held = (
                    f"has shape {tuple(saved.size)} there"
                    if isinstance(saved, TensorStorageMetadata)
                    else "isn't in it"
                )
                raise ValueError(
                    f"{name} {held}, and has shape {tuple(value.size())} here. "
                    "Go on with the model and the optimizer that it was saved with."
                )
            items += create_read_items_for_chunk_list(name, saved, [_chunk(block) for block in _blocks(value)])
        return dataclasses.replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Where the values of one item go: a view of the rank's local tensor."""
        value = self.state_dict[index.fqn]
        return _local_view(value, index) if isinstance(value, DTensor) else super().lookup_tensor(index)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of that view that one saved chunk fills."""
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))


def _blocks(tensor: DTensor) -> tuple[Block, ...]:
    return local_blocks(tensor.shape, tensor.device_mesh, tensor.placements)


def _chunk(block: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(block.global_offset), sizes=torch.Size(block.size))


@torch.no_grad()
def _write_items(name: str, value: object) -> list[WriteItem]:
    if not isinstance(value, DTensor):
        return []
    properties = TensorProperties.create_from_tensor(value.to_local())
    return [
        WriteItem(
            index=MetadataIndex(name, block.global_offset),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=_chunk(block), properties=properties, size=value.size()),
        )
        for block in _blocks(value)
    ]


@torch.no_grad()
def _local_view(tensor: DTensor, index: MetadataIndex) -> torch.Tensor:
    """The block that begins at the index's offset in the global tensor."""
    (block,) = (block for block in _blocks(tensor) if block.global_offset == index.offset)
    return tensor.to_local()[block.local_slices]
