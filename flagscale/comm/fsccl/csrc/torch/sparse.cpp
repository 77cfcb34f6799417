// Sums of sparse tensors, as gloo has them: everyone gets everyone's indices and values, and adds
// those of the same place in the order of ranks. Ranks may have different numbers of them, or none.
#include <array>

#include "backend.h"

namespace fsccl {
namespace {

constexpr size_t kMostDims = 12;

// What ranks tell of a sparse tensor before its parts: all but the number must be alike.
struct SparseHead {
  int64_t entries = 0, sparse_dims = 0, dense_dims = 0, type = 0;
  std::array<int64_t, kMostDims> sizes{};

  explicit SparseHead(const at::Tensor& t)
      : entries(t._nnz()),
        sparse_dims(t.sparse_dim()),
        dense_dims(t.dense_dim()),
        type(static_cast<int64_t>(t.scalar_type())) {
    for (int64_t i = 0; i < t.dim(); ++i) sizes[static_cast<size_t>(i)] = t.size(i);
  }
  bool like(const SparseHead& o) const {
    return sparse_dims == o.sparse_dims && dense_dims == o.dense_dims && type == o.type &&
           sizes == o.sizes;
  }
};

std::vector<SparseHead> exchange_heads(Group& g, const SparseHead& mine, const Deadline& d) {
  std::vector<SparseHead> all(static_cast<size_t>(g.size()), mine);
  BufferLists places;
  for (SparseHead& one : all) places.emplace_back(&one, sizeof one);
  g.all_gather(BufferList(&mine, sizeof mine), places, d);
  for (int r = 1; r < g.size(); ++r) {
    if (all[static_cast<size_t>(r)].like(all[0])) continue;
    throw Error(Fault::kMismatch, r,
                "all_reduce: " + g.name(r) + " has a sparse tensor of other sizes, dimensions or " +
                    "type than " + g.name(0));
  }
  return all;
}

// Everyone's part, which differs in its size along one dimension.
at::Tensor gather_along(Group& g, const at::Tensor& part, int64_t dim,
                        const std::vector<SparseHead>& heads, const Deadline& d) {
  std::vector<at::Tensor> parts;
  BufferLists places;
  for (const SparseHead& head : heads) {
    std::vector<int64_t> sizes = part.sizes().vec();
    sizes[static_cast<size_t>(dim)] = head.entries;
    parts.push_back(at::empty(sizes, part.options()));
    places.push_back(buffers_of(parts.back()));
  }
  g.all_gather(buffers_of(part), places, d, static_cast<size_t>(part.element_size()));
  return at::cat(parts, dim);
}

}  // namespace

TorchBackend::WorkPtr TorchBackend::allreduce_sparse(Tensors& tensors,
                                                     const c10d::AllreduceOptions& o) {
  const at::Tensor& t = tensors[0];
  TORCH_CHECK_TYPE(t.is_cpu() && t.layout() == at::kSparse,
                   "fsccl: all_reduce takes dense tensors, and sparse ones (COO) on the CPU, got ",
                   t.layout(), " on ", t.device());
  TORCH_CHECK_VALUE(o.reduceOp.op_ == c10d::ReduceOp::SUM,
                    "fsccl: all_reduce of sparse tensors sums only");
  TORCH_CHECK_VALUE(t.dim() <= static_cast<int64_t>(kMostDims), "fsccl: all_reduce of a sparse ",
                    "tensor of ", digits(t.dim()), " dimensions: expected at most ",
                    digits(kMostDims));
  const at::Tensor mine = t.detach().coalesce();
  return run_on_host(
      {c10d::OpType::ALLREDUCE, "fsccl:all_reduce", o.asyncOp, o.timeout}, tensors,
      [t, mine](Group& g, const Deadline& d) {
        const at::NoGradGuard no_grad;
        const auto heads = exchange_heads(g, SparseHead(mine), d);
        const at::Tensor indices =
            gather_along(g, mine.indices().contiguous(), 1, heads, d);
        const at::Tensor values = gather_along(g, mine.values().contiguous(), 0, heads, d);
        t.copy_(at::_sparse_coo_tensor_unsafe(indices, values, t.sizes(), t.options()).coalesce());
      });
}

}  // namespace fsccl
