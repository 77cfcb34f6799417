// all_reduce of sparse tensors on the CPU, as gloo does it: every rank gathers the indices and
// values of all ranks, and sums the values with the same index in the order of ranks. Ranks may
// have different numbers of entries, or none.
#include <array>

#include "backend.h"

namespace fsccl {
namespace {

constexpr size_t kMaxSparseDims = 12;

// Description of a rank's sparse tensor, exchanged before its indices and values. All fields but
// `entries` must be equal on all ranks.
struct SparseMetadata {
  int64_t entries = 0, sparse_dims = 0, dense_dims = 0, type = 0;
  std::array<int64_t, kMaxSparseDims> sizes{};

  explicit SparseMetadata(const at::Tensor& t)
      : entries(t._nnz()),
        sparse_dims(t.sparse_dim()),
        dense_dims(t.dense_dim()),
        type(static_cast<int64_t>(t.scalar_type())) {
    for (int64_t i = 0; i < t.dim(); ++i) sizes[static_cast<size_t>(i)] = t.size(i);
  }
  bool matches(const SparseMetadata& o) const {
    return sparse_dims == o.sparse_dims && dense_dims == o.dense_dims && type == o.type &&
           sizes == o.sizes;
  }
};

std::vector<SparseMetadata> exchange_metadata(Group& g, const SparseMetadata& own_metadata,
                                              const Deadline& d) {
  std::vector<SparseMetadata> all_metadata(static_cast<size_t>(g.size()), own_metadata);
  BufferLists outputs;
  for (SparseMetadata& metadata : all_metadata) outputs.emplace_back(&metadata, sizeof metadata);
  g.all_gather(BufferList(&own_metadata, sizeof own_metadata), outputs, d);
  for (int r = 1; r < g.size(); ++r) {
    if (all_metadata[static_cast<size_t>(r)].matches(all_metadata[0])) continue;
    throw Error(Fault::kMismatch, r,
                "all_reduce: " + g.name(r) + " has a sparse tensor of other sizes, dimensions or " +
                    "type than " + g.name(0));
  }
  return all_metadata;
}

// Returns the parts of all ranks, concatenated along the dimension in which their sizes differ.
at::Tensor gather_along(Group& g, const at::Tensor& part, int64_t dim,
                        const std::vector<SparseMetadata>& metadata, const Deadline& d) {
  std::vector<at::Tensor> parts;
  BufferLists outputs;
  for (const SparseMetadata& rank_metadata : metadata) {
    std::vector<int64_t> sizes = part.sizes().vec();
    sizes[static_cast<size_t>(dim)] = rank_metadata.entries;
    parts.push_back(at::empty(sizes, part.options()));
    outputs.push_back(buffers_of(parts.back()));
  }
  g.all_gather(buffers_of(part), outputs, d, element_size_of(part));
  return at::cat(parts, dim);
}

}  // namespace

WorkPtr TorchBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& o) {
  const at::Tensor& t = tensors[0];
  TORCH_CHECK_TYPE(t.is_cpu() && t.layout() == at::kSparse,
                   "fsccl: all_reduce takes dense tensors, and sparse ones (COO) on the CPU, got ",
                   t.layout(), " on ", t.device());
  TORCH_CHECK_VALUE(o.reduceOp.op_ == c10d::ReduceOp::SUM,
                    "fsccl: all_reduce of sparse tensors supports only SUM");
  TORCH_CHECK_VALUE(t.dim() <= static_cast<int64_t>(kMaxSparseDims),
                    "fsccl: all_reduce of a sparse ", "tensor of ", digits(t.dim()),
                    " dimensions: expected at most ", digits(kMaxSparseDims));
  const at::Tensor input = t.detach().coalesce();
  return queue_.run(
      {c10d::OpType::ALLREDUCE, "fsccl:all_reduce", o.asyncOp, o.timeout, tensors}, tensors,
      [t, input](Group& g, const Deadline& d) {
        const at::NoGradGuard no_grad;
        const auto metadata = exchange_metadata(g, SparseMetadata(input), d);
        const at::Tensor indices = gather_along(g, input.indices().contiguous(), 1, metadata, d);
        const at::Tensor values = gather_along(g, input.values().contiguous(), 0, metadata, d);
        t.copy_(at::_sparse_coo_tensor_unsafe(indices, values, t.sizes(), t.options()).coalesce());
      });
}

}  // namespace fsccl
