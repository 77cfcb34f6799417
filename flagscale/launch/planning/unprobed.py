"""What a host's script finds out by itself where nobody asked the host before: in a dry run, and
in a run without a preflight, which then needs one command a host and no more. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flagscale.launch.planning.model import HostPlan, LaunchPlan

_MACHINE = """\
# Nobody asked this host what it is like, so it looks. `experiment.envs` wins.
cores=$(nproc)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}"
if [[ -e /proc/driver/nvidia/gpus ]] || command -v nvidia-smi >/dev/null; then
    # No NVLink multicast: it is not safe on hosts that are shared with others.
    export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
    export TORCH_SYMM_MEM_DISABLE_MULTICAST="${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}"
else
    export TORCHDYNAMO_DISABLE="${TORCHDYNAMO_DISABLE:-1}"
fi"""

_NETWORK = """\
# The interface that reaches the other hosts. The master's own name may mean a loopback address.
address=
read -r address _ < <(getent ahosts "$master") || true
if [[ $address == 127.* || $address == ::1 ]]; then
    read -r _ _ address _ <<<"${SSH_CONNECTION:-}"
fi
interface=
route=$(ip -o route get "$address" 2>/dev/null || true)
if [[ $route =~ \\ dev\\ ([^ ]+) ]]; then interface=${BASH_REMATCH[1]}; fi
if [[ $interface == lo ]]; then
    read -r _ interface _ < <(ip -o addr show to "$address") || true
fi
interface=${interface%%@*}
if [[ -n $interface ]]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$interface}"
    export FSCCL_SOCKET_IFNAME="${FSCCL_SOCKET_IFNAME:-=$interface}"
fi"""


def text(plan: LaunchPlan, host: HostPlan) -> str:
    """Commands that a host's script runs last before the job; none where the host was asked."""
    if not host.unprobed:
        return ""
    parts = [f"processes={host.nproc}", _MACHINE]
    if len(plan.hosts) > 1:
        parts += [f"master={shlex.quote(plan.master_addr)}", _NETWORK]
    return "\n".join(parts)
