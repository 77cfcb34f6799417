// Python's global interpreter lock (GIL).
//
// A thread without the GIL may need it at any time: torch takes it when the last reference but that
// of its Python object to a tensor is dropped (c10/util/intrusive_ptr.h). So no thread may wait for
// a lock or for another thread while it holds the GIL.
#pragma once

#include <Python.h>

namespace fsccl {

// Releases the GIL for a scope, if this thread holds it.
class GilRelease {
 public:
  GilRelease() : saved_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;
  ~GilRelease() {
    if (saved_ != nullptr) PyEval_RestoreThread(saved_);
  }

 private:
  PyThreadState* saved_;
};

}  // namespace fsccl
