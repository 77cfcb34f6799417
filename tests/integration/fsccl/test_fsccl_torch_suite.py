"""torch's own tests of backends, run on fsccl.

torch_suite.py runs the generic tests of ``torch.testing._internal.distributed.distributed_test`` on
four ranks. A selection always runs; FLAGSCALE_TORCH_SUITE=all runs every test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.torch]

SUITE = Path(__file__).with_name("torch_suite.py")
ROOT = SUITE.parents[3]

SELECTED_TESTS = """
    DistributedDataParallelCPU all_gather_coalesced_group all_gather_coalesced_with_empty
    all_gather_complex all_gather_group all_gather_object_subgroup all_reduce_coalesced_group_sum
    all_reduce_complex_unsupported_ops all_reduce_full_group_product all_reduce_group_max
    all_reduce_sum all_reduce_sum_async all_reduce_sum_complex all_to_all_complex all_to_all_group
    all_to_all_single_equal_split all_to_all_single_unequal_split_group barrier_group
    barrier_timeout_full_group
    batch_isend_irecv_gloo_tags broadcast_group destroy_group gather_group gather_object get_future
    grads_same_across_ranks_with_no_sync irecv isend new_subgroups_with_group_param
    reduce_group_product reduce_sum_twice scatter_group scatter_object_list send_recv_any_source
    send_recv_with_tag static_graph_api_cpu
"""

# All tests of the suite that do not pass, by the reason that makes them fail or be skipped.
NOT_PASSING = {
    "need CUDA devices, or call for NCCL by name": """
        1_level_hierarchical_model_averager_equivalent_to_periodic_model_averager
        3_level_hierarchical_model_averager DistributedDataParallel_SyncBatchNorm
        DistributedDataParallel_SyncBatchNorm_2D_Input
        DistributedDataParallel_SyncBatchNorm_Channels_Last
        DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value
        DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient
        DistributedDataParallel_SyncBatchNorm_No_Affine
        DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process
        DistributedDataParallel_SyncBatchNorm_half
        DistributedDataParallel_with_amp_and_grad_is_view DistributedSampler_padding
        all_gather_cuda all_gather_cuda_complex all_gather_into_cat_tensor_cuda
        all_gather_into_stack_tensor_cuda all_gather_v_cuda all_reduce_sum_cuda
        all_reduce_sum_cuda_async all_reduce_sum_cuda_complex all_to_all_cuda
        all_to_all_cuda_complex all_to_all_full_group_cuda all_to_all_group_cuda
        all_to_all_single_equal_split_cuda all_to_all_single_equal_split_cuda_complex
        all_to_all_single_equal_split_full_group_cuda all_to_all_single_equal_split_group_cuda
        all_to_all_single_unequal_split_cuda all_to_all_single_unequal_split_cuda_complex
        all_to_all_single_unequal_split_full_group_cuda
        all_to_all_single_unequal_split_group_cuda average_parameters barrier_cuda
        barrier_full_group_cuda barrier_group_cuda batch_isend_irecv_mixed_backend_err
        batch_isend_irecv_nccl batch_isend_irecv_no_rank_zero_nccl batch_isend_irecv_op_err
        batch_isend_irecv_op_list_err batch_isend_irecv_ring_exchange_nccl
        batch_isend_irecv_self_nccl broadcast_cuda coalescing_manager coalescing_manager_async
        ddp_apply_optim_in_backward ddp_apply_optim_in_backward_grad_as_bucket_view_false
        ddp_apply_optim_in_backward_ignored_params ddp_broadcast_buffer
        ddp_broadcast_buffer_via_hook ddp_broadcast_buffers_deprecation_warning
        ddp_bucket_cap_mb_list ddp_buffer_hook_allreduce ddp_buffer_hook_allreduce_return_future
        ddp_build_debug_param_to_name_mapping
        ddp_build_debug_param_to_name_mapping_requires_grad ddp_comm_hook_logging
        ddp_compile_static_graph ddp_control_flow_different_across_ranks
        ddp_control_flow_same_across_ranks ddp_device ddp_device_mesh_initialization
        ddp_forward_backward_hook ddp_grad_div_uneven_inputs ddp_hook_parity_allreduce
        ddp_hook_parity_allreduce_process_group ddp_hook_parity_post_localSGD
        ddp_hook_parity_powerSGD ddp_hook_pickling_powerSGD ddp_ignore_params_arg ddp_inference
        ddp_init_sync_buffers_with_forward_sync_buffers_false ddp_join_model_equivalence
        ddp_join_respects_forward_sync_buffers_false ddp_logging_data_gpu
        ddp_model_diff_num_params_across_ranks
        ddp_multiple_nested_unused_params_err_ignore_params
        ddp_multiple_nested_unused_params_error ddp_namedtuple
        ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none
        ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none
        ddp_native_mixed_precision_ignored_params
        ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none
        ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none ddp_new_tensor_in_fwd
        ddp_new_tensor_in_fwd_static_graph ddp_profiling_torch_profiler ddp_python_error_logged
        ddp_remove_autograd_hooks ddp_returns_tensor_with_no_grad
        ddp_shared_grad_acc_unused_params ddp_sink_noclone ddp_static_graph_nested_types
        ddp_sync_module_states ddp_uneven_input_exception ddp_uneven_input_join_disable
        ddp_uneven_inputs ddp_uneven_inputs_stop_iteration_sync_bn
        ddp_unused_params_rebuild_buckets_exception ddp_zero_output_features
        detect_ddp_is_actually_static different_graph_across_ranks gather_cuda
        get_data_parallel_params invalid_static_graph monitored_barrier_allreduce_hang
        monitored_barrier_allreduce_hang_wait_all_ranks nccl_backend_bool_allgather
        nccl_backend_bool_allreduce nccl_backend_bool_broadcast nccl_backend_bool_reduce
        nccl_high_priority_stream new_subgroups_by_enumeration_input_rank_exceeds_world_size
        new_subgroups_by_enumeration_negative_input_rank
        new_subgroups_group_size_exceeds_world_size new_subgroups_overlap_not_allowed
        new_subgroups_world_size_not_divisible_by_group_size output_unused_in_loss_dict_module
        output_unused_in_loss_tuple_module periodic_model_averager
        periodic_model_averager_param_group post_localSGD_optimizer_parity
        post_localSGD_optimizer_parity_grad_is_view
        post_localSGD_optimizer_parity_with_hierarchical_sgd
        post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view
        post_localSGD_optimizer_step_reload reduce_scatter_tensor_cuda reduce_scatter_v_cuda
        reduce_sum_cuda reduce_sum_cuda_twice scatter_cuda scatter_cuda_complex send_recv_nccl
        send_recv_nccl_autograd_profiler send_recv_nccl_torch_profiler
        skip_all_reduce_unused_parameters stateless_api_with_ddp static_graph_multi_forward
        sync_bn_logged undefined_grad_parity_unused_parameters
        verify_model_across_rank_with_logger verify_model_across_rank_without_logger
    """,
    "are skipped by torch on every backend, because they are known to fail": """
        DistributedDataParallel DistributedDataParallel_non_default_stream barrier_timeout_arg
        broadcast_object_list ddp_has_finalized ddp_model_diff_shape_across_ranks
        ddp_profiling_autograd_profiler ddp_profiling_execution_trace
        ddp_sync_bn_training_vs_eval new_subgroups new_subgroups_by_enumeration
    """,
    "need torchvision": """
        SyncBatchNorm_process_group
    """,
    "create their model for MPI, Gloo and NCCL only, by the backend's name": """
        accumulate_gradients_no_sync accumulate_gradients_no_sync_allreduce_hook
        accumulate_gradients_no_sync_allreduce_with_then_hook
        accumulate_gradients_no_sync_grad_is_view
    """,
    "need ranks that meet through a file": """
        barrier_timeout_global
    """,
    "call dist.monitored_barrier, for gloo only; test_fsccl_faults.py calls the group's": """
        monitored_barrier_failure_order monitored_barrier_gloo
        monitored_barrier_gloo_rank_0_timeout monitored_barrier_gloo_subgroup
        monitored_barrier_wait_all_ranks
    """,
    "reduce sparse tensors only for gloo or CUDA; test_fsccl_programs.py does so on CPUs": """
        compute_bucket_assignment_by_size_sparse_error_with_logger
        compute_bucket_assignment_by_size_sparse_error_without_logger sparse_all_reduce_sum
        sparse_all_reduce_sum_cuda
    """,
    "expects DDP's log to name the backend; torch writes 'custom' for every plug-in": """
        ddp_logging_data_cpu
    """,
}
NOT_PASSING_NAMES = {name for names in NOT_PASSING.values() for name in names.split()}


@pytest.fixture(scope="module")
def run(built_extension: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run the suite; return the outcome of each test, by its name without ``test_``."""
    pytest.importorskip("expecttest", reason="torch's tests import it")
    run_all = os.environ.get("FLAGSCALE_TORCH_SUITE") == "all"
    return run_suite([] if run_all else SELECTED_TESTS.split(), tmp_path_factory.mktemp("suite"))


def run_suite(names: Sequence[str], directory: Path) -> dict[str, str]:
    results_path, log = directory / "results.json", directory / "log"
    with log.open("wb") as output:
        process = subprocess.run(
            [sys.executable, str(SUITE), str(results_path), *(f"test_{name}" for name in names)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=directory,
            stdout=output,
            stderr=output,
            check=False,
        )
    assert process.returncode == 0, log.read_text(errors="replace")[-4000:]
    outcomes: dict[str, str] = json.loads(results_path.read_text())
    return {name.removeprefix("test_"): outcome for name, outcome in outcomes.items()}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SELECTED_TESTS.split())
def test_selected_test_of_torch_passes(name: str, run: dict[str, str]) -> None:
    assert run[name] == "passed"


@pytest.mark.skipif(
    os.environ.get("FLAGSCALE_TORCH_SUITE") != "all",
    reason="takes minutes: set FLAGSCALE_TORCH_SUITE=all",
)
def test_other_tests_pass_or_have_a_reason(run: dict[str, str]) -> None:
    unlisted = {
        n: outcome
        for n, outcome in run.items()
        if outcome != "passed" and n not in NOT_PASSING_NAMES
    }
    assert unlisted == {}
    assert [n for n, outcome in run.items() if outcome == "passed" and n in NOT_PASSING_NAMES] == []
