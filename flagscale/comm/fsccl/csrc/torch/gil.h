// Python's global interpreter lock (GIL).
//
// A thread without the GIL may need it at any time: torch takes it when the last C++ reference to a
// tensor is dropped that still has a Python object (c10/util/intrusive_ptr.h). So no thread may wait
// for a lock or for another thread while it holds the GIL: a GilRelease precedes the lock or the
// wait in the same scope, so that the lock is also released before the GIL is taken again.
#pragma once

#include <Python.h>

namespace fsccl {

// Releases the GIL until the end of the scope, if this thread holds it.
class [[nodiscard]] GilRelease {
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
