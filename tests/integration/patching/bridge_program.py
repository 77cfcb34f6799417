"""Two meshes of one rank each exchange a tensor through the bridge, forward and backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator


def grid(offset: int) -> HyperCommGrid:
    dimensions = ["tp", "cp", "pp", "dp"]
    rank_grid = HyperCommGrid([1, 1, 1, 1], dimensions, rank_offset=offset, backend="gloo")
    for dimension in dimensions:
        rank_grid.create_pg([dimension])
    return rank_grid


def main() -> None:
    dist.init_process_group("gloo")
    bridge = BridgeCommunicator(
        grid(0),
        grid(1),
        dim_mapping={"b": 0, "s": 1, "h": 2},
        comm_dtype=torch.float32,
        src_module_name="first",
        dest_module_name="second",
    )
    sent = torch.arange(6.0).reshape(1, 2, 3)
    if dist.get_rank() == 0:
        bridge.send_forward(sent)
        assert torch.equal(bridge.recv_backward(), 2 * sent)
    else:
        received = bridge.recv_forward()
        assert torch.equal(received, sent)
        bridge.send_backward(2 * received)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
