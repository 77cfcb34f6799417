// Argument checks of the collectives, with their error messages.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

namespace fsccl {

// Formats a number for a message of TORCH_CHECK, which would use a C++ stream. In a process with
// torch on Ubuntu 24.04 (gcc 13), formatting a number with a C++ stream ended the process.
template <class T>
std::string digits(T number) {
  return std::to_string(number);
}

inline void check_dense(const at::Tensor& t, const char* op) {
  TORCH_CHECK_TYPE(!t.is_sparse() && t.layout() == at::kStrided, "fsccl: ", op,
                   " needs dense tensors, got ", t.layout());
}

// Returns the only entry of a list with one entry per device of a rank: a rank has one device.
template <class T>
T& single_entry(std::vector<T>& list, const char* op) {
  TORCH_CHECK_VALUE(list.size() == 1, "fsccl: ", op, " takes one tensor per rank, got ",
                    digits(list.size()));
  return list[0];
}

inline void check_rank_count(size_t count, int ranks, const char* op) {
  TORCH_CHECK_VALUE(count == static_cast<size_t>(ranks), "fsccl: ", op,
                    " needs one tensor for each of ", digits(ranks), " ranks, got ", digits(count));
}

inline void check_root(int root, int ranks, const char* op) {
  TORCH_CHECK_VALUE(root >= 0 && root < ranks, "fsccl: ", op, ": root ", digits(root),
                    " is not in the group of ", digits(ranks), " ranks");
}

// Checks that this rank's entry in the output list of an all_gather fits its input.
inline void check_own_output(const at::Tensor& output, const at::Tensor& input, const char* op) {
  TORCH_CHECK_VALUE(output.numel() == input.numel(), "fsccl: ", op,
                    ": the output for this rank has ", digits(output.numel()),
                    " elements and its input ", digits(input.numel()));
}

// Checks that `whole` consists of one tensor like `part` per rank.
inline void check_whole_and_part(const at::Tensor& whole, const at::Tensor& part, int ranks,
                                 const char* op) {
  TORCH_CHECK_VALUE(
      whole.numel() == part.numel() * ranks && whole.scalar_type() == part.scalar_type(),
      "fsccl: ", op, ": ", digits(whole.numel()), " elements of ", whole.scalar_type(), " are not ",
      digits(ranks), " times ", digits(part.numel()), " of ", part.scalar_type());
}

inline void check_same_dtype(const std::vector<at::Tensor>& list, const at::Tensor& reference,
                             const char* op) {
  for (const at::Tensor& t : list) {
    TORCH_CHECK_TYPE(t.scalar_type() == reference.scalar_type(), "fsccl: ", op, ": tensors of ",
                     t.scalar_type(), " and of ", reference.scalar_type());
  }
}

}  // namespace fsccl
