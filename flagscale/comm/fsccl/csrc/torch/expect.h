// What is asked of the tensors of a call, and the messages where it does not hold.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

namespace fsccl {

// A number in a message of TORCH_CHECK, which would write it by a C++ stream. In a process with
// torch on Ubuntu 24.04 (gcc 13) streams read no numbers, and a message that wrote some ended the
// process.
template <class T>
std::string digits(T number) {
  return std::to_string(number);
}

inline void require_dense(const at::Tensor& t, const char* op) {
  TORCH_CHECK_TYPE(!t.is_sparse() && t.layout() == at::kStrided, "fsccl: ", op,
                   " needs dense tensors, got ", t.layout());
}

// Lists that hold one entry a device in torch's interface, of which there is always one.
template <class T>
T& only(std::vector<T>& list, const char* op) {
  TORCH_CHECK_VALUE(list.size() == 1, "fsccl: ", op, " takes one tensor a rank, got ",
                    digits(list.size()));
  return list[0];
}

inline void expect_ranks(size_t found, int ranks, const char* op) {
  TORCH_CHECK_VALUE(found == static_cast<size_t>(ranks), "fsccl: ", op,
                    " needs one tensor for each of ", digits(ranks), " ranks, got ",
                    digits(found));
}

inline void expect_root(int root, int ranks, const char* op) {
  TORCH_CHECK_VALUE(root >= 0 && root < ranks, "fsccl: ", op, ": root ", digits(root),
                    " is not in the group of ", digits(ranks), " ranks");
}

// What is gathered from this rank, and its place.
inline void expect_own_place(const at::Tensor& place, const at::Tensor& own, const char* op) {
  TORCH_CHECK_VALUE(place.numel() == own.numel(), "fsccl: ", op, ": this rank's place has ",
                    digits(place.numel()), " elements for ", digits(own.numel()));
}

inline void expect_times(const at::Tensor& whole, const at::Tensor& part, int ranks,
                         const char* op) {
  TORCH_CHECK_VALUE(
      whole.numel() == part.numel() * ranks && whole.scalar_type() == part.scalar_type(),
      "fsccl: ", op, ": ", digits(whole.numel()), " elements of ", whole.scalar_type(), " are not ",
      digits(ranks), " times ", digits(part.numel()), " of ", part.scalar_type());
}

inline void expect_type(const std::vector<at::Tensor>& list, const at::Tensor& like,
                        const char* op) {
  for (const at::Tensor& t : list) {
    TORCH_CHECK_TYPE(t.scalar_type() == like.scalar_type(), "fsccl: ", op, ": tensors of ",
                     t.scalar_type(), " and of ", like.scalar_type());
  }
}

}  // namespace fsccl
